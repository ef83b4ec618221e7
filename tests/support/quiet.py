"""Times hold on a machine with an idle core: whether this one had one while a test measured, not before."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import psutil

IDLE_SHARE = 0.25
"""Of all cores' time: half a core of two."""
WAITED_SHARE = 0.05
"""Of the time: so long anything at all may have waited for a core, for it may have been what is measured."""


class Quiet:
    """True if others have left this machine time since this was made."""

    def __init__(self) -> None:
        self._began, self._idle_s, self._waited_s = time.monotonic(), psutil.cpu_times().idle, _waited_s()

    def __bool__(self) -> bool:
        passed_s = time.monotonic() - self._began
        idle_s = psutil.cpu_times().idle - self._idle_s
        idles = idle_s > IDLE_SHARE * (os.cpu_count() or 1) * passed_s
        return idles and _waited_s() - self._waited_s < WAITED_SHARE * passed_s

    def within(self, seconds: float) -> float:
        """Return what to hold a time against: half a minute where nobody can say how soon something happens."""
        return seconds if self else 30.0


def _waited_s() -> float:
    """Seconds since the start of Linux in which something waited for a core; 0 where the kernel doesn't count them."""
    with contextlib.suppress(OSError):
        if found := re.search(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text(encoding="ascii")):
            return int(found[1]) / 1e6
    return 0.0
