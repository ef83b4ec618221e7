"""Centralized: each client trains on all the data it ever met, alone; regret is measured against it.

Section 5.1 and appendix B.1 of pFedGRP. Despite its name nothing is centralised: there is no aggregation, the
aggregator gives every client its own model back. It stores all real samples on the client.
Differences from the paper: none known; like the other methods it goes on from its last model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayfleet.federation.methods.kit.records import ClientId, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskModels, TaskUpload
from replayfleet.federation.methods.lockstep import InStep, TrainTaskModel, Work
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from replayfleet.federation.methods.steps.task_model import Optimisation
from replayfleet.federation.methods.task_method import TaskMethod, require_uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Centralized(InStep, TaskMethod):
    """Both halves of the method; settings are those of ``TaskMethod``, its epochs run over all stored samples."""

    name: ClassVar[str] = "centralized"
    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = StoredRounds

    def local_work(
        self, state: StoredRounds, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[StoredRounds, TaskUpload]]:
        """Train the client's own model on all samples met so far."""
        del sampler
        stored = state.with_round(data)
        images, labels = stored.all_of("images"), stored.all_of("labels")
        job = TaskModelJob(download.task_parameters, images, labels, rng)
        parameters = yield TrainTaskModel(self.task, job, Optimisation.of(self))
        return stored, TaskUpload(parameters, len(data.labels))

    def aggregate(
        self,
        state: TaskModels,
        uploads: Mapping[ClientId, TaskUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[TaskModels, dict[ClientId, TaskDownload]]:
        """Give every client its own model back.

        Raises:
            ValueError: There are no uploads.
        """
        del rng, sampler
        require_uploads(uploads)
        latest = {client_id: upload.task_parameters for client_id, upload in uploads.items()}
        new_state = TaskModels(dict(sorted({**state.clients, **latest}.items())))
        return new_state, {client_id: TaskDownload(parameters) for client_id, parameters in new_state.clients.items()}
