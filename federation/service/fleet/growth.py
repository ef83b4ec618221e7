"""Classes that a fleet learns beside those that it began with; they come behind the others, so class ids stay.

Imports no torch: devices look here too.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence

import msgspec

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec, TaskSpec

_CLASSES = "class_names"
_UNSEEN = re.compile(r"[\u200b\u2060\ufeff]|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])")
"""Characters without width: names that differ in them look alike. A joiner in a word of Persian, say, is seen."""


def check_seen(names: Sequence[str], known: Sequence[str] = ()) -> None:
    """Refuse names that a fleet is to begin to learn beside those known; one that has such already goes on with them.

    Raises:
        SettingsError: A name holds a character that nobody sees, or looks like another one.
    """
    for name in names:
        if _UNSEEN.search(name):
            raise SettingsError(f"a class is named {name!a:.80}, expected no characters that nobody sees")
    check_apart(names, known)


def check_apart(names: Sequence[str], known: Sequence[str] = ()) -> None:
    """Refuse a name that is shown as another one, as one from a Mac is, which writes letters and their accents apart.

    Raises:
        SettingsError: There are two such, of which both are among ``names``, or one.
    """
    shown = {unicodedata.normalize("NFC", name): name for name in known}
    for name in names:
        if (other := shown.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            raise SettingsError(f"two classes are named {other!a:.80} and {name!a:.80}, which look alike")


def grown_task(task: AnyTaskSpec, names: Sequence[str]) -> AnyTaskSpec:
    """Return a task with these classes too; those that it has already stay where they are.

    Raises:
        SettingsError: It finds boxes, or its classes can't be named so.
    """
    fresh = tuple(name for name in names if name not in task.class_names)
    if fresh and not isinstance(task, TaskSpec):
        raise SettingsError("a fleet of detectors learns the classes that it began with; classifiers take more")
    try:
        return dataclasses.replace(task, class_names=(*task.class_names, *fresh))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def grown_spec(spec: FleetSpec, names: Sequence[str]) -> FleetSpec:
    """Return what a fleet agrees on once it learns these classes too.

    Raises:
        SettingsError: As ``grown_task``.
    """
    task = grown_task(task_of(spec), names)
    return msgspec.structs.replace(spec, task={**spec.task, _CLASSES: list(task.class_names)})


def extends(spec: FleetSpec, before: FleetSpec) -> bool:
    """Whether ``spec`` is ``before`` with at least one class more behind its own, and nothing else changed."""
    names, known = spec.task.get(_CLASSES), before.task.get(_CLASSES)
    if not isinstance(names, (list, tuple)) or not isinstance(known, (list, tuple)) or len(names) <= len(known):
        return False
    return plain(first_classes(spec, len(known))) == plain(before)


def first_classes(spec: FleetSpec, number: int) -> FleetSpec:
    """Return the agreement with the first ``number`` classes alone."""
    return msgspec.structs.replace(spec, task={**spec.task, _CLASSES: list(spec.task[_CLASSES])[:number]})


def plain(value: object) -> bytes:
    """Return what is the same for what differs only in tuples and lists."""
    return msgspec.msgpack.encode(value, order="deterministic")
