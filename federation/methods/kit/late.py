"""An upload that comes after its round: what it has learned counts, the less the later.

Xie et al. 2019, "Asynchronous Federated Optimization": a model that is t rounds late is mixed into the newest one with
a share that falls with t; of their functions the polynomial one, with FedBuff's exponent (Nguyen et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from replayfleet.federation.methods.kit.packing import (
    Record,
    alike,
    gradient_names,
    served_name,
    sub_generators_among,
)
from replayfleet.federation.methods.kit.records import Artefacts, Parameters

STALENESS_EXPONENT = 0.5

U = TypeVar("U", bound=Record)
_TASK = "task"


def share_of(rounds_late: int) -> float:
    """Return ``s(t) = (1 + t)^-0.5``: what a model that is t rounds late counts, 1 of one in time."""
    return float((1 + rounds_late) ** -STALENESS_EXPONENT)


def drawn_back(method: Any, upload: U, newest: Record, rounds_late: int) -> U:
    """Return an upload whose models are ``(1 - s) newest + s uploaded``.

    Sub-generators, gradients and facts stay as they are: they say what the client met, however late they come.

    Args:
        method: if it has ``start_from``, that names the model of a download that training begins from; else it is the
            served one.
        upload: of a round that is over.
        newest: the download that its client has now. An uploaded model of another layout, whose head has grown since,
            stays as it is too.
        rounds_late: t, at least 1.
    """
    packed, bases = upload.pack(), newest.pack().parameter_sets
    started = str(getattr(method, "start_from", served_name(type(newest)) or ""))
    sets = dict(packed.parameter_sets)
    for name in sets.keys() - gradient_names(type(upload)):
        start = bases.get(name, bases.get(started) if name == _TASK else None)
        if start is None or sub_generators_among(type(upload), [name]):
            continue
        if alike(start, sets[name]):
            sets[name] = _Mixed(start, sets[name], share_of(rounds_late))
    return type(upload).unpack(Artefacts(sets, packed.facts))


@dataclass(frozen=True, slots=True, eq=False)
class _Mixed(Mapping[str, Tensor]):
    """Each tensor is made when it is asked for: a thousand late uploads stay in their files as others do."""

    newest: Parameters
    uploaded: Parameters
    share: float

    def __getitem__(self, name: str) -> Tensor:
        start, sent = self.newest[name], self.uploaded[name]
        if not sent.is_floating_point():  # BatchNorm's count of batches
            return sent if self.share >= 0.5 else start
        return start.double().mul(1 - self.share).add(sent, alpha=self.share).to(sent.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.uploaded)

    def __len__(self) -> int:
        return len(self.uploaded)
