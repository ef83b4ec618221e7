"""Checks of a method's settings: what a frozen dataclass refuses to exist with."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from typing import Any

_MOST = 2**31 - 1
_MOST_TURNS = 1_000_000
"""Of epochs, steps and iterations in a round; the papers' largest is 6,000, and more would never end."""
_TURNS = ("_epochs", "_iterations", "_steps")
_LARGEST = 3.4e38
"""Of a float32, roughly."""


def at_least(minimum: int, settings: object, names: Sequence[str]) -> None:
    """Raise ValueError unless each named attribute is a whole number of at least ``minimum`` that a round can hold."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {minimum}")
        most = _MOST_TURNS if name.endswith(_TURNS) else _MOST
        if value > most:
            raise ValueError(f"{name} is {value!r}, expected a whole number of {minimum} to {most}")


def within(low: float, high: float, settings: object, names: Sequence[str]) -> None:
    """Raise ValueError unless each named attribute is a number in [low, high], finite as float32; NaN is not."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            limit = "or more" if math.isinf(high) else f"to {high:g}"
            raise ValueError(f"{name} is {value!r}, expected a number of {low:g} {limit}")
        if abs(value) > _LARGEST:
            raise ValueError(f"{name} is {value!r}, expected a number of {low:g} to {_LARGEST:g}")


def one_of(choices: Sequence[str], settings: object, name: str) -> None:
    """Raise ValueError unless the named attribute is one of ``choices``."""
    value = getattr(settings, name)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def task_kind(settings: Any) -> None:
    """Raise ValueError unless the task is of a kind that the type of the method's field ``task`` allows.

    Methods that need a class for every picture declare ``task: TaskSpec``; the others leave it at ``AnyTaskSpec``.
    """
    if not isinstance(settings.task, typing.get_type_hints(type(settings))["task"]):
        raise ValueError(
            f"method {settings.name!r} needs one class for every picture, and the task is to find boxes; "
            "docs/detection.md names the methods that learn that"
        )


def task_model_settings(settings: object) -> None:
    """Check what every method that trains a task model with SGD has."""
    at_least(1, settings, ["local_epochs"])
    at_least(2, settings, ["batch_size"])
    within(0.0, math.inf, settings, ["learning_rate", "weight_decay"])
    within(0.0, 1.0, settings, ["momentum"])
    one_of(("float32", "bfloat16"), settings, "precision")
    one_of(("constant", "cosine", "step"), settings, "learning_rate_schedule")
