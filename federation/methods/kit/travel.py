"""What uploads and downloads lose so that they need fewer bytes, before anybody uses their values.

Values are rounded where they are made, and both ends go on with the rounded ones; how these travel then loses nothing
more (``federation.wire.protocol.packed``). So digests, admission, golden vectors and the simulator see what devices
decode. Models may become whole steps from a model that the other end holds (``int8``). What a client's upload lost is
added to its next (error feedback: Seide et al. 2014; Karimireddy et al. 2019, Algorithm 2): nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import alike, model_fields, served_name, sub_generators_among
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Parameters
from replayfleet.federation.wire.protocol.packed import counted, from_steps

MODELS = ("float32", "float16", "int8")
SUB_GENERATORS = ("float32", "float16")

MAX_DRIFT = 0.1
"""How far a rounded model's answers to a fixed input may lie from the exact one's, of their largest."""

_REMAINDER = "remainder/"

R = TypeVar("R")
Answers = Callable[[Parameters], "Tensor | None"]


@dataclass(frozen=True, slots=True)
class Rounded:
    """One parameter set as it travels.

    Attributes:
        parameters: rounded.
        base: the set from which they are whole steps away, which the receiver holds; None if they stand alone.
        steps: of those tensors that are.
    """

    parameters: Parameters
    base: Parameters | None = None
    steps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sent:
    """A client's half of a round, rounded.

    Attributes:
        state: the client's.
        upload: what it sends.
        remainder: set -> what rounding took from it, for the next round.
        rounded: set -> how it travels; those that travel as they are aren't listed.
    """

    state: Any
    upload: Any
    remainder: Mapping[str, Parameters]
    rounded: Mapping[str, Rounded]


def rounds(method: Any) -> bool:
    """Whether a fleet with this method agreed on anything but float32."""
    return _of_models(method) != "float32" or _of_sub_generators(method) != "float32"


def sent(
    method: Any, answers: Answers, state: Any, upload: Any, download: Any, remainder: Mapping[str, Parameters]
) -> Sent:
    """Round what a client's local round made.

    Args:
        method: says how, in ``models_travel_as`` and ``sub_generators_travel_as``.
        answers: runs a task model, for the gate.
        state: after the round; sub-generators in it become those of the upload.
        upload: exact.
        download: what the round began with: the aggregator holds its models.
        remainder: what the upload before this lost.
    """
    if not rounds(method):
        return Sent(state, upload, {}, {})
    packed, bases = upload.pack(), _models(download)
    found: dict[str, Rounded] = {}
    left: dict[str, Parameters] = {}
    for name, exact in packed.parameter_sets.items():
        if sub_generators_among(type(upload), [name]):
            one = _halved(exact) if _of_sub_generators(method) == "float16" else None
        elif name in model_fields(type(upload)).values():
            owed = _sum(exact, remainder.get(name, {}))
            one = _model(method, answers, owed, [base for base in bases.values() if alike(base, exact)])
            if one is not None:
                left[name] = _sum(owed, one.parameters, -1)
            elif name in remainder:  # this one goes without it
                left[name] = remainder[name]
        else:
            one = None
        if one is not None:
            found[name] = one
    instead = {id(packed.parameter_sets[name]): one.parameters for name, one in found.items()}
    return Sent(_with(state, instead), _with(upload, instead), left, found)


def published(
    method: Any,
    answers: Answers,
    state: Any,
    downloads: Mapping[ClientId, Any],
    former: Callable[[ClientId], Any],
) -> tuple[Any, dict[ClientId, Any], list[Rounded]]:
    """Round the models of downloads, and of the aggregator's state, from which they can be made again.

    Each becomes its difference from the nearest of: the one of its name that the client has, and those of the same
    download that others get too. What several clients get is rounded once, as the first of them needs it.

    Args:
        method: says how.
        answers: runs a task model, for the gate.
        state: the aggregator's, after the round.
        downloads: client -> exact download.
        former: client -> the download that it has.
    """
    if not rounds(method):
        return state, dict(downloads), []
    known: dict[int, Rounded | None] = {}
    for client_id in sorted(downloads):
        download = downloads[client_id]
        models, before = _models(download), _models(former(client_id))
        served = served_name(type(download))
        for name in sorted(models, key=lambda one: (one == served, one)):
            exact = models[name]
            if id(exact) in known:
                continue
            others = [_as_sent(known[id(other)], other) for other in models.values() if id(other) in known]
            bases = [base for base in (*others, before.get(name, {})) if alike(base, exact)]
            known[id(exact)] = _model(method, answers, exact, bases)
    found = {place: one for place, one in known.items() if one is not None}
    instead = {place: one.parameters for place, one in found.items()}
    return _with(state, instead), {c: _with(one, instead) for c, one in downloads.items()}, list(found.values())


def with_remainder(packed: Artefacts, remainder: Mapping[str, Parameters]) -> Artefacts:
    """Return a client's state with what its upload lost beside it."""
    named = {f"{_REMAINDER}{name}": parameters for name, parameters in remainder.items()}
    return replace(packed, parameter_sets={**packed.parameter_sets, **named})


