"""Rounded models: which clients want one, what it is calibrated and judged with, and what their downloads become."""
