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

SETTINGS = ("paper", "small", "demo", "tiny")
"""Names of ``--settings``: the paper's own, a simulation's on two cores, ``make demo``'s, a test's."""

_TINY_TASK_MODEL = {"local_epochs": 2, "batch_size": 16}
_SMALL_TASK_MODEL = {"local_epochs": 8}
_DEMO_TASK_MODEL = {"local_epochs": 8, "batch_size": 32, "weight_decay": 0.001}

_SHORT_GAN = {
    "gan_batch_size": 32,
    "gan_learning_rate": 0.001,
    "gan_beta1": 0.0,
    "critic_steps_per_generator_step": 2,
}
"""Ten times the paper's step size, for schedules of some 300 critic steps: at the paper's they learn nothing yet."""

_SHORT_AGGREGATION = {
    "replay_per_client": 128,
    "aggregation_filter": "average",
    "aggregation_epochs": 10,
    "aggregation_batch_size": 32,
    "aggregation_learning_rate": 0.03,
}

_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "centralized": _SMALL_TASK_MODEL,
        "fedavg": _SMALL_TASK_MODEL,
        "pfedgrp": {
            **_SMALL_TASK_MODEL,
            **_SHORT_GAN,
            **_SHORT_AGGREGATION,
            "sub_generator_epochs": 60,
        },
    },
    "demo": {
        "centralized": _DEMO_TASK_MODEL,
        "fedavg": _DEMO_TASK_MODEL,
        "pfedgrp": {
            **_DEMO_TASK_MODEL,
            **_SHORT_GAN,
            **_SHORT_AGGREGATION,
            "sub_generator_epochs": 75,
        },
    },
    "tiny": {
        "centralized": _TINY_TASK_MODEL,
        "fedavg": _TINY_TASK_MODEL,
        "pfedgrp": {
            **_TINY_TASK_MODEL,
            "sub_generator_epochs": 2,
            "critic_steps_per_generator_step": 1,
            "gan_batch_size": 16,
            "gate_samples": 16,
            "max_tries_factor": 2,
            "replay_per_client": 32,
            "aggregation_epochs": 2,
        },
    },
}
"""Preset -> method -> the fields that differ from the method's defaults."""

_PAPER_BY_IMAGE_SIZE: dict[int, dict[str, dict[str, Any]]] = {
    32: {"pfedgrp": {"sub_generator_epochs": 500}},
    64: {"pfedgrp": {"sub_generator_epochs": 1000}},
}
"""Where the paper's settings depend on the data set (appendix B.2); the defaults are those for 28 pixels."""


def task_for(dataset: str) -> TaskSpec:
    """Return the task of a data set.

    Raises:
        SettingsError: No such data set; names the nearest.
    """
    try:
        return TASKS[dataset]
    except KeyError:
        raise SettingsError(f"unknown data set {dataset!r}{nearest(dataset, TASKS)}") from None


def settings_for(method: str, name: str, image_size: int = 28) -> dict[str, Any]:
    """Return the fields, other than ``task``, that preset ``name`` changes in ``method``'s defaults.

    Raises:
        SettingsError: No such preset; names the nearest.
    """
    if name not in SETTINGS:
        raise SettingsError(f"unknown settings {name!r}{nearest(name, SETTINGS)}")
    presets: Mapping[str, Mapping[str, Any]] = (
        _PAPER_BY_IMAGE_SIZE.get(image_size, {}) if name == "paper" else _PRESETS[name]
    )
    return dict(presets.get(method, {}))
