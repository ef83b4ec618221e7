"""FedAvg: train locally, average by data volume.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.
Differences from the paper: BatchNorm statistics are averaged like parameters.
It keeps nothing of earlier rounds, so it forgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from federation.methods import checks
from federation.methods.records import ClientId, Parameters, RoundData, Sampler
from federation.methods.steps.averaging import weighted_average
from federation.methods.steps.task_model import Optimisation, train_task_model
from federation.methods.task_records import (
    NoState,
    TaskDownload,
    TaskModels,
    TaskUpload,
    check_task_upload,
    task_upload_layout,
)
from models.build import build_task_model, initialise
from models.specs import TaskSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FedAvg:
    """Settings and both halves of the method; defaults as in pFedGRP's experiments (its appendix B.2).

    Attributes:
        task: the classification task.
        local_epochs: epochs per round.
        batch_size: samples per step.
        learning_rate: of SGD.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    name: ClassVar[str] = "fedavg"
    stores_data: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = TaskUpload
    Download: ClassVar[type[Any]] = TaskDownload
    ClientState: ClassVar[type[Any]] = NoState
    AggregatorState: ClassVar[type[Any]] = TaskModels

    task: TaskSpec
    local_epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        checks.task_model_settings(self)

    def initial_states(self) -> tuple[NoState, TaskModels]:
        """Return (a client's state, the aggregator's state) before round 0."""
        return NoState(), TaskModels()

    def initial_download(self, rng: torch.Generator) -> TaskDownload:
        """Return one random task model."""
        return TaskDownload(initialise(build_task_model(self.task), rng).state_dict())

    def local_round(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, TaskUpload]:
        """Train the average model on this round's data alone (ClientUpdate)."""
        del sampler
        optimisation = Optimisation.of(self)
        parameters = train_task_model(self.task, download.task_parameters, data.images, data.labels, optimisation, rng)
        return state, TaskUpload(parameters, len(data.labels))

    def aggregate(
        self,
        state: TaskModels,
        uploads: Mapping[ClientId, TaskUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[TaskModels, dict[ClientId, TaskDownload]]:
        """Average the uploads by the number of samples behind each (Algorithm 1, last line of the server).

        Raises:
            ValueError: There are no uploads.
        """
        del rng, sampler
        if not uploads:
            raise ValueError("a round without uploads can't be aggregated")
        ordered = [uploads[client_id] for client_id in sorted(uploads)]
        sizes = torch.tensor([upload.num_samples for upload in ordered], dtype=torch.float64)
        average = weighted_average([upload.task_parameters for upload in ordered], sizes / sizes.sum())
        known = sorted(state.clients.keys() | uploads.keys())
        new_state = TaskModels(dict.fromkeys(known, average), average)
        return new_state, {client_id: TaskDownload(average) for client_id in known}

    def download_for(self, state: TaskModels, client_id: ClientId, initial: TaskDownload) -> TaskDownload:
        """Return the average model, the same for everybody."""
        del client_id
        return TaskDownload(state.common) if state.common else initial

    def upload_layout(self, name: str) -> Parameters | None:
        """Return the layout of the one set, ``task``."""
        return task_upload_layout(self.task, name)

    def check_upload(self, upload: TaskUpload) -> None:
        """Raise ValueError if the upload says that it was trained on nothing."""
        check_task_upload(upload)
