"""What SDD's aggregator sends down, and what it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch

from replayfleet.federation.methods.kit.packing import CLASS_IDS, CLIENT_IDS, OneSet, Record, SetsByClass
from replayfleet.federation.methods.kit.records import ClientId, Parameters
from replayfleet.federation.methods.synthesis_records import IMAGES

SyntheticByClass = Mapping[int, Parameters]
"""Class id -> ``images`` (B, C, H, W) uint8."""


@dataclass(frozen=True, slots=True)
class Download(Record):
    """What a client gets for a round.

    Attributes:
        task_parameters: the global model, which the client serves and starts from, and which labels replay.
        synthetic: the replay buffer; a class whose images are the last round's isn't sent again.
        seen: classes that any client met so far, in rising order.
    """

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    synthetic: Annotated[SyntheticByClass, SetsByClass("synthetic/")] = field(default_factory=dict)
    seen: Annotated[tuple[int, ...], CLASS_IDS] = ()

    def __post_init__(self) -> None:
        _check(self.synthetic)


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        average: the global model; empty before round 0's end.
        generator: the conditional generator of the last round.
        synthetic: the replay buffer.
        seen: classes that any client met so far, in rising order.
        clients: ids of all clients that ever uploaded, sorted.
    """

    average: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    generator: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    synthetic: Annotated[SyntheticByClass, SetsByClass("synthetic/")] = field(default_factory=dict)
    seen: Annotated[tuple[int, ...], CLASS_IDS] = ()
    clients: Annotated[tuple[ClientId, ...], CLIENT_IDS] = ()

    def __post_init__(self) -> None:
        _check(self.synthetic)


def _check(synthetic: SyntheticByClass) -> None:
    for class_id, tensors in synthetic.items():
        images = tensors.get(IMAGES)
        if images is None or len(tensors) > 1 or images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(f"'synthetic/{class_id}' must be one tensor {IMAGES!r} (B, C, H, W) uint8")
