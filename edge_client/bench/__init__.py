"""``edge-client bench``: what this machine serves with, how quickly, and in how much memory."""
