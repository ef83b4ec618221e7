"""``--settings`` and ``--set`` of the simulator: sizes of the stream by name, a method's fields, checked overrides.

The methods' own numbers stand in ``federation.service.fleet.presets``, which the deployed fleet reads too.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from replayfleet.federation.errors import SettingsError, nearest, told
from replayfleet.federation.extensions import is_ours
from replayfleet.federation.service.fleet.presets import SETTINGS, settings_for_task
from replayfleet.federation.service.settings import from_text, in_words
from replayfleet.federation.streams.datasets import has_boxes
from replayfleet.federation.streams.stream import DRIVING, FEW_SHOT, TASK_BY_TASK, StreamSettings, StreamSize
from replayfleet.models.specs import AnyTaskSpec

SIZES: dict[str, StreamSize] = {
    "paper": StreamSize(num_clients=10, num_rounds=None, samples_per_class=200),
    "medium": StreamSize(num_clients=10, num_rounds=30, samples_per_class=200, test_samples_per_class=0),
    "small": StreamSize(num_clients=5, num_rounds=20, samples_per_class=100, test_samples_per_class=0),
    "demo": StreamSize(num_clients=3, num_rounds=6, samples_per_class=100, test_samples_per_class=100),
    "tiny": StreamSize(num_clients=2, num_rounds=3, samples_per_class=20),
}
"""Preset -> stream. The paper: 10 clients, 200 samples per class, its T rounds; see ``_AT_64_PIXELS``."""

DRIVING_SIZES: dict[str, StreamSize] = {
    "paper": StreamSize(num_clients=2, num_rounds=None, samples_per_class=200),
    "small": StreamSize(num_clients=2, num_rounds=20, samples_per_class=40),
    "demo": StreamSize(num_clients=2, num_rounds=10, samples_per_class=40, test_samples_per_class=20),
    "tiny": StreamSize(num_clients=2, num_rounds=5, samples_per_class=10, test_samples_per_class=10),
}
"""Preset -> stream of scenario ``driving``: two vehicles (FedGP, section 5.2), four, two or one rounds in each town.

``samples_per_class`` is the most that a round takes of one class: in some stretches there are hundreds of traffic
lights and not one motorbike.
"""

BOX_SIZES: dict[str, StreamSize] = {
    "paper": StreamSize(num_clients=2, num_rounds=35, samples_per_class=200),
    "small": StreamSize(num_clients=2, num_rounds=21, samples_per_class=24, test_samples_per_class=8),
    "demo": StreamSize(num_clients=2, num_rounds=10, samples_per_class=24, test_samples_per_class=4),
    "tiny": StreamSize(num_clients=2, num_rounds=6, samples_per_class=8, test_samples_per_class=2),
}
"""Preset -> stream of scenario ``driving`` over pictures with boxes; a round takes ``samples_per_class`` in all.

FedGP's 70 rounds would leave three pictures to each.
"""

TASK_SIZES: dict[str, StreamSize] = {
    "paper": StreamSize(num_clients=10, num_rounds=None, samples_per_class=10**6, num_tasks=10, rounds_per_task=20),
    "small": StreamSize(
        num_clients=10, num_rounds=None, samples_per_class=1000, test_samples_per_class=200, rounds_per_task=20
    ),
    "demo": StreamSize(
        num_clients=3, num_rounds=None, samples_per_class=60, test_samples_per_class=30, num_tasks=3, rounds_per_task=2
    ),
    "tiny": StreamSize(
        num_clients=2, num_rounds=None, samples_per_class=12, test_samples_per_class=10, num_tasks=2, rounds_per_task=2
    ),
}
"""Preset -> stream of ``TASK_BY_TASK``; FedGP's paper: ten tasks of twenty rounds on all samples (section 5.1)."""

_SESSIONS: dict[str, Any] = {"rounds_per_task": 1, "split": "dirichlet", "dirichlet_alpha": 1.0}

FEW_SHOT_SIZES: dict[str, StreamSize] = {
    "paper": dataclasses.replace(
        TASK_SIZES["paper"], num_clients=5, num_tasks=9, base_classes=60, base_rounds=100, **_SESSIONS
    ),
    "small": dataclasses.replace(
        TASK_SIZES["small"], samples_per_class=300, num_clients=3, num_tasks=3, base_rounds=3, **_SESSIONS
    ),
    "demo": dataclasses.replace(
        TASK_SIZES["demo"], samples_per_class=200, test_samples_per_class=60, base_rounds=3, **_SESSIONS
    ),
    "tiny": dataclasses.replace(TASK_SIZES["tiny"], base_classes=4, base_rounds=1, shots=2, **_SESSIONS),
}
"""Preset -> stream of ``FEW_SHOT``; SDD's paper on CIFAR-100: 60 classes, then eight sessions of five, 5 shots."""

_AT_64_PIXELS = {"paper": 50, "medium": 50, "small": 50}
"""Preset -> samples per class at 64 pixels: appendix A.2's; ImageNet-10 then lasts for all rounds of ``small`` too."""

