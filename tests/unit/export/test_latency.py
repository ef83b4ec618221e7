from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from replayfleet.export.latency import MAX_WARM_UP_TURNS, median_latencies_s


class Clock:
    """Seconds that pass only while a call runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def model(self, seconds: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.now += next(seconds)

        return call


def test_a_model_that_compiles_in_its_second_and_third_call_is_timed_once_it_is_warm() -> None:
    clock = Clock()
    script = clock.model(chain([0.005, 0.733, 0.7], repeat(0.001)))
    eager = clock.model(repeat(0.004))
    found = median_latencies_s({"script": script, "eager": eager}, clock=clock)
    assert found == {"script": pytest.approx(0.001), "eager": pytest.approx(0.004)}


def test_the_warm_up_costs_nothing_of_the_time_that_is_measured() -> None:
    clock, timed = Clock(), []
    slow = chain(repeat(0.9, 4), repeat(0.1))

    def call() -> None:
        seconds = next(slow)
        timed.append(seconds)
        clock.now += seconds

    median_latencies_s({"model": call}, repeats=5, budget_s=10.0, clock=clock)
    assert timed[-5:] == [0.1] * 5


def test_a_warm_up_ends_though_every_call_is_quicker_than_the_one_before() -> None:
    clock, calls = Clock(), [0]

    def call() -> None:
        calls[0] += 1
        clock.now += 0.7 ** calls[0]

    median_latencies_s({"model": call}, repeats=1, clock=clock)
    assert calls[0] == MAX_WARM_UP_TURNS + 1


def test_a_slow_model_is_warmed_up_and_timed_no_longer_than_it_must() -> None:
    clock, calls = Clock(), [0]

    def call() -> None:
        calls[0] += 1
        clock.now += 60.0

    assert median_latencies_s({"model": call}, clock=clock) == {"model": 60.0}
    assert calls[0] == 2
