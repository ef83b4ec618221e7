"""An upload that comes after its round: what it has learned counts, the less the later.

Xie et al. 2019, "Asynchronous Federated Optimization": a model that is t rounds late is mixed into the newest one with
a share that falls with t; of their functions the polynomial one, with FedBuff's exponent (Nguyen et al. 2022).
"""

from __future__ import annotations

from typing import TypeVar

import torch

from replayfleet.federation.methods.kit.packing import (
    Record,
    alike,
    gradient_names,
    served_name,
    sub_generators_among,
)
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.steps.averaging import weighted_average

STALENESS_EXPONENT = 0.5

U = TypeVar("U", bound=Record)
_TASK = "task"


def share_of(rounds_late: int) -> float:
    """Return ``s(t) = (1 + t)^-0.5``: what a model that is t rounds late counts, 1 of one in time."""
    return float((1 + rounds_late) ** -STALENESS_EXPONENT)


def drawn_back(upload: U, newest: Record, rounds_late: int) -> U:
    """Return an upload whose models are ``(1 - s) newest + s uploaded``.

    Sub-generators, gradients and facts stay as they are: they say what the client met, however late they come.

    Args:
        upload: of a round that is over.
        newest: the download that its client has now. An uploaded model of another layout, whose head has grown since,
            stays as it is too.
        rounds_late: t, at least 1.
    """
    packed, base = upload.pack(), newest.pack().parameter_sets
    shares = torch.tensor([1 - share_of(rounds_late), share_of(rounds_late)], dtype=torch.float64)
    served, sets = served_name(type(newest)), dict(packed.parameter_sets)
    for name in sets.keys() - gradient_names(type(upload)):
        start = base.get(name, base.get(served or "") if name == _TASK else None)
        if start is None or sub_generators_among(type(upload), [name]):
            continue
        if alike(start, sets[name]):
            sets[name] = weighted_average([start, sets[name]], shares)
    return type(upload).unpack(Artefacts(sets, packed.facts))