_PAPER_TEST_SAMPLES = {"emnist-byclass": 100, "cifar-100": 100, "tinyimagenet-100": 50}
"""Where appendix A.2 states how many test samples of a class join the test set in a round."""


def unknown_settings(name: str) -> SettingsError:
    """Return the error for a preset that doesn't exist."""
    return SettingsError(f"unknown settings {name!r}{nearest(name, SETTINGS)}")


def stream_settings(
    preset: str, dataset: str, image_size: int, overrides: Mapping[str, str], given: Mapping[str, Any]
) -> StreamSettings:
    """Return the stream of a preset.

    Args:
        preset: a key of ``SIZES``.
        dataset: its name; the paper's sizes depend on it.
        image_size: of the data set; the same.
        overrides: from ``--set``; keys that no stream has are left to the method.
        given: ``scenario``, ``seed`` and what the operator gave as options of their own; None means "not given".

    Raises:
        SettingsError: The preset is unknown, or a value is of the wrong type or range.
    """
    if preset not in SIZES:
        raise unknown_settings(preset)
    driving = given.get("scenario") == DRIVING
    by_tasks = given.get("scenario") in TASK_BY_TASK
    by_tasks_sizes = FEW_SHOT_SIZES if given.get("scenario") == FEW_SHOT else TASK_SIZES
    sizes = by_tasks_sizes if by_tasks else SIZES if not driving else BOX_SIZES if has_boxes(dataset) else DRIVING_SIZES
    size = dataclasses.asdict(sizes.get(preset, sizes["paper"]))  # ``medium`` shortens Expt. 1 to 3 alone
    if preset == "paper" and not driving and not by_tasks:
        size["test_samples_per_class"] = _PAPER_TEST_SAMPLES.get(dataset)
    if image_size == 64 and preset in _AT_64_PIXELS and not driving and not by_tasks:
        size["samples_per_class"] = _AT_64_PIXELS[preset]
    size |= _converted(StreamSize, {key: value for key, value in overrides.items() if key in size})
    return StreamSettings(**{**size, **{key: value for key, value in given.items() if value is not None}})


def method_from(kind: type[Any], task: AnyTaskSpec, preset: str, overrides: Mapping[str, str]) -> Any:
    """Return a method with a preset's fields, and with overrides on top.

    Args:
        kind: a class of ``METHODS``.
        task: what the fleet learns.
        preset: a key of ``SETTINGS``.
        overrides: from ``--set``; keys of ``StreamSize`` are passed over.

    Raises:
        SettingsError: The preset is unknown, the method lacks a key (names the nearest), or refuses a value.
    """
    stream_keys = {field.name for field in dataclasses.fields(StreamSize)}
    own = {key: value for key, value in overrides.items() if key not in stream_keys}
    known = method_fields(kind)
    if taken := sorted(stream_keys & set(known)):
        raise SettingsError(
            f"method {kind.name!r} has the setting {taken[0]}, which a stream has too: --set would never reach it; "
            "rename it"
        )
    for key in own:
        if key not in known:
            raise SettingsError(f"--set {key}: {kind.name} has no such setting{nearest(key, [*known, *stream_keys])}")
    fields = {**settings_for_task(kind.name, preset, task, known=known), **_converted(kind, own)}
    try:
        return kind(task=task, **fields)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{kind.name}: {error}") from error
    except (Exception, SystemExit) as error:
        if is_ours(kind):
            raise
        raise SettingsError(f"{kind.name}: {told(error)}") from error


def method_fields(kind: type[Any]) -> list[str]:
    """Return the names of a method's settings."""
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name != "task"]


def default_settings(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a method's settings, which are its paper's, as results have them: JSON values."""
    fields = [field for field in dataclasses.fields(kind) if field.name in method_fields(kind)]
    made = {one.name: one.default_factory() for one in fields if one.default_factory is not dataclasses.MISSING}
    defaults = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING} | made
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(defaults))
    return plain


def check_types(kind: type[Any], overrides: Mapping[str, str]) -> None:
    """Check that overrides can be read as a method's settings and a stream's, whichever of them have the key.

    Raises:
        SettingsError: A value is of the wrong type.
    """
    for owner in (StreamSize, kind):
        names = {field.name for field in dataclasses.fields(owner)}
        _converted(owner, {key: text for key, text in overrides.items() if key in names})


def settings_of(method: Any) -> dict[str, Any]:
    """Return a method's settings as plain values."""
    return {name: getattr(method, name) for name in method_fields(type(method))}


def _converted(kind: type[Any], texts: Mapping[str, str]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {key: _convert(key, text, hints[key]) for key, text in texts.items()}


def _convert(key: str, text: str, kind: Any) -> Any:
    try:
        return from_text(text, kind)
    except msgspec.DecodeError as error:
        words = in_words(kind).replace("a list", "a list in JSON, as [1, 2]")
        said = f"expected {words}" if words else str(error).replace("`", "")
        raise SettingsError(f"--set {key}={text}: {said}") from error
