"""``edge-client doctor``: what this board can do, proved, and what to do about the rest."""
