"""When a serving process has grown so much that a fresh one should take over; decisions with ``now``, no waiting."""

from __future__ import annotations

LIMIT_BYTES = 32 << 20
"""Growth over what the process occupied soon after it began."""
SETTLES_S = 2.0
"""After that time a process has made its working memory."""
LOOK_EVERY_S = 1.0
SOON_S = 600.0
"""A model that grows again within this time needs the memory, or leaks: the limit doubles."""
MOST_TIMES = 16


class MemoryWatch:
    """Knows the process that serves, and how much it has grown.

    Args:
        limit_bytes: how much a process may grow.
        settles_s: when to begin to measure.
        look_every_s: between two looks.
    """

    def __init__(
        self, limit_bytes: int = LIMIT_BYTES, settles_s: float = SETTLES_S, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._limit_bytes = limit_bytes
        self._settles_s = settles_s
        self._look_every_s = look_every_s
        self._looked_at = float("-inf")
        self._pid: int | None = None
        self._seen_at = 0.0
        self._baseline: int | None = None
        self._exceeded_at = float("-inf")
        self._times = 1

    def due(self, now: float) -> bool:
        """Whether to look; the next look is due after a while."""
        if now - self._looked_at < self._look_every_s:
            return False
        self._looked_at = now
        return True

    def excess(self, pid: int | None, memory_bytes: int | None, now: float) -> int | None:
        """Return by how many bytes the process has grown if that is too much, else None.

        Args:
            pid: of the process that serves; None while there is none.
            memory_bytes: what it occupies; None if that can't be told.
            now: clock.
        """
        if pid is None or memory_bytes is None:
            return None
        if pid != self._pid:
            self._pid, self._seen_at, self._baseline = pid, now, None
        if self._baseline is None:
            if now - self._seen_at >= self._settles_s:
                self._baseline = memory_bytes
            return None
        growth = memory_bytes - self._baseline
        if growth <= self._times * self._limit_bytes:
            return None
        soon = now - self._exceeded_at < SOON_S
        self._times = min(MOST_TIMES, 2 * self._times) if soon else 1
        self._exceeded_at = now
        return growth
