"""The task of a fleet, as it travels and as a spec; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec, TaskSpec, plain_task

TASK_KINDS: Mapping[str, type[AnyTaskSpec]] = {"classification": TaskSpec, "detection": DetectionSpec}
"""What ``kind`` among a task's fields may be; without one a task is a classification."""


def task_fields(task: AnyTaskSpec) -> dict[str, Any]:
    """Return a task's fields as they travel; those of a detection say so under ``kind``."""
    fields = cast("dict[str, Any]", msgspec.to_builtins(plain_task(task)))
    return {"kind": "detection", **fields} if isinstance(task, DetectionSpec) else fields


def task_kind(fields: Mapping[str, Any]) -> tuple[type[AnyTaskSpec], dict[str, Any]]:
    """Return (the class of a task's spec, its fields) from a task's fields, ``kind`` among them or not.

    Raises:
        SettingsError: Unknown kind; names the nearest.
    """
    rest = dict(fields)
    name = rest.pop("kind", "classification")
    if not isinstance(name, str) or name not in TASK_KINDS:
        raise SettingsError(f"unknown kind of task {name!r}{nearest(str(name), TASK_KINDS)}")
    return TASK_KINDS[name], rest


def task_of(spec: FleetSpec) -> AnyTaskSpec:
    """Return the task that a spec describes.

    Raises:
        SettingsError: Its fields are not those of a task.
    """
    kind, fields = task_kind(spec.task)
    try:
        return msgspec.convert(fields, type=kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"the fleet's task is not usable: {str(error).replace('`', '')}") from error
