"""How long to wait before trying again."""

from __future__ import annotations

import random

LONGEST_S = 3.0
"""No member of a fleet waits longer before it tries again what another one, or the broker, refused: after the end of
any trouble its next message comes within 5 s."""

_jitter = random.SystemRandom()


class Backoff:
    """Doubling delays; ``reset`` after a success.

    Args:
        first_s: the first delay.
        longest_s: no delay is longer.
        shortest_share: each delay is shortened by chance, at most to this share of it; 1 for never.
    """

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0, shortest_share: float = 1.0) -> None:
        if not 0 < first_s <= longest_s:
            raise ValueError(f"first_s is {first_s}, expected more than 0 and at most longest_s ({longest_s})")
        self._first_s = first_s
        self._longest_s = longest_s
        self._shortest_share = shortest_share
        self.attempts = 0

    def next_s(self) -> float:
        """Count a failure and return the seconds to wait."""
        self.attempts += 1
        delay_s = min(self._longest_s, self._first_s * 2.0 ** min(self.attempts - 1, 60))
        return delay_s * _jitter.uniform(self._shortest_share, 1.0)

    def reset(self) -> None:
        """Begin with the first delay again."""
        self.attempts = 0


def fleet_backoff() -> Backoff:
    """For what one member of a fleet asks of another: short, and no two of them in step."""
    return Backoff(0.5, LONGEST_S, shortest_share=0.5)
