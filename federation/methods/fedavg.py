"""FedAvg: train locally, average by data volume.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.
Differences from the paper: BatchNorm statistics are averaged like parameters.
It keeps nothing of earlier rounds, so it forgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from federation.methods.lockstep import TrainTaskModel, Work, alone
from federation.methods.records import ClientId, RoundData, Sampler
from federation.methods.steps.grouped_task_model import TaskModelJob
from federation.methods.steps.task_model import Optimisation
from federation.methods.task_method import TaskMethod, average_by_volume, one_model_for_all
from federation.methods.task_records import NoState, TaskDownload, TaskModels, TaskUpload


@dataclass(frozen=True, kw_only=True, slots=True)
class FedAvg(TaskMethod):
    """Both halves of the method; settings are those of ``TaskMethod``."""

    name: ClassVar[str] = "fedavg"

    def local_round(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, TaskUpload]:
        """Train the average model on this round's data alone (ClientUpdate)."""
        return alone(self.local_work(state, data, download, rng, sampler=sampler))

    def local_work(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, TaskUpload]]:
        """Be ``local_round``, but ask for the training, so that many clients' networks can train as one."""
        del sampler
        job = TaskModelJob(download.task_parameters, data.images, data.labels, rng)
        parameters = yield TrainTaskModel(self.task, job, Optimisation.of(self))
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
        return one_model_for_all(state, uploads, average_by_volume(uploads))
