"""Records of methods whose aggregator makes images without data: task models and class counts up, replay down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.records import Artefacts, ClientId, Facts, Parameters

GENERATOR = "generator"
SYNTHETIC = "synthetic"
IMAGES = "images"
"""The one tensor of the set ``synthetic``."""


@dataclass(frozen=True, slots=True)
class CountedUpload:
    """A trained task model and what it was trained on.

    Attributes:
        task_parameters: its parameters.
        counts: class id -> real samples of this round.
    """

    task_parameters: Parameters
    counts: Mapping[int, int]

    @property
    def num_samples(self) -> int:
        """Real samples of this round."""
        return sum(self.counts.values())

    def pack(self) -> Artefacts:
        """Return ``task``."""
        return Artefacts({packing.TASK: self.task_parameters}, {"counts": packing.counts_to_facts(self.counts)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> CountedUpload:
        """Return the upload again."""
        return cls(packing.required(artefacts, packing.TASK), packing.counts_from_facts(artefacts.facts, "counts"))

    def check(self, num_classes: int) -> None:
        """Raise ValueError if a class doesn't exist, or one was counted without samples, or there are none at all."""
        packing.check_counts(self.counts, num_classes)
        empty = [class_id for class_id, count in self.counts.items() if count == 0]
        if empty:
            raise ValueError(f"class {empty[0]} was counted with 0 samples, expected at least 1")


@dataclass(frozen=True, slots=True)
class SynthesisDownload:
    """What a client gets for a round.

    Attributes:
        task_parameters: the average model: what the device serves, and the teacher of this round's distillation.
        generator: parameters that draw replay; empty before the first aggregation, or if the method sends images.
        synthetic: ``images`` (B, C, H, W) uint8; empty before the first aggregation, or if a generator is sent.
        seen: classes that any client met so far, in rising order.
    """

    task_parameters: Parameters
    generator: Parameters = field(default_factory=dict)
    synthetic: Parameters = field(default_factory=dict)
    seen: tuple[int, ...] = ()

    def pack(self) -> Artefacts:
        """Return ``task``, ``generator`` and ``synthetic``."""
        sets = {packing.TASK: self.task_parameters, GENERATOR: self.generator, SYNTHETIC: self.synthetic}
        return Artefacts({name: parameters for name, parameters in sets.items() if parameters}, {"seen": [*self.seen]})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> SynthesisDownload:
        """Return the download again."""
        return cls(
            task_parameters=packing.required(artefacts, packing.TASK),
            generator=artefacts.parameter_sets.get(GENERATOR, {}),
            synthetic=_synthetic_from(artefacts),
            seen=seen_from_facts(artefacts.facts),
        )


@dataclass(frozen=True, slots=True)
class SynthesisState:
    """What the aggregator remembers between rounds. Optimisers are made anew in every round.

    Attributes:
        average: mean of the last round's task models; empty before the first.
        generator: the generator, trained on from round to round.
        synthetic: ``images`` (B, C, H, W) uint8 of the last round; empty if the method sends its generator.
        seen: classes that any client met so far, in rising order.
        clients: ids of all clients that ever uploaded, sorted.
    """

    average: Parameters = field(default_factory=dict)
    generator: Parameters = field(default_factory=dict)
    synthetic: Parameters = field(default_factory=dict)
    seen: tuple[int, ...] = ()
    clients: tuple[ClientId, ...] = ()

    def pack(self) -> Artefacts:
        """Return ``average``, ``generator`` and ``synthetic``."""
        sets = {packing.AVERAGE: self.average, GENERATOR: self.generator, SYNTHETIC: self.synthetic}
        return Artefacts(
            {name: parameters for name, parameters in sets.items() if parameters},
            {"seen": [*self.seen], "clients": [*self.clients]},
        )

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> SynthesisState:
        """Return the state again."""
        return cls(
            average=artefacts.parameter_sets.get(packing.AVERAGE, {}),
            generator=artefacts.parameter_sets.get(GENERATOR, {}),
            synthetic=_synthetic_from(artefacts),
            seen=seen_from_facts(artefacts.facts),
            clients=tuple(str(client_id) for client_id in artefacts.facts.get("clients", [])),
        )


def seen_from_facts(facts: Facts) -> tuple[int, ...]:
    """Return the class ids of fact ``seen``.

    Raises:
        ValueError: Not a list of whole numbers in rising order.
    """
    raw = facts.get("seen")
    if not isinstance(raw, (list, tuple)):
        raise ValueError(f"fact 'seen' is {type(raw).__name__}, expected a list of class ids")
    seen = tuple(packing.whole_number(class_id, "a class id of 'seen'") for class_id in raw)
    if list(seen) != sorted(set(seen)):
        raise ValueError(f"fact 'seen' is {list(seen)[:8]}, expected class ids in rising order")
    return seen


def _synthetic_from(artefacts: Artefacts) -> Parameters:
    found = artefacts.parameter_sets.get(SYNTHETIC, {})
    if not found:
        return {}
    if set(found) != {IMAGES} or found[IMAGES].dtype != torch.uint8 or found[IMAGES].ndim != 4:
        raise ValueError(f"parameter set {SYNTHETIC!r} must be one tensor {IMAGES!r} (B, C, H, W) uint8")
    return found
