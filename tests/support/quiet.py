"""Times hold on a machine with an idle core: whether this one had one while a test measured, not before."""

from __future__ import annotations

import os
import time

import psutil

IDLE_SHARE = 0.25
"""Of all cores' time: half a core of two."""


class Quiet:
    """True if others have left this machine time since this was made."""

    def __init__(self) -> None:
        self._began, self._idle_s = time.monotonic(), psutil.cpu_times().idle

    def __bool__(self) -> bool:
        passed_s = (os.cpu_count() or 1) * (time.monotonic() - self._began)
        return psutil.cpu_times().idle - self._idle_s > IDLE_SHARE * passed_s

    def within(self, seconds: float) -> float:
        """Return what to hold a time against: half a minute where nobody can say how soon something happens."""
        return seconds if self else 30.0
