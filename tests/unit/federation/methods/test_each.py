"""Work for many clients that whoever calls a method may spread out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from replayfleet.federation.methods.kit.each import each, spread_by


def test_it_is_done_in_order_by_the_caller_unless_somebody_spreads_it() -> None:
    done: list[int] = []
    assert each(lambda item: done.append(item) or 2 * item, [3, 1, 2]) == [6, 2, 4]
    assert done == [3, 1, 2]


def test_it_is_done_by_whoever_spreads_it_and_only_for_as_long() -> None:
    asked: list[list[Any]] = []

    def spread(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        asked.append(list(items))
        return [function(item) for item in asked[-1]]

    with spread_by(spread):
        assert each(abs, [-1, 2]) == [1, 2]
    with pytest.raises(TypeError), spread_by(spread):
        each(abs, ["broken"])
    assert each(abs, [-3]) == [3]
    assert asked == [[-1, 2], ["broken"]]


def test_what_spread_work_asks_for_in_turn_is_done_where_it_is() -> None:
    def inner(item: int) -> list[int]:
        return each(abs, [item, -item])

    with ThreadPoolExecutor(1) as pool, spread_by(lambda function, items: list(pool.map(function, items))):
        assert each(inner, [1, -2]) == [[1, 1], [2, 2]]
