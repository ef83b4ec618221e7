"""Ideal: federated averaging whose clients store every sample they ever met; an upper bound for a small buffer.

Dai et al. 2023, "FedGP", section 5.1: clients "have enough memory to store all incoming data from previous tasks and
train all tasks jointly". Not Centralized: here clients share one model, there each has its own.
Differences from the paper:

1. Every epoch goes over all stored samples, so a round costs more the later it is.
2. The aggregator averages by the number of stored samples, as FedAvg does by those trained on; the paper averages
   evenly.
3. SGD is that of all methods here (pFedGRP's B.2); the paper's has neither momentum nor weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from federation.methods import packing
from federation.methods.lockstep import InStep, TrainTaskModel, Work
from federation.methods.records import Artefacts, Parameters, RoundData, Sampler
from federation.methods.steps.grouped_task_model import TaskModelJob
from federation.methods.steps.task_model import Optimisation
from federation.methods.task_method import AveragingMethod
from federation.methods.task_records import TaskDownload, TaskUpload

STORED = "stored/"


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
        """Return the store again."""
        num_rounds = packing.whole_number(artefacts.facts.get("num_rounds"), "num_rounds")
        if num_rounds != len(artefacts.parameter_sets):
            raise ValueError(f"num_rounds is {num_rounds}, but {len(artefacts.parameter_sets)} sets are there")
        return cls(tuple(packing.required(artefacts, f"{STORED}{index}") for index in range(num_rounds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ideal(InStep, AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Epochs run over all stored samples."""

    name: ClassVar[str] = "ideal"
    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = StoredRounds

    def local_work(
        self, state: StoredRounds, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[StoredRounds, TaskUpload]]:
        """Train the average model on all samples met so far."""
        del sampler
        stored = state.with_round(data)
        images, labels = stored.all_of("images"), stored.all_of("labels")
        job = TaskModelJob(download.task_parameters, images, labels, rng)
        parameters = yield TrainTaskModel(self.task, job, Optimisation.of(self))
        return stored, TaskUpload(parameters, len(labels))
