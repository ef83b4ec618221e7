"""Which of a round's uploads no trained client sends: pure comparisons with the last models and with the others'.

Whoever may upload may be broken, or lie. Admission has seen to layouts and to finite numbers; here numbers that are
finite and absurd are told from those that training makes. What honest clients send was measured (docs/quarantine.md):
in one round a task model's matrices move by 0.04 to 0.26 of their norm, those of its head by up to 1.5. Scaled by 3 or
with its sign turned, a model moves by 2.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import gradient_names
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import AnyTaskSpec

Answers: TypeAlias = Callable[[Parameters], "Tensor | None"]
"""A parameter set -> what a task model with it answers to a fixed input; None: it is no task model's."""

Squares: TypeAlias = "dict[int, tuple[Parameters, dict[str, float]]]"
"""Of models that clients began with, by identity: each and the squared norms of its matrices."""

MAX_VALUE = 1e6
"""No weight and no statistic of a network on pictures in [-1, 1] comes near."""

MAX_BATCHES = 1 << 40
"""More mini-batches than BatchNorm has ever counted."""

MAX_SAMPLES_A_ROUND = 10_000_000
"""More labelled samples than a device meets in one round."""

_ANSWERED = 30.0
"""So much any model may answer to a fixed input, whatever its base and others do."""

_ENOUGH = 2
"""Others that a median is taken of; fewer may all be wrong."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One upload as it is compared.

    Attributes:
        artefacts: all that was uploaded.
        bases: the parameter sets of the download that it was trained from.
        num_samples: real samples behind it, as the client says; None where its method doesn't say.
        gradients: names of sets that are no models; training is not what moves them.
    """

    artefacts: Artefacts
    bases: Mapping[str, Parameters]
    num_samples: int | None
    gradients: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is compared with others: a number, and what it may be however the others are, alone or among others."""

    what: str
    value: float
    alone: float
    floor: float
    times: float


class TaskAnswers:
    """Runs task models on one fixed input of noise.

    Args:
        task: what they are models of.
    """

    def __init__(self, task: AnyTaskSpec) -> None:
        self._module = build_task_model(task).eval()
        self._own = self._module.state_dict()
        rng = torch.Generator().manual_seed(0)
        self._pictures = torch.empty(2, *task.image_shape).uniform_(-1, 1, generator=rng)

    def __call__(self, parameters: Parameters) -> Tensor | None:
        if not _is_like(self._own, parameters := dict(parameters)):
            return None
        with torch.inference_mode():
            for name, tensor in self._own.items():
                tensor.copy_(parameters[name])
            answers: Tensor = self._module(self._pictures)
        return answers


def answers_of(task: AnyTaskSpec) -> Answers:
    """Return ``TaskAnswers``, made when it is asked for the first time."""
    made = functools.cache(lambda: TaskAnswers(task))
    return lambda parameters: made()(parameters)


def candidate_of(upload: Any, download: Any) -> Candidate:
    """Return what is compared of an upload, and of the download that its client started from."""
    packed = download.pack().parameter_sets
    bases = {name: packed[name] for name in packed.keys() - gradient_names(type(download))}
    return Candidate(upload.pack(), bases, getattr(upload, "num_samples", None), gradient_names(type(upload)))


def screen(candidates: Mapping[ClientId, Candidate], answers: Answers, max_change: float) -> dict[ClientId, str]:
    """Return whose uploads may not be aggregated, and why; first each alone, then those that are left among themselves.

    Args:
        candidates: client -> upload.
        answers: runs a task model.
        max_change: how far a task model's matrices may move in one round, in their norm.
    """
    known: dict[int, tuple[Parameters, Tensor | None]] = {}
    sizes: Squares = {}

    def remembered(parameters: Parameters) -> Tensor | None:  # most clients began with the same model
        if id(parameters) not in known:
            known[id(parameters)] = (parameters, answers(parameters))
        return known[id(parameters)][1]

    looks = {client_id: _look(one, answers, remembered, max_change, sizes) for client_id, one in candidates.items()}
    found = {client_id: look for client_id, look in looks.items() if isinstance(look, str)}
    measured = {client_id: look for client_id, look in looks.items() if not isinstance(look, str)}
    values: defaultdict[str, list[float]] = defaultdict(list)
    for own in measured.values():
        for key, one in own.items():
            if not math.isnan(one.value):
                bisect.insort(values[key], one.value)
    for client_id, own in measured.items():
        for key, one in own.items():
            limit = one.alone
            if len(values[key]) > _ENOUGH:
                limit = min(one.alone, max(one.floor, one.times * _median_of_others(values[key], one.value)))
            if not one.value <= limit:  # NaN fails
                found[client_id] = f"{one.what} is {one.value:.3g}, at most {limit:.3g} is plausible"
                break
    return dict(sorted(found.items()))


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of rising values without one that is ``own``."""
    place = bisect.bisect_left(ordered, own)

    def other(index: int) -> float:
        return ordered[index + (index >= place)]

    middle, is_odd = divmod(len(ordered) - 1, 2)
    return other(middle) if is_odd else (other(middle - 1) + other(middle)) / 2


def _look(
    one: Candidate, answers: Answers, remembered: Answers, max_change: float, sizes: Squares
) -> str | dict[str, _Measured]:
    """Return what can't be, or what is compared with others'."""
    # read, or made, once for all that is asked of it
    sets = {name: dict(sent) for name, sent in sorted(one.artefacts.parameter_sets.items())}
    return _impossible(one, sets) or _measures(one, sets, answers, remembered, max_change, sizes)


