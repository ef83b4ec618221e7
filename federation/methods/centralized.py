"""Centralized: each client trains on all the data it ever met, alone; regret is measured against it.

Section 5.1 and appendix B.1 of pFedGRP. Despite its name nothing is centralised: there is no aggregation, the
aggregator gives every client its own model back. It stores real samples on the client, which no other method here does.
Differences from the paper: none known; like the other methods it goes on from its last model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from federation.methods import checks
from federation.methods.records import Artefacts, ClientId, Parameters, RoundData, Sampler
from federation.methods.steps.task_model import Optimisation, train_task_model
from federation.methods.task_records import (
    TaskDownload,
    TaskModels,
    TaskUpload,
    check_task_upload,
    task_upload_layout,
)
from models.build import build_task_model, initialise
from models.specs import TaskSpec


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """All real samples a client met.

    Attributes:
        samples: ``images`` (B, C, H, W) float32 and ``labels`` (B,) int64; empty before the first round.
    """

    samples: Mapping[str, Tensor] = field(default_factory=dict)

    def with_round(self, data: RoundData) -> StoredSamples:
        """Return the store with a round's samples behind the earlier ones."""
        if not self.samples:
            return StoredSamples({"images": data.images, "labels": data.labels})
        return StoredSamples(
            {
                "images": torch.cat([self.samples["images"], data.images]),
                "labels": torch.cat([self.samples["labels"], data.labels]),
            }
        )

    def pack(self) -> Artefacts:
        """Return ``samples``."""
        return Artefacts({"samples": self.samples} if self.samples else {})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> StoredSamples:
        """Return the store again."""
        return cls(artefacts.parameter_sets.get("samples", {}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Centralized:
    """Settings and both halves of the method; defaults as in pFedGRP's experiments (its appendix B.2).

    Attributes:
        task: the classification task.
        local_epochs: epochs per round, over all stored samples.
        batch_size: samples per step.
        learning_rate: of SGD.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    name: ClassVar[str] = "centralized"
    stores_data: ClassVar[bool] = True
    Upload: ClassVar[type[Any]] = TaskUpload
    Download: ClassVar[type[Any]] = TaskDownload
    ClientState: ClassVar[type[Any]] = StoredSamples
    AggregatorState: ClassVar[type[Any]] = TaskModels

    task: TaskSpec
    local_epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        checks.task_model_settings(self)

    def initial_states(self) -> tuple[StoredSamples, TaskModels]:
        """Return (a client's state, the aggregator's state) before round 0."""
        return StoredSamples(), TaskModels()

    def initial_download(self, rng: torch.Generator) -> TaskDownload:
        """Return one random task model."""
        return TaskDownload(initialise(build_task_model(self.task), rng).state_dict())

    def local_round(
        self, state: StoredSamples, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[StoredSamples, TaskUpload]:
        """Train the client's own model on all samples met so far."""
        del sampler
        stored = state.with_round(data)
        optimisation = Optimisation.of(self)
        images, labels = stored.samples["images"], stored.samples["labels"]
        parameters = train_task_model(self.task, download.task_parameters, images, labels, optimisation, rng)
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
        if not uploads:
            raise ValueError("a round without uploads can't be aggregated")
        latest = {client_id: upload.task_parameters for client_id, upload in uploads.items()}
        new_state = TaskModels(dict(sorted({**state.clients, **latest}.items())))
        return new_state, {client_id: TaskDownload(parameters) for client_id, parameters in new_state.clients.items()}

    def download_for(self, state: TaskModels, client_id: ClientId, initial: TaskDownload) -> TaskDownload:
        """Return the client's own model, or the initial one for a client that has none."""
        return TaskDownload(state.clients[client_id]) if client_id in state.clients else initial

    def upload_layout(self, name: str) -> Parameters | None:
        """Return the layout of the one set, ``task``."""
        return task_upload_layout(self.task, name)

    def check_upload(self, upload: TaskUpload) -> None:
        """Raise ValueError if the upload says that it was trained on nothing."""
        check_task_upload(upload)
