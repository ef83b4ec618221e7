"""The mathematics that methods share; pure functions."""
