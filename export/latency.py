"""How long a model takes, side by side with another in one run: only ratios survive a busy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

WARM_UP_TURNS = 2


def median_latencies_s(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 50, budget_s: float = 1.0
) -> dict[str, float]:
    """Return the median seconds of each call, run in turns so that all meet the same noise.

    Args:
        calls: name -> what to time.
        repeats: turns after the warm-up.
        budget_s: no turn begins after this many seconds, but each call is timed at least once.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + budget_s
    for turn in range(repeats + WARM_UP_TURNS):
        if turn > WARM_UP_TURNS and time.perf_counter() > deadline:
            break
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn >= WARM_UP_TURNS:
                samples[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in samples.items()}
