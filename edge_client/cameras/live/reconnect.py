"""When a live camera counts as lost, when to try again, and what is worth a line in the log. No clocks, no I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass

from replayfleet.federation.backoff import Backoff

START_LIMIT_S = 20.0
"""For a capture process to import what it needs, on a slow board that is busy."""

GRACE_S = 0.5
"""Beyond the camera's own timeouts, so that it can say itself what is wrong before its process is killed."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 0.75
"""Small, so that a camera that returns is back within seconds. Trying costs a refused connection."""

STEADY_S = 5.0
"""A camera that delivered for so long begins with the first delay again; one that comes and goes doesn't."""

RESIZE_PAUSE_S = 10.0
"""Between two lines that say that the size changed."""


class Watchdog:
    """Sees when a capture process has been silent for too long.

    Args:
        open_s: most seconds from opening the camera to its first picture.
        read_s: most seconds between two pictures.
    """

    def __init__(self, open_s: float, read_s: float) -> None:
        self._open_s = open_s + GRACE_S
        self._read_s = read_s + GRACE_S
        self._deadline = float("inf")
        self._reason = ""

    def starting(self, now: float) -> None:
        self._deadline = now + START_LIMIT_S
        self._reason = f"its process wasn't ready after {START_LIMIT_S:g} s"

    def opening(self, now: float) -> None:
        """A picture is wanted, and the camera has to be opened for it."""
        self._deadline = now + self._open_s
        self._reason = f"it hung while opening, for {self._open_s:g} s"

    def reading(self, now: float) -> None:
        """A picture is wanted of an open camera."""
        self._deadline = now + self._read_s
        self._reason = f"it hung, for {self._read_s:g} s"

    def overdue(self, now: float) -> str | None:
        """Return the reason to kill the process; None while there is none."""
        return self._reason if now >= self._deadline else None


class Reconnect:
    """How long to wait before a lost camera is tried again.

    Args:
        rng: for the jitter, which keeps many cameras of one switch from knocking together.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        self._since: float | None = None

    def delivered(self, now: float) -> None:
        if self._since is None:
            self._since = now
        elif now - self._since >= STEADY_S:
            self._backoff.reset()

    def failed(self) -> float:
        """Count a failure and return the seconds to wait: half to all of the delay."""
        self._since = None
        return self._backoff.next_s() * self._rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class News:
    """What changed with a picture.

    Attributes:
        event: the log's.
        fields: the log's.
    """

    event: str
    fields: dict[str, object]


class Story:
    """One line when a camera opens, is lost, is back, or changes size."""

    def __init__(self) -> None:
        self.lost_since: float | None = None
        self._lost_because = ""
        self.num_lost = 0
        self._size: tuple[int, int] | None = None
        self._resized_at = float("-inf")

    @property
    def trouble(self) -> str:
        """Why it gives nothing; empty while it does."""
        if self.lost_since is not None:
            return f"lost: {self._lost_because}"
        return "" if self._size else "not open yet"

    def picture(self, size: tuple[int, int], now: float) -> News | None:
        """A picture of (width, height) came; returns what is new about it."""
        lost_since, self.lost_since = self.lost_since, None
        before, self._size = self._size, size
        if lost_since is not None:
            return News("camera back", {"size": _text(size), "after_s": round(now - lost_since, 2)})
        if before is None:
            return News("camera opened", {"size": _text(size)})
        if before != size and now - self._resized_at >= RESIZE_PAUSE_S:
            self._resized_at = now
            return News("camera changed size", {"size": _text(size), "was": _text(before)})
        return None

    def lost(self, reason: str, now: float) -> News | None:
        """It can't deliver; returns None if that is known already."""
        self._lost_because = reason
        if self.lost_since is not None:
            return None
        self.lost_since = now
        self.num_lost += 1
        return News("camera lost", {"reason": reason})


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
