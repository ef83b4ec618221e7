"""``fleet-sim table``: the papers' tables, run again and set beside the published numbers."""
