"""FedAvg without training: what is left of a round is the fleet's own work. ``deployed_round`` installs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.task_method import AveragingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle(AveragingMethod):
    """Every client sends back what it got, moved by about a millionth: its own, as if it had been trained."""

    name: ClassVar[str] = "idle"

    def local_work(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, TaskUpload]]:
        yield from ()
        moved = {
            name: value * (1 + 1e-6 * (1 + torch.rand((), generator=rng))) if value.is_floating_point() else value
            for name, value in download.task_parameters.items()
        }
        return state, TaskUpload(moved, len(data.labels))
