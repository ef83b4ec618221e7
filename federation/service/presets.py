"""Tasks by data set, and method settings by name: the one home of the numbers behind ``--dataset`` and ``--settings``.

Plain values: importing this module imports no torch. ``paper`` means the defaults of a method, which are its paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from federation.errors import SettingsError, nearest
from models.specs import TaskSpec

_DIGITS = tuple("0123456789")
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")
_CIFAR_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

TASKS: dict[str, TaskSpec] = {
    "fashion-mnist": TaskSpec(1, 28, _FASHION, "cifar", 16),
    "mnist": TaskSpec(1, 28, _DIGITS, "cifar", 16),
    "cifar-10": TaskSpec(3, 32, _CIFAR_10, "cifar", 64),
}
"""Data set -> task, with the sub-generator widths of the paper."""

SETTINGS = ("paper", "small", "tiny")
"""Names of ``--settings``: the paper's own, a demo's on two cores, a test's."""

_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {},
    "tiny": {},
}


def task_for(dataset: str) -> TaskSpec:
    """Return the task of a data set.

    Raises:
        SettingsError: No such data set; names the nearest.
    """
    try:
        return TASKS[dataset]
    except KeyError:
        raise SettingsError(f"unknown data set {dataset!r}{nearest(dataset, TASKS)}") from None


def settings_for(method: str, name: str) -> dict[str, Any]:
    """Return the fields, other than ``task``, that preset ``name`` changes in ``method``'s defaults.

    Raises:
        SettingsError: No such preset; names the nearest.
    """
    if name not in SETTINGS:
        raise SettingsError(f"unknown settings {name!r}{nearest(name, SETTINGS)}")
    presets: Mapping[str, Mapping[str, Any]] = _PRESETS.get(name, {})
    return dict(presets.get(method, {}))
