"""``make fleet``: a fleet of any size on one machine, and what can go wrong with it."""
