"""A trained model that a fleet, or a simulation, is to begin with: read from a file and held against the task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replayfleet.export.parameters import Model, read_parameter_file
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.beginning import completed
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

_ANOTHER = "class_names", "generator_width", "max_boxes"
"""What a model may have otherwise: classes are matched by name, and neither of the others is the task model's."""


def initial_parameters(path: Path, method: Any, run_seed: int) -> dict[str, torch.Tensor]:
    """Return the task model of a file, with random weights for those of the fleet's classes that it doesn't know.

    Args:
        path: what ``model-export task --split`` or ``replayfleet.export.parameters.Model.save`` wrote.
        method: the fleet's, with its task. A classifier may know some of its classes only, in another order too.
        run_seed: what the random weights are drawn from.

    Raises:
        SettingsError: It can't be read, says not what it is, isn't finite, or is a model of another task, or clients
            of this method begin with something else; says what was expected.
    """
    model, classes = _checked(path, method.task)
    parameters = {name: torch.from_numpy(array) for name, array in model.parameters.items()}
    try:
        return dict(completed(method, run_seed, parameters, classes))
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from error


def _checked(path: Path, task: AnyTaskSpec) -> tuple[Model, tuple[int, ...]]:
    """Return the model of a file, and the position among the fleet's classes of each of its own."""
    model = read_parameter_file(path).model
    kind = "detector" if isinstance(task, DetectionSpec) else "task"
    if model is None:
        raise SettingsError(
            f"{path} doesn't say what it holds; write it with `model-export {kind} --split --from RUN`, or Model.save"
        )
    if model.kind != kind:
        raise SettingsError(f"{path} holds a {model.kind} model, expected a {kind} model")
    for field in dataclasses.fields(task):
        found, expected = getattr(model.spec, field.name), getattr(task, field.name)
        if field.name not in _ANOTHER and found != expected:
            raise SettingsError(f"{path}: its model has {field.name} {found}, the fleet's has {expected}")
    names, wanted = model.spec.class_names, task.class_names
    if isinstance(task, DetectionSpec) and names != wanted:
        raise SettingsError(f"{path}: its detector finds {', '.join(names)}; the fleet's finds {', '.join(wanted)}")
    strangers = [name for name in names if name not in wanted]
    if strangers:
        raise SettingsError(f"{path}: its model knows {', '.join(strangers)}; the fleet has {', '.join(wanted)}")
    for name, tensor in model.parameters.items():
        if not np.isfinite(tensor).all():
            raise SettingsError(f"{path}: tensor {name!r} isn't finite")
    return model, tuple(wanted.index(name) for name in names)
