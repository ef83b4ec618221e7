"""Helpers that turn a method's typed values into ``Artefacts`` and back, with clear errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit.records import Artefacts, Facts, Parameters

TASK = "task"
AVERAGE = "average"
SUB_GENERATOR = "sub-generator/"
ALL_CLASSES = -1
"""The key of a generator that draws every class, where others have a class id; in names it is ``all``."""

_ALL = "all"

MAX_SAMPLES = 2**40
"""More samples than any stream has: a larger count is an error or an attack."""


def layout(module: nn.Module) -> Parameters:
    """Return a module's state dict on the meta device: names, shapes and dtypes."""
    return {name: tensor.detach().to("meta") for name, tensor in module.state_dict().items()}


def counts_to_facts(counts: Mapping[int, int]) -> dict[str, int]:
    """Return class counts with string keys, classes in rising order."""
    return {str(class_id): count for class_id, count in sorted(counts.items())}


def counts_from_facts(facts: Facts, key: str) -> dict[int, int]:
    """Return class counts again.

    Raises:
        ValueError: Not a map of class ids to counts.
    """
    raw = facts.get(key)
    if not isinstance(raw, Mapping):
        raise ValueError(f"fact {key!r} is {type(raw).__name__}, expected a map from class id to count")
    counts: dict[int, int] = {}
    for class_id, count in raw.items():
        if not (str(class_id).isdecimal() and len(str(class_id)) <= 6):
            raise ValueError(f"fact {key!r} has class id {class_id!r}, expected a non-negative whole number")
        counts[int(class_id)] = whole_number(count, f"{key}[{class_id}]")
    return counts


def whole_number(value: Any, what: str) -> int:
    """Return ``value`` if it is a count between 0 and ``MAX_SAMPLES``; bool, float and NaN are not."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SAMPLES:
        raise ValueError(f"{what} is {value!r}, expected a whole number from 0 to {MAX_SAMPLES}")
    return value


def check_counts(counts: Mapping[int, int], num_classes: int) -> None:
    """Raise ValueError unless every class id is below ``num_classes`` and at least one sample was met."""
    wrong = [class_id for class_id in counts if class_id >= num_classes]
    if wrong:
        raise ValueError(f"class {wrong[0]} was counted, but the task has classes 0 to {num_classes - 1}")
    if sum(counts.values()) == 0:
        raise ValueError("no samples were counted")


def required(artefacts: Artefacts, name: str) -> Parameters:
    """Return the parameter set ``name``.

    Raises:
        ValueError: It is not there.
    """
    if name not in artefacts.parameter_sets:
        raise ValueError(
            f"parameter set {name!r} is missing; present: {', '.join(sorted(artefacts.parameter_sets)) or 'none'}"
        )
    return artefacts.parameter_sets[name]


def by_class(artefacts: Artefacts, prefix: str = SUB_GENERATOR) -> dict[int, Parameters]:
    """Return the sets named ``<prefix><class id>``, classes in rising order; ``<prefix>all`` is ``ALL_CLASSES``."""
    keys = {name: class_key(name, prefix) for name in artefacts.parameter_sets}
    found = {key: artefacts.parameter_sets[name] for name, key in keys.items() if key is not None}
    return dict(sorted(found.items()))


def named_by_class(parameter_sets: Mapping[int, Parameters], prefix: str = SUB_GENERATOR) -> dict[str, Parameters]:
    """Return sets under the names that ``by_class`` reads."""
    return {f"{prefix}{_ALL if c == ALL_CLASSES else c}": parameters for c, parameters in parameter_sets.items()}


def class_key(name: str, prefix: str = SUB_GENERATOR) -> int | None:
    """Return the class id in a name, or ``ALL_CLASSES``; None unless ``named_by_class`` would spell it so."""
    text = name.removeprefix(prefix)
    if text == name:
        return None
    if text == _ALL:
        return ALL_CLASSES
    return int(text) if text.isdecimal() and len(text) <= 6 and str(int(text)) == text else None


def same_bits(left: Parameters, right: Parameters) -> bool:
    """Whether two parameter sets are equal to the bit."""
    return left.keys() == right.keys() and all(_equal(tensor, right[name]) for name, tensor in left.items())


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and bool(torch.equal(left, right))
