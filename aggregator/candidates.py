"""Whom a round that fails is aggregated without: who breaks it alone, then who breaks it among the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from replayfleet.federation.errors import is_out_of_memory, told
from replayfleet.federation.methods.kit.records import ClientId

MAX_TRIES = 64
"""Of groups that may go together: each costs an aggregation."""

_SOME = 3
"""Uploads that go together: who doesn't go with them isn't tried with others."""

U = TypeVar("U")
R = TypeVar("R")


def settle(
    candidates: Mapping[ClientId, U],
    attempt: Callable[[Mapping[ClientId, U]], R],
    trial: Callable[[Mapping[ClientId, U]], object],
    rehearse: Callable[[Mapping[ClientId, U]], object],
) -> tuple[R | None, dict[ClientId, str]]:
    """Aggregate as many candidates as go together.

    A function of its arguments, so that a restart finds the same again. Errors of disk and memory are no upload's, and
    pass through.

    Args:
        candidates: client -> upload.
        attempt: aggregates; raises if it can't.
        trial: the same for one, to learn whether it breaks the round alone; nobody uses what it makes.
        rehearse: the same for several.

    Returns:
        The outcome, None if there is none without the last candidate; and who was left out, with the error.
    """
    left_out: dict[ClientId, str] = {}
    left = dict(candidates)
    error = None
    if left:
        outcome, error = _tried(attempt, left)
        if outcome is not None:
            return outcome, {}
    if len(left) > 1:
        for client_id, upload in candidates.items():
            _, own_error = _tried(trial, {client_id: upload})
            if own_error is not None:
                left_out[client_id] = _told(own_error)
                del left[client_id]
        if left_out and left:
            outcome, error = _tried(attempt, left)
            if outcome is not None:
                return outcome, left_out
        together = _Groups(rehearse).largest(left)
        if together and 2 * len(together) >= len(left):  # a few of many don't speak for the fleet
            outcome, _ = _tried(attempt, together)
        if outcome is not None:
            return outcome, left_out | dict.fromkeys(left.keys() - together.keys(), _told(error))
    return None, left_out | dict.fromkeys(left, _told(error, "with no upload can the round be aggregated"))


class _Groups(Generic[U]):
    """Looks for uploads that go together, by halves: few that break it among many are found with few aggregations.

    A half that goes is what others are added to, so that one upload which spoils every mixture is left out and not
    those beside it, wherever it stands in the order.
    """

    def __init__(self, rehearse: Callable[[Mapping[ClientId, U]], object]) -> None:
        self._rehearse = rehearse
        self._tries = MAX_TRIES
        self._spoilers: set[ClientId] = set()

    def largest(self, group: Mapping[ClientId, U]) -> Mapping[ClientId, U]:
        """Return the largest part of a group that was found to go together; empty if there is none."""
        halves = _halves(group)
        found: list[Mapping[ClientId, U]] = [half for half in halves if self._goes(half)]
        if not found:
            found = [part for half in halves if len(half) > 1 and (part := self.largest(half))]
        if not found:
            return {}
        base = max(reversed(found), key=len)  # of two alike the first is left out
        others = {c: upload for c, upload in group.items() if c not in base and c not in self._spoilers}
        return self._grown(base, others)

    def _grown(self, base: Mapping[ClientId, U], others: Mapping[ClientId, U]) -> Mapping[ClientId, U]:
        """Return a group that goes, with all of the others that go with it."""
        both = dict(sorted({**base, **others}.items()))
        if not others or self._goes(both):
            return both
        if len(others) > 1:
            for half in _halves(others):
                base = self._grown(base, half)
        elif len(base) >= _SOME:
            self._spoilers |= others.keys()
        return base

    def _goes(self, group: Mapping[ClientId, U]) -> bool:
        if not self._tries or not group:
            return False
        self._tries -= 1
        return _tried(self._rehearse, group)[1] is None


def _halves(group: Mapping[ClientId, U]) -> tuple[dict[ClientId, U], dict[ClientId, U]]:
    """Return the first and the second half of a group."""
    items = sorted(group.items())
    return dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])


def _tried(
    function: Callable[[Mapping[ClientId, U]], R], uploads: Mapping[ClientId, U]
) -> tuple[R | None, Exception | None]:
    try:
        return function(uploads), None
    except Exception as error:  # whatever the method makes of numbers that nobody foresaw
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        return None, error


def _told(error: Exception | None, what: str = "with it the round can't be aggregated") -> str:
    return "" if error is None else f"{what}: {told(error)}"[:500]
