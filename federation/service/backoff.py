"""How long to wait before trying again."""

from __future__ import annotations


class Backoff:
    """Doubling delays; ``reset`` after a success.

    Args:
        first_s: the first delay.
        longest_s: no delay is longer.
    """

    def __init__(self, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        if not 0 < first_s <= longest_s:
            raise ValueError(f"first_s is {first_s}, expected more than 0 and at most longest_s ({longest_s})")
        self._first_s = first_s
        self._longest_s = longest_s
        self.attempts = 0

    def next_s(self) -> float:
        """Count a failure and return the seconds to wait."""
        self.attempts += 1
        return min(self._longest_s, self._first_s * 2.0 ** min(self.attempts - 1, 60))

    def reset(self) -> None:
        """Begin with the first delay again."""
        self.attempts = 0
