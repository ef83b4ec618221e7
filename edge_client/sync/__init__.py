"""What goes up to the aggregator and what comes down: presence, uploads, downloads."""
