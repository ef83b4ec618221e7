"""What a fleet agrees on: its method, its task, their settings by name."""
