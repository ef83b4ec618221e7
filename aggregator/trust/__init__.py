"""Whose keys count, and what the fleet signs with its own."""
