"""``make demo``: a small fleet as real processes, watched while it learns."""
