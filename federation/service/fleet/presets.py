"""Tasks by data set, and method settings by name: the one home of the numbers behind ``--dataset`` and ``--settings``.

Plain values: importing this module imports no torch. ``paper`` means the defaults of a method, which are its paper's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.extensions import STORING_METHODS, added
from replayfleet.federation.service.fleet.class_names import (
    CARLA,
    CIFAR_10,
    CIFAR_100,
    DIGITS,
    EMNIST_BYCLASS,
    FASHION_MNIST,
)
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec

TASKS: dict[str, TaskSpec] = {
    "fashion-mnist": TaskSpec(1, 28, FASHION_MNIST, "cifar", 16),
    "mnist": TaskSpec(1, 28, DIGITS, "cifar", 16),
    "emnist-byclass": TaskSpec(1, 28, EMNIST_BYCLASS, "cifar", 16),
    "cifar-10": TaskSpec(3, 32, CIFAR_10, "cifar", 64),
    "cifar-100": TaskSpec(3, 32, CIFAR_100, "cifar", 64),
    # A quarter of the paper's width for 32 pixels: two cores train such sub-generators while the fleet drives.
    "carla-crops": TaskSpec(3, 32, CARLA, "cifar", 16),
}
"""Data set -> task, with the sub-generator widths of the paper.

Sets of image files (ImageNet-10, TinyImageNet-100, any folder) are not here: their folders name the classes.
"""

SETTINGS = ("paper", "medium", "small", "demo", "tiny")
"""Names of ``--settings``: the paper's, the same with fewer epochs, one for two cores, ``make demo``'s, a test's."""

MAX_CHANGE = 1.5
"""How far a model may move in one round, in the norm of what it was trained from, to take part in it (screening)."""

STORES_DATA = ("agem", "centralized", "der", "fedgp", "icarl", "ideal")
"""Methods whose clients keep real samples, as their ``stores_data`` says: a device tells its operator without torch."""


def stores_data(method: str) -> bool:
    """Return whether a method's clients keep real samples, those of other packages included; imports none of them."""
    return method in STORES_DATA or method in added(STORING_METHODS)


Fields = Mapping[str, Any]

_WITH_MEMORY = ("pfedgrp", "pfedgrp-plus", "fedavg-replay", "pfedgraph-replay")

_GROUPS = {
    **dict.fromkeys(_WITH_MEMORY, "memory"),
    **dict.fromkeys(("target", "lander", "sdd"), "images"),
    **dict.fromkeys(("agem", "der", "fedgp"), "buffer"),
}
"""Method -> the group whose fields it has, beside its own and those of its task model."""

_AS = {"pfedgrp-plus": "pfedgrp"}
"""Method -> the one whose own fields it has too."""

_DEMO: dict[str, Fields] = {
    "task-model": {"local_epochs": 8, "batch_size": 32, "weight_decay": 0.001},
    "memory": {
        # Ten times the paper's step size, for some 300 critic steps: at the paper's they learn nothing yet.
        "gan_learning_rate": 0.001,
        "gan_beta1": 0.0,
        "gan_batch_size": 32,
        "critic_steps_per_generator_step": 2,
        "sub_generator_epochs": 75,
        # Still minutes per class on two cores: diffusion models are for GPUs.
        "ddpm_epochs": 60,
        "ddpm_width": 16,
        "ddpm_batch_size": 32,
        "ddpm_sampling_steps": 10,
    },
    # 40 generator steps per round on 64 images, with a quarter of the reference's channels: ten seconds on two cores.
    "images": {
        "synthesis_rounds": 4,
        "synthesis_batch_size": 64,
        "generator_width": 16,
        "synthetic_batch_size": 64,
    },
    "pfedgrp": {
        "replay_per_client": 128,
        "aggregation_filter": "average",
        "aggregation_epochs": 10,
        "aggregation_batch_size": 32,
        "aggregation_learning_rate": 0.07,
        "aggregation_momentum": 0.8,
        "aggregation_patience": 2,
    },
    "lander": {"warm_up_rounds": 1, "student_steps": 10, "synthetic_batch_size": 32},
    "sdd": {"synthesis_rounds": 12, "synthesis_steps": 10, "warm_up_rounds": 3, "student_steps": 10},
    # As many generator steps as TARGET's and LANDER's.
    "mfcl": {"generator_steps": 40, "generator_batch_size": 64, "generator_width": 16, "synthetic_batch_size": 64},
    # Task models of their own: ten times the reference's step size, for fewer and cheaper mini-batches.
    "fedcil": {"width": 16, "local_iterations": 90, "gan_learning_rate": 0.001, "server_iterations": 30},
    "affcl": {"flow_hidden": 128, "local_iterations": 40, "adam_learning_rate": 0.001, "flow_learning_rate": 0.001},
}

