"""The same work for many clients: a method asks for it with ``each``, and whoever calls the method may spread it out.

So methods know no threads. The items' order and bits don't depend on who does the work: whatever is random is drawn
before, or from a generator of the item's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Map = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


def _one_by_one(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [function(item) for item in items]


_MAP: ContextVar[Map] = ContextVar("each", default=_one_by_one)


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, in order; at the same time where ``spread_by`` says how."""
    return _MAP.get()(function, items)


def by_groups(items: Sequence[T], key: Callable[[T], Any], together: Callable[[list[T]], Sequence[R]]) -> list[R]:
    """Return what ``together`` makes of the items, group by group of equal keys, in the order of the items."""
    made: dict[int, R] = {}
    for value in sorted({key(item) for item in items}):
        places = [place for place, item in enumerate(items) if key(item) == value]
        made.update(zip(places, together([items[place] for place in places]), strict=True))
    return [made[place] for place in range(len(items))]


@contextlib.contextmanager
def spread_by(spread: Map) -> Iterator[None]:
    """Let ``spread(function, items)`` do what ``each`` is asked for by the calling thread."""
    token = _MAP.set(spread)
    try:
        yield
    finally:
        _MAP.reset(token)
