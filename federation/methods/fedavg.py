"""FedAvg: train locally, average by data volume.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1.
Differences from the paper: ``docs/methods/fedavg.md``.

It keeps nothing of earlier rounds, so it forgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.task_method import AveragingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class FedAvg(AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``, settings are those of ``TaskMethod``."""

    name: ClassVar[str] = "fedavg"
    trains_as_one: ClassVar[bool] = True

    def local_work(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, TaskUpload]]:
        """Train the average model on this round's data alone (ClientUpdate)."""
        parameters = yield self.training(data, download.task_parameters, rng)
        return state, TaskUpload(parameters, len(data.labels))
