"""Ideal: federated averaging whose clients store every sample they ever met; an upper bound for a small buffer.

Dai et al. 2023, "FedGP", section 5.1: clients "have enough memory to store all incoming data from previous tasks and
train all tasks jointly". Not Centralized: here clients share one model, there each has its own.
Differences from the paper: ``docs/methods/ideal.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from replayfleet.federation.methods.task_method import AveragingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class Ideal(AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Epochs run over all stored samples."""

    name: ClassVar[str] = "ideal"
    trains_as_one: ClassVar[bool] = True
    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = StoredRounds

    def local_work(
        self, state: StoredRounds, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[StoredRounds, TaskUpload]]:
        """Train the average model on all samples met so far."""
        stored = state.with_round(data)
        everything = RoundData(stored.all_of("images"), stored.all_of("labels"))
        parameters = yield self.training(everything, download.task_parameters, rng)
        return stored, TaskUpload(parameters, len(everything.labels))
