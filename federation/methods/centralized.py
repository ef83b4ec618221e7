"""Centralized: each client trains on all the data it ever met, alone; regret is measured against it.

Section 5.1 and appendix B.1 of pFedGRP. Despite its name nothing is centralised: there is no aggregation, the
aggregator gives every client its own model back. It stores all real samples on the client.
Differences from the paper: ``docs/methods/centralized.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskModels, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.kept_samples import StoredRounds
from replayfleet.federation.methods.task_method import TaskMethod, require_uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Centralized(TaskMethod):
    """Both halves of the method; settings are those of ``TaskMethod``, its epochs run over all stored samples.

    Attributes:
        samples_per_round: how many of all stored samples a round trains on, drawn anew for each: a round then costs the
            same however late it is. 0 is all of them, the paper's.
    """

    name: ClassVar[str] = "centralized"
    trains_as_one: ClassVar[bool] = True
    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = StoredRounds

    samples_per_round: int = 0

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.at_least(0, self, ["samples_per_round"])

    def local_work(
        self, state: StoredRounds, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[StoredRounds, TaskUpload]]:
        """Train the client's own model on all samples met so far, or on as many of them as a round may cost."""
        stored = state.with_round(data)
        images, labels = stored.all_of("images"), stored.all_of("labels")
        if self.samples_per_round:
            drawn = torch.randperm(len(images), generator=rng)[: self.samples_per_round].to(images.device)
            images, labels = images[drawn], labels[drawn]
        parameters = yield self.training(RoundData(images, labels), download.task_parameters, rng)
        return stored, TaskUpload(parameters, len(data.labels))

    def aggregate(
        self, state: TaskModels, uploads: Mapping[ClientId, TaskUpload], rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[TaskModels, dict[ClientId, TaskDownload]]:
        """Give every client its own model back."""
        require_uploads(uploads)
        latest = {client_id: upload.task_parameters for client_id, upload in uploads.items()}
        new_state = TaskModels(dict(sorted({**state.clients, **latest}.items())))
        return new_state, {client_id: TaskDownload(parameters) for client_id, parameters in new_state.clients.items()}
