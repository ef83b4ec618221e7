"""Replayfleet: cameras that keep learning."""
