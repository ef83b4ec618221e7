"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.01


def until(done: Callable[[], object], limit_s: float = 90.0, said: Callable[[], object] = lambda: "") -> None:
    """Return once ``done`` is true; what ``said`` returns then is told where that takes longer."""
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, f"not in {limit_s:g} s {said()}"
        time.sleep(STEP_S)
