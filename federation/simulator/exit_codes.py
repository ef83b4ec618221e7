"""Exit codes of ``fleet-sim`` that others tell apart: 0 is done, 2 what the operator wrote, 130 an interruption."""

UNFINISHED = 3
"""``--minutes`` ended a run before its last round, or a table with such runs; the same again goes on."""