_SMALLER: dict[str, Fields] = {
    # Twice as many epochs change Centralized by 2.1 points at most, by one or more in 2 rounds of 10: docs/results.md.
    "task-model": {"learning_rate_schedule": "cosine"},
    "memory": {"gan_batch_size": 16, "sub_generator_epochs": 120},  # 840 critic steps on 100 images; the paper: 800
    # Joined: normalised by small batches of two classes, both methods remember less (docs/experiments.md).
    "images": {"synthetic_batch_size": 32, "passes": "joined", "generator_width": 64},
    "lander": {"synthetic_batch_size": 16},
    "mfcl": {"synthetic_batch_size": 32, "generator_width": 64},
    "fedcil": {"width": 64},
    "affcl": {"flow_hidden": 512},
    # Of all that a client ever met: as many as its four newest rounds have.
    "centralized": {"samples_per_round": 800},
}
"""What ``small`` has in place of ``demo``'s: step sizes that fall, longer schedules, baselines at their own width."""

_MEDIUM: dict[str, Fields] = {"task-model": {"local_epochs": 5}}
"""What ``medium`` has in place of the paper's."""

_TINY: dict[str, Fields] = {
    "task-model": {"local_epochs": 2, "batch_size": 16},
    "memory": {
        "gan_batch_size": 16,
        "critic_steps_per_generator_step": 1,
        "sub_generator_epochs": 2,
        "gate_samples": 16,
        "max_tries_factor": 2,
        "ddpm_epochs": 1,
        "ddpm_width": 4,
        "ddpm_batch_size": 8,
        "ddpm_sampling_steps": 2,
    },
    "images": {
        "synthesis_steps": 1,
        "synthesis_batch_size": 8,
        "generator_width": 4,
        "synthetic_batch_size": 8,
    },
    "buffer": {"buffer_size": 16, "buffer_batch_size": 8},
    "pfedgrp": {"replay_per_client": 32, "aggregation_epochs": 2, "aggregation_patience": 2},
    "fedgp": {"reference_samples": 8},
    "icarl": {"buffer_size": 16},
    "target": {"synthesis_rounds": 2},
    "lander": {"synthesis_rounds": 2, "warm_up_rounds": 1, "student_steps": 1},
    "sdd": {"synthesis_rounds": 3, "warm_up_rounds": 0, "student_steps": 1, "replay_per_class": 4},
    "mfcl": {"generator_steps": 2, "generator_batch_size": 16, "generator_width": 4, "synthetic_batch_size": 8},
    "fedcil": {"width": 4, "local_iterations": 4, "gan_batch_size": 8, "server_iterations": 2},
    "affcl": {"flow_hidden": 16, "local_iterations": 3, "replay_batch_size": 8},
}

_PRESETS: dict[str, dict[str, Fields]] = {
    "medium": _MEDIUM,
    "small": {name: {**_DEMO.get(name, {}), **_SMALLER.get(name, {})} for name in (*_DEMO, *_SMALLER)},
    "demo": _DEMO,
    "tiny": _TINY,
}
"""Preset -> group or method -> the fields that differ from the method's defaults."""

