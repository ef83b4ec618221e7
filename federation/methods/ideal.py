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

from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import InStep, TrainTaskModel, Work
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from replayfleet.federation.methods.steps.task_model import Optimisation
from replayfleet.federation.methods.task_method import AveragingMethod


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
