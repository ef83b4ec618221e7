"""What everybody begins with: the method's own random models, or one task model that somebody trained before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replayfleet.federation.methods.kit.packing import model_fields, served_name
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.models.build import class_rows
from replayfleet.models.specs import TaskSpec


def first_download(method: Any, run_seed: int, given: Parameters | None = None) -> Any:
    """Return what clients get before round 0, equal in the simulator and in a fleet.

    Args:
        method: of the fleet.
        run_seed: what its random models are drawn from.
        given: a task model, as ``completed`` returns it, in the place of every random one.
    """
    drawn = method.initial_download(seeded_generator(run_seed, 0, "initial"))
    if given is None:
        return drawn
    return dataclasses.replace(drawn, **dict.fromkeys(_task_models(drawn), given))


def completed(method: Any, run_seed: int, parameters: Parameters, classes: Sequence[int]) -> Parameters:
    """Return a task model of some of a task's classes as one of all: rows of a class that is new to it are random.

    Args:
        method: of the fleet.
        run_seed: what the random rows are drawn from.
        parameters: of the model.
        classes: position among the fleet's classes of each of the model's; a detector has them all, in their order.

    Raises:
        ValueError: The method has no task model to begin from, or this one has other tensors; names the first.
    """
    drawn = first_download(method, run_seed)
    if served_name(type(drawn)) is None:
        raise ValueError(f"clients of method {method.name!r} don't begin with one task model")
    wanted: Parameters = getattr(drawn, _task_models(drawn)[0])
    if parameters.keys() != wanted.keys():
        name = min(parameters.keys() ^ wanted.keys())
        raise ValueError(f"tensor {name!r} is {'not expected' if name in parameters else 'missing'}")
    rows = class_rows(method.task) if isinstance(method.task, TaskSpec) else frozenset()
    return {
        name: _fitting(name, parameters[name], random, classes if name in rows else None)
        for name, random in wanted.items()
    }


def with_more_classes(method: Any, artefacts: Artefacts) -> Artefacts:
    """Return a state, packed, in which every task model has a row for each of the method's classes.

    A new class's row is the mean of the others, so its logit is the mean of theirs: it is never the largest, and until
    the class is learned no picture is taken for it. Without a bias (a cosine head) rows have one length, so that the
    mean's direction could win; there a new row is random.

    Args:
        method: whose task has new classes behind the others.
        artefacts: of the method as it was before.
    """
    wanted = method.initial_download(seeded_generator(0, 0, "initial"))
    layout: Parameters = getattr(wanted, _task_models(wanted)[0])
    rows = class_rows(method.task)
    sets = {
        name: {key: _grown(tensor, layout[key], key in rows, len(rows) > 1) for key, tensor in parameters.items()}
        if parameters.keys() == layout.keys()
        else parameters
        for name, parameters in artefacts.parameter_sets.items()
    }
    return Artefacts(sets, artefacts.facts)


def _grown(given: Any, random: Any, has_rows: bool, with_mean: bool) -> Any:
    if not has_rows:
        return given
    more = random[len(given) :]
    new = given.to(torch.float64).mean(dim=0, keepdim=True).to(given.dtype).expand_as(more) if with_mean else more
    return torch.cat([given, new])


def _task_models(download: Any) -> list[str]:
    """Return the fields with task models: those whose tensors are named as those of the one that is served."""
    fields: Mapping[str, str] = model_fields(type(download))
    served = next((field for field, name in fields.items() if name == served_name(type(download))), None)
    if served is None:
        return []
    names = getattr(download, served).keys()
    return [served, *(field for field in fields if field != served and getattr(download, field).keys() == names)]


def _fitting(name: str, given: Any, random: Any, classes: Sequence[int] | None) -> Any:
    shape = random.shape if classes is None else (len(classes), *random.shape[1:])
    if given.dtype != random.dtype or given.shape != shape:
        found = f"{given.dtype} of shape {tuple(given.shape)}"
        raise ValueError(f"tensor {name!r} is {found}, expected {random.dtype} of shape {tuple(shape)}")
    return given if classes is None else random.index_copy(0, torch.tensor(classes), given)
