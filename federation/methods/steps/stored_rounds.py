"""What a client keeps that stores every sample it ever met."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.packing import COUNT, OneSet
from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData

STORED = "stored/"

_ALL_ROUNDS = "samples"


@dataclass(frozen=True, slots=True)
class StoredRounds:
    """All real samples a client met, round by round: what is stored once is never written again.

    Attributes:
        rounds: in the order they were met, ``images`` (B, C, H, W) and ``labels`` (B, ...) of each.
    """

    rounds: tuple[Parameters, ...] = ()

    def with_round(self, data: RoundData) -> StoredRounds:
        """Return the store with a round's samples behind the earlier ones."""
        return StoredRounds((*self.rounds, {"images": data.images, "labels": data.labels}))

    def all_of(self, name: str) -> Tensor:
        """Return the images, or the labels, of all rounds, (B, ...)."""
        return torch.cat([met[name] for met in self.rounds])

    def pack(self) -> Artefacts:
        """Return ``stored/0``, ``stored/1`` and so on."""
        sets = {f"{STORED}{index}": met for index, met in enumerate(self.rounds)}
        return Artefacts(sets, {"num_rounds": len(self.rounds)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> StoredRounds:
        """Return the store again, also one that Centralized packed when it kept all rounds as a single set."""
        if not artefacts.facts and artefacts.parameter_sets.keys() <= {_ALL_ROUNDS}:
            return cls(tuple(artefacts.parameter_sets.values()))
        num_rounds = COUNT.decoded(artefacts.facts.get("num_rounds"), "num_rounds")
        if num_rounds != len(artefacts.parameter_sets):
            raise ValueError(f"num_rounds is {num_rounds}, but {len(artefacts.parameter_sets)} sets are there")
        return cls(tuple(OneSet().unpack(artefacts, f"{STORED}{index}", MISSING) for index in range(num_rounds)))
