"""A-GEM: FedAvg whose clients keep a few real samples, and take no step that works against them.

Chaudhry et al. 2019, "Efficient Lifelong Learning with A-GEM", Eq. 11, in federated learning as FedGP's Algorithm 6 has
it (Dai et al. 2023, without its own projection). Real samples stay on the client.
Differences from the papers:

1. The memory is a reservoir of everything met, as in FedGP; A-GEM fills its memory by task.
2. A round's samples are offered to the reservoir once, in its first epoch; FedGP's code does so in the first round of
   each task alone, where all of a task's rounds have the same data. A last batch of one sample, which training drops,
   isn't offered.
3. Momentum and weight decay come after the projection, so a step may still go a little against the buffer's gradient:
   SGD is that of all methods here (pFedGRP's B.2), the papers' has neither.
4. BatchNorm remembers the statistics of both batches of a step, as in the code of FedGP.
5. The aggregator averages by data volume, as here for FedAvg; FedGP averages evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from replayfleet.federation.methods.buffered_method import BufferedMethod
from replayfleet.federation.methods.kit.pace import Pace
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.steps.buffered_training import Base, train_with_buffer
from replayfleet.federation.methods.steps.reservoir import Reservoir
from replayfleet.federation.methods.task_method import AveragingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class AGEM(BufferedMethod, AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Settings are ``BufferedMethod``'s."""

    name: ClassVar[str] = "agem"

    def local_round(
        self,
        state: Reservoir,
        data: RoundData,
        download: TaskDownload,
        rng: torch.Generator,
        *,
        sampler: Sampler,
        pace: Pace | None = None,
    ) -> tuple[Reservoir, TaskUpload]:
        """Train on this round's data, each step's gradient projected against the buffer's (A-GEM, Eq. 11)."""
        del sampler
        parameters, kept = train_with_buffer(self, Base("agem"), download.task_parameters, data, state, rng, pace)
        return kept, TaskUpload(parameters, len(data.labels))
