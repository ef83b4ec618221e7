"""Whom a round that fails is aggregated without: who breaks it alone, then who breaks it among the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from replayfleet.federation.methods.kit.records import ClientId

MAX_LEFT_OUT_ONE_BY_ONE = 32
"""Tries of that kind: each costs an aggregation."""

U = TypeVar("U")
R = TypeVar("R")


def settle(
    candidates: Mapping[ClientId, U],
    attempt: Callable[[Mapping[ClientId, U]], R],
    trial: Callable[[Mapping[ClientId, U]], object],
) -> tuple[R | None, dict[ClientId, str]]:
    """Aggregate as many candidates as go together.

    A function of its arguments, so that a restart finds the same again. Errors of disk and memory are no upload's, and
    pass through.

    Args:
        candidates: client -> upload.
        attempt: aggregates; raises if it can't.
        trial: the same, to learn whether a few break it; nobody uses what it makes.

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
        for client_id in list(left)[:MAX_LEFT_OUT_ONE_BY_ONE]:
            rest = {c: upload for c, upload in left.items() if c != client_id}
            outcome, _ = _tried(attempt, rest) if rest else (None, None)
            if outcome is not None:
                return outcome, left_out | {client_id: _told(error)}
    return None, left_out | dict.fromkeys(left, _told(error))


def _tried(
    function: Callable[[Mapping[ClientId, U]], R], uploads: Mapping[ClientId, U]
) -> tuple[R | None, Exception | None]:
    try:
        return function(uploads), None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever the method makes of numbers that nobody foresaw
        return None, error


def _told(error: Exception | None) -> str:
    return f"with it the round can't be aggregated: {type(error).__name__}: {error}"[:500]
