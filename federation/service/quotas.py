"""How much somebody may have of something: token buckets, alone and one for each of many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class TokenBucket:
    """Fills with ``per_s`` tokens a second up to ``burst``; full at first."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._level = burst
        self._at = float("-inf")

    def take(self, cost: float, now: float) -> bool:
        """Take ``cost`` tokens if they are there; ``now`` in seconds, a clock that runs backwards fills nothing."""
        self._level = min(self._burst, self._level + self._per_s * max(0.0, now - self._at))
        self._at = now
        if not cost <= self._level:
            return False
        self._level -= cost
        return True

    def charge(self, cost: float, now: float) -> bool:
        """Take what was spent already, there or not; returns whether all of it was there."""
        self.take(0, now)
        self._level -= cost
        return self._level >= 0


class Limiter:
    """A token bucket for every key, and how often each was empty; bounded, however many keys there are.

    Args:
        per_s: of one key.
        burst: of one key.
        max_keys: kept at a time; the one that asked longest ago is forgotten.
        told_every_s: how long those that are left out are counted before the number is told.
    """

    def __init__(self, per_s: float, burst: float, max_keys: int = 4096, told_every_s: float = 10.0) -> None:
        self._per_s = per_s
        self._burst = burst
        self._max_keys = max_keys
        self._told_every_s = told_every_s
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()
        self._left_out: dict[Hashable, tuple[int, float]] = {}  # how many, since when

    def admit(self, key: Hashable, now: float) -> bool:
        """Whether there may be another one of ``key``; counts those that may not."""
        bucket = self._buckets.setdefault(key, TokenBucket(self._per_s, self._burst))
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            forgotten, _ = self._buckets.popitem(last=False)
            self._left_out.pop(forgotten, None)
        if bucket.take(1, now):
            return True
        count, since = self._left_out.get(key, (0, now))
        self._left_out[key] = (count + 1, since)
        return False

    def left_out(self, now: float) -> list[tuple[Hashable, int]]:
        """Keys of which some were left out, and how many; each number is told once, after ``told_every_s``."""
        due = [key for key, (_, since) in self._left_out.items() if abs(now - since) >= self._told_every_s]
        return [(key, self._left_out.pop(key)[0]) for key in due]