_BOXES: dict[str, dict[str, Fields]] = {
    "paper": {"task-model": {"batch_size": 16, "weight_decay": 0.0005}, "buffer": {"buffer_batch_size": 16}},
    "medium": {
        "task-model": {"local_epochs": 5, "batch_size": 16, "weight_decay": 0.0005},
        "buffer": {"buffer_batch_size": 16},
    },
    "small": {
        "task-model": {"local_epochs": 10, "batch_size": 8, "weight_decay": 0.0005},
        "buffer": {"buffer_batch_size": 8},
        # Its epochs run over all that was met so far: two then cost what ten do of those who replay.
        "ideal": {"local_epochs": 2},
    },
    "demo": {
        "task-model": {"local_epochs": 4, "batch_size": 8, "weight_decay": 0.0005},
        "buffer": {"buffer_batch_size": 8},
        "ideal": {"local_epochs": 1},
    },
    "tiny": {
        "task-model": {"local_epochs": 1, "batch_size": 4, "weight_decay": 0.0005},
        "buffer": {"buffer_size": 8, "buffer_batch_size": 4},
        "fedgp": {"reference_samples": 4},
    },
}
"""What detectors have in place of ``_PRESETS``. Weight decay is that of YOLO's authors, under ``paper`` too.

At ``small`` a run of any method takes at most ten minutes on one core: some 18,000 pictures at 25 ms each.
"""

_FEDCIL_FOR_CIFAR = {"width": 128, "gan_learning_rate": 2e-4, "gan_beta2": 0.999, "gan_weight_decay": 0.0}

_PAPER_BY_IMAGE_SIZE: dict[int, dict[str, dict[str, Any]]] = {
    32: {
        **{name: {"sub_generator_epochs": 500} for name in _WITH_MEMORY},
        "fedcil": _FEDCIL_FOR_CIFAR,
        "affcl": {"flow_hidden": 1024},
    },
    64: {
        **{name: {"sub_generator_epochs": 1000, "ddpm_epochs": 6000} for name in _WITH_MEMORY},
        "fedcil": _FEDCIL_FOR_CIFAR,
        "affcl": {"flow_hidden": 2048},
    },
}
"""Where the paper's settings depend on the data set (appendix B.2); the defaults are those for 28 pixels."""


_AT_PAPERS_SIZE = ("paper", "medium")

_PIXELS_BY_IMAGE_SIZE: dict[int, Fields] = {
    32: {"pixel_mean": -0.05, "pixel_std": 0.5},
    64: {"pixel_mean": -0.09, "pixel_std": 0.55},
}
"""Mean and standard deviation of photographs in the scale [-1, 1], for any preset; the defaults are Fashion-MNIST's."""


def settings_for_task(
    method: str, name: str, task: AnyTaskSpec, *, known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the fields that preset ``name`` changes for this task, in the simulator and in the deployed fleet alike.

    That is ``settings_for`` at the task's image size, or ``detector_settings_for``; args and errors are theirs.
    """
    if isinstance(task, DetectionSpec):
        return detector_settings_for(method, name, known=known)
    return settings_for(method, name, task.image_size, known=known)


def settings_for(
    method: str, name: str, image_size: int = 28, *, known: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the fields, other than ``task``, that preset ``name`` changes in ``method``'s defaults.

    Args:
        method: a key of ``METHODS``; one without an entry of its own gets what all task models get.
        name: of the preset.
        image_size: of the data set; the paper's settings depend on it.
        known: the method's settings; the task model's that it hasn't are left out. None means that it has all.

    Raises:
        SettingsError: No such preset; names the nearest.
    """
    if name not in SETTINGS:
        raise SettingsError(f"unknown settings {name!r}{nearest(name, SETTINGS)}")
    pixels = _PIXELS_BY_IMAGE_SIZE.get(image_size, {}) if method == "mfcl" else {}
    own = {} if name == "paper" else _fields(method, _PRESETS[name], known)
    by_size = _PAPER_BY_IMAGE_SIZE.get(image_size, {}).get(method, {}) if name in _AT_PAPERS_SIZE else {}
    return {**by_size, **own, **pixels}


def detector_settings_for(method: str, name: str, *, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return what ``settings_for`` does, for a task of detection.

    Raises:
        SettingsError: No such preset; names the nearest.
    """
    if name not in SETTINGS:
        raise SettingsError(f"unknown settings {name!r}{nearest(name, SETTINGS)}")
    return _fields(method, _BOXES[name], known)


def _fields(method: str, preset: Mapping[str, Fields], known: Collection[str] | None) -> dict[str, Any]:
    task_model = {key: value for key, value in preset["task-model"].items() if known is None or key in known}
    own = preset.get(_AS.get(method, method), {})
    return {**task_model, **preset.get(_GROUPS.get(method, ""), {}), **own}
