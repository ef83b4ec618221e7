from __future__ import annotations

from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.tables.wording import range_of, seeds_named


def test_one_is_singular():
    assert [count_of(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [count_of(number, "class") for number in (1, 2)] == ["1 class", "2 classes"]


def test_what_varies_is_a_range():
    assert range_of([1, 1], "client") == "1 client"
    assert range_of([20, 5, 10], "client") == "5 to 20 clients"


def test_seeds_are_named():
    assert seeds_named([3]) == "seed 3"
    assert seeds_named([0, 2]) == "seeds 0, 2"
