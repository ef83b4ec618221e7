"""The fleet in a browser: a process of its own, which reads what the aggregator keeps and asks its loop for more."""
