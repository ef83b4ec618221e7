"""The live stream as people see it: drawn, shown in a window, written to a film."""
