"""How long the rest of a table will take, from how long runs of the same methods took so far."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a run, or what was done of one.

    Attributes:
        method: its name; runs of one method take about as long per client and round.
        num_client_rounds: rounds times clients.
        seconds: what they took; 0 for work that is still to be done.
    """

    method: str
    num_client_rounds: int
    seconds: float = 0.0


def seconds_left(done: Sequence[Work], running: Sequence[Work], waiting: Sequence[Work], num_jobs: int) -> float | None:
    """Return how long ``num_jobs`` processes need for what is running and waiting, begun in that order.

    A method that was never measured is taken to be as slow as the slowest that was. None if nothing was measured.
    """
    speeds = _seconds_per_client_round(done)
    if not speeds:
        return None
    unknown = max(speeds.values())

    def seconds(work: Work) -> float:
        return work.num_client_rounds * speeds.get(work.method, unknown)

    ends = [seconds(work) for work in running]
    ends += [0.0] * max(0, num_jobs - len(ends))
    heapq.heapify(ends)
    for work in waiting:
        heapq.heapreplace(ends, ends[0] + seconds(work))
    return max(ends)


def _seconds_per_client_round(done: Sequence[Work]) -> Mapping[str, float]:
    seconds: dict[str, float] = {}
    rounds: dict[str, int] = {}
    for work in done:
        if work.num_client_rounds > 0:
            seconds[work.method] = seconds.get(work.method, 0.0) + work.seconds
            rounds[work.method] = rounds.get(work.method, 0) + work.num_client_rounds
    return {method: seconds[method] / rounds[method] for method in seconds}