def _impossible(one: Candidate, sets: Mapping[str, Parameters]) -> str:
    """Return what can't be, whoever else is there; empty if nothing is."""
    if one.num_samples is not None and one.num_samples > MAX_SAMPLES_A_ROUND:
        return f"num_samples is {one.num_samples}, at most {MAX_SAMPLES_A_ROUND} is plausible in one round"
    for name, parameters in sets.items():
        for key, tensor in parameters.items():
            if not tensor.numel():
                continue
            if not tensor.is_floating_point():
                if key.endswith("num_batches_tracked") and not 0 <= int(tensor.max()) <= MAX_BATCHES:
                    return f"{name}: {key} is {int(tensor.max())}, 0 to {MAX_BATCHES} are plausible"
                continue
            least, most = map(float, tensor.aminmax())
            if not (largest := max(-least, most)) <= MAX_VALUE:
                return f"{name}: {key} holds {largest:.3g}, at most {MAX_VALUE:g} is plausible"
            if key.endswith("running_var") and least < 0:
                return f"{name}: {key} holds a negative variance, {least:.3g}"
    return ""


def _measures(
    one: Candidate,
    sets: Mapping[str, Parameters],
    answers: Answers,
    remembered: Answers,
    max_change: float,
    sizes: Squares,
) -> dict[str, _Measured]:
    """Return what is compared with others', by a key that tells like from like."""
    found: dict[str, _Measured] = {}
    if one.num_samples is not None:
        found["samples"] = _Measured("num_samples", one.num_samples, math.inf, 10_000, 64)
    generators = []
    for name, parameters in sets.items():
        if name in one.gradients:
            found[name] = _Measured(f"{name}: its norm", _norm(list(parameters.values())), math.inf, 100, 100)
            continue
        matrices = _matrices(parameters)
        starts = [base for base in one.bases.values() if _is_like(base, parameters)]
        if name.startswith("sub-generator/"):
            generators.append(_norm(list(matrices.values())))
        elif starts and matrices:
            nearest, start = min(
                ((_changes(matrices, start, sizes), start) for start in starts),
                key=lambda one: math.inf if math.isnan(one[0][""]) else one[0][""],
            )
            moved = _vectors(name, parameters, start)
            moved[name] = _Measured(f"{name}: its change in this round", nearest.pop(""), max_change, max_change / 2, 4)
            for key, change in nearest.items():
                what = f"{name}: the change of {key} in this round"
                moved[f"{name} {key}"] = _Measured(what, change, 4 * max_change, 1.75, 3)
            # An upload is finite by now: where its start isn't, its client trained from the model that it had before.
            if all(math.isfinite(one.value) for one in moved.values()):
                found |= moved
        said = answers(parameters)
        if said is not None:
            largest = float(said.abs().max())
            bases = () if largest <= _ANSWERED else one.bases.values()
            earlier = [answered for base in bases if (answered := remembered(base)) is not None]
            usual = max([1.0, *(float(answered.abs().max()) for answered in earlier)])
            what = f"{name}: its largest answer to a fixed input"
            found[f"{name} answers"] = _Measured(what, largest, 1000 * usual, _ANSWERED * usual, 30)
    if generators:
        found["generators"] = _Measured("the largest norm of a sub-generator", max(generators), math.inf, 0.0, 2.5)
    return found


def _vectors(name: str, parameters: Parameters, start: Parameters) -> dict[str, _Measured]:
    """Return by how much an entry of each vector moved at most: a bias far below 0 ends a channel for everybody.

    In rounds of honest clients weights and biases moved by up to 0.6; statistics of BatchNorm by up to 8, and by 500 of
    one that trained at ten times the usual step.
    """
    found = {}
    for key, tensor in parameters.items():
        if not tensor.is_floating_point() or tensor.ndim != 1 or not tensor.numel():
            continue
        before = start[key]
        usual = max(1.0, float(before.abs().max()))
        alone, floor, times = (1e5, 1000.0, 100.0) if "running_" in key else (100.0, 3.0, 10.0)
        what = f"{name}: what {key} moved by in this round"
        moved = float((tensor - before).abs().max())
        found[f"{name} {key}"] = _Measured(what, moved, alone * usual, floor * usual, times)
    return found


def _matrices(parameters: Parameters) -> dict[str, Tensor]:
    """Return weights of convolutions and linear layers: BatchNorm's vectors start at 0 and 1, and move far at once."""
    return {key: tensor for key, tensor in parameters.items() if tensor.is_floating_point() and tensor.ndim > 1}


def _is_like(base: Parameters, parameters: Parameters) -> bool:
    """Whether it is a model of the same layout."""
    return base.keys() == parameters.keys() and all(base[key].shape == parameters[key].shape for key in base)


def _square(tensor: Tensor) -> float:
    return float(tensor.to(torch.float64).square().sum())


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(map(_square, tensors)))


def _changes(matrices: Mapping[str, Tensor], base: Parameters, sizes: Squares) -> dict[str, float]:
    """Return by how much of its norm each matrix moved from ``base``, and under the empty name all together."""
    if id(base) not in sizes:  # most clients began with the same model
        sizes[id(base)] = (base, {key: _square(base[key]) for key in matrices})
    moved, before = {key: _square(matrices[key] - base[key]) for key in matrices}, sizes[id(base)][1]
    squares = {"": (sum(moved.values()), sum(before.values()))} | {key: (moved[key], before[key]) for key in matrices}
    return {key: math.sqrt(change) / max(math.sqrt(size), 1e-12) for key, (change, size) in squares.items()}
