"""Data streams, metrics, simulator, charts."""
