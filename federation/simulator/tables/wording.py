"""Words of tables that depend on a number."""

from __future__ import annotations

from collections.abc import Sequence


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: ``"1 seed"``, ``"2 seeds"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def range_of(numbers: Sequence[int], noun: str) -> str:
    """Return the same for what varies: ``"5 to 10 clients"``."""
    lowest, highest = min(numbers), max(numbers)
    return count_of(lowest, noun) if lowest == highest else f"{lowest} to {highest} {noun}s"


def seeds_named(seeds: Sequence[int]) -> str:
    """Return ``"seed 0"`` or ``"seeds 0, 2"``."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
