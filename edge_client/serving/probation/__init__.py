"""The time in which a new model has to show that it can be trusted, and the way back to the one before."""