def remainder_among(artefacts: Artefacts) -> dict[str, Parameters]:
    """Return what ``with_remainder`` put beside a client's state."""
    sets = artefacts.parameter_sets.items()
    return {name.removeprefix(_REMAINDER): parameters for name, parameters in sets if name.startswith(_REMAINDER)}


def _of_models(method: Any) -> str:
    return str(getattr(method, "models_travel_as", "float32"))


def _of_sub_generators(method: Any) -> str:
    return str(getattr(method, "sub_generators_travel_as", "float32"))


def _as_sent(rounded: Rounded | None, exact: Parameters) -> Parameters:
    return exact if rounded is None else rounded.parameters


def _models(record: Any) -> dict[str, Parameters]:
    sets = record.pack().parameter_sets
    return {name: sets[name] for name in model_fields(type(record)).values() if sets.get(name)}


def _model(method: Any, answers: Answers, exact: Parameters, bases: list[Parameters]) -> Rounded | None:
    """Return a model rounded as the fleet agreed; None where it must stay exact."""
    match _of_models(method):
        case "float16":
            made = _halved(exact)
        case "int8" if bases:
            made = min((_in_steps(exact, base) for base in bases), key=_sum_of_steps)
        case _:
            return None
    return made if made is not None and _faithful(answers, exact, made.parameters) else None


def _sum_of_steps(one: Rounded) -> float:
    return sum(step * one.parameters[key].numel() for key, step in one.steps.items())


def _halved(exact: Parameters) -> Rounded | None:
    """Return a set whose floats are float16's; None if one of them is too large for that, or not finite."""
    made = {key: one.to(torch.float16).to(torch.float32) if _is_float(one) else one for key, one in exact.items()}
    whole = all(bool(torch.isfinite(one).all()) for one in made.values() if _is_float(one))
    return Rounded(made) if whole else None


def _in_steps(exact: Parameters, base: Parameters) -> Rounded:
    """Return a set whose matrices are whole steps from the base's.

    Vectors stay as they are: they are few, and a rounded variance could fall below 0.
    """
    made, steps = dict(exact), {}
    for key, tensor in exact.items():
        if _is_float(tensor) and tensor.ndim > 1 and bool(torch.isfinite(tensor).all()):
            start = base[key].detach().cpu().contiguous().numpy()
            steps[key], counts = counted(tensor.detach().cpu().contiguous().numpy(), start)
            made[key] = torch.from_numpy(from_steps(start, steps[key], counts)).to(tensor.device)
    return Rounded(made, base, steps)


def _faithful(answers: Answers, exact: Parameters, made: Parameters) -> bool:
    """Whether a model's answers survive: those of a diverged one don't, and it travels as it is."""
    right, found = answers(exact), answers(made)
    if right is None or found is None:
        return True
    return bool((right - found).abs().max() <= MAX_DRIFT * right.abs().max())


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32


def _sum(left: Parameters, right: Parameters, sign: int = 1) -> Parameters:
    """Return ``left + sign * right`` for the matrices of both, and ``left``'s other tensors."""
    if not right:
        return left
    if sign > 0:  # a task that grew has other shapes than what is owed
        fits = {key for key, one in left.items() if key in right and right[key].shape == one.shape}
        return {key: one + right[key] if key in fits else one for key, one in left.items()}
    return {key: one - right[key] for key, one in left.items() if _is_float(one) and one.ndim > 1}


def _with(record: R, instead: Mapping[int, Parameters]) -> R:
    """Return a record with some of its parameter sets, known by identity, replaced."""
    if not instead:
        return record
    packed: Artefacts = record.pack()  # type: ignore[attr-defined]
    sets = {name: instead.get(id(own), own) for name, own in packed.parameter_sets.items()}
    made: R = type(record).unpack(replace(packed, parameter_sets=sets))  # type: ignore[attr-defined]
    return made
