"""How long a model takes, side by side with another in one run: only ratios survive a busy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

STEADY_TURNS = 3
"""A call is warm once that many turns in a row brought it nothing."""

MAX_WARM_UP_TURNS = 30
WARM_UP_BUDGET_S = 5.0


def median_latencies_s(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 50,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each call once it is warm, run in turns so that all meet the same noise.

    TorchScript compiles in its second or third call, which then takes hundreds of times as long: no number of turns
    fixed in advance is a warm-up.

    Args:
        calls: name -> what to time.
        repeats: turns after the warm-up.
        budget_s: no turn begins after this many seconds of them, but each call is timed at least once.
        clock: monotonic seconds.
    """
    for call in calls.values():
        warm_up(call, clock)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = clock() + budget_s
    for turn in range(repeats):
        if turn and clock() > deadline:
            break
        for name, call in calls.items():
            samples[name].append(_seconds(call, clock))
    return {name: statistics.median(values) for name, values in samples.items()}


def warm_up(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> None:
    """Call until that brings nothing more, for a few seconds at most."""
    deadline = clock() + WARM_UP_BUDGET_S
    best, steady = float("inf"), 0
    for _ in range(MAX_WARM_UP_TURNS):
        seconds = _seconds(call, clock)
        steady = 0 if seconds < 0.8 * best else steady + 1
        best = min(best, seconds)
        if steady == STEADY_TURNS or clock() > deadline:
            return


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began
