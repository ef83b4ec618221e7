"""Records of methods whose aggregator makes images without data: task models and class counts up, replay down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch

from replayfleet.federation.methods.kit.packing import (
    CLASS_IDS,
    CLIENT_IDS,
    COUNTS,
    OneSet,
    Record,
    check_counts,
)
from replayfleet.federation.methods.kit.records import ClientId, Parameters

IMAGES = "images"
"""The one tensor of the set ``synthetic``."""


@dataclass(frozen=True, slots=True)
class CountedUpload(Record):
    """A trained task model and what it was trained on.

    Attributes:
        task_parameters: its parameters.
        counts: class id -> real samples of this round.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    counts: Annotated[Mapping[int, int], COUNTS]

    @property
    def num_samples(self) -> int:
        return sum(self.counts.values())

    def check(self, num_classes: int) -> None:
        """Raise ValueError if a class doesn't exist, or one was counted without samples, or there are none at all."""
        check_counts(self.counts, num_classes)
        empty = [class_id for class_id, count in self.counts.items() if count == 0]
        if empty:
            raise ValueError(f"class {empty[0]} was counted with 0 samples, expected at least 1")


@dataclass(frozen=True, slots=True)
class SynthesisDownload(Record):
    """What a client gets for a round.

    Attributes:
        task_parameters: the average model: what the device serves, and the teacher of this round's distillation.
        generator: parameters that draw replay; empty before the first aggregation, or if the method sends images.
        synthetic: ``images`` (B, C, H, W) uint8; empty before the first aggregation, or if a generator is sent.
        seen: classes that any client met so far, in rising order.
    """

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    generator: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    synthetic: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    seen: Annotated[tuple[int, ...], CLASS_IDS] = ()

    def __post_init__(self) -> None:
        _check_synthetic(self.synthetic)


@dataclass(frozen=True, slots=True)
class SynthesisState(Record):
    """What the aggregator remembers between rounds. Optimisers are made anew in every round.

    Attributes:
        average: mean of the last round's task models; empty before the first.
        generator: the generator, trained on from round to round.
        synthetic: ``images`` (B, C, H, W) uint8 of the last round; empty if the method sends its generator.
        seen: classes that any client met so far, in rising order.
        clients: ids of all clients that ever uploaded, sorted.
    """

    average: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    generator: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    synthetic: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    seen: Annotated[tuple[int, ...], CLASS_IDS] = ()
    clients: Annotated[tuple[ClientId, ...], CLIENT_IDS] = ()

    def __post_init__(self) -> None:
        _check_synthetic(self.synthetic)


def _check_synthetic(synthetic: Parameters) -> None:
    images = synthetic.get(IMAGES)
    if synthetic and (images is None or len(synthetic) > 1 or images.dtype != torch.uint8 or images.ndim != 4):
        raise ValueError(f"parameter set 'synthetic' must be one tensor {IMAGES!r} (B, C, H, W) uint8")
