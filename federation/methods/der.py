"""DER: FedAvg whose clients keep a few real samples with the logits they once had, and hold the model to them.

Buzzega et al. 2020, "Dark Experience for General Continual Learning: a Strong, Simple Baseline", Eq. 6, in federated
learning as FedGP's Algorithm 5 has it (Dai et al. 2023, without its projection). Real samples stay on the client.
Differences from FedGP's text:

1. The term is the mean squared difference over all logits, as in both papers' code; the text has the squared norm.
2. A round's samples are offered to the reservoir once, in its first epoch; FedGP's code does so in the first round of
   each task alone, where all of a task's rounds have the same data. A last batch of one sample, which training drops,
   isn't offered.
3. The aggregator averages by data volume, as here for FedAvg; FedGP averages evenly.
4. SGD is that of all methods here (pFedGRP's B.2); FedGP's has neither momentum nor weight decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from replayfleet.federation.methods.buffered_method import BufferedMethod
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.pace import Pace
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.steps.buffered_training import Base, train_with_buffer
from replayfleet.federation.methods.steps.reservoir import Reservoir
from replayfleet.federation.methods.task_method import AveragingMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class DER(BufferedMethod, AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Other settings are ``BufferedMethod``'s.

    Attributes:
        alpha: weight of the distance to the kept logits. 0, with ``beta`` 0 too, is FedAvg.
        beta: weight of the loss on kept samples' labels (DER++); 0, without it, is DER.
    """

    name: ClassVar[str] = "der"

    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        BufferedMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["alpha", "beta"])

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
        """Minimise ``loss(new) + alpha * MSE(logits, logits when met) + beta * loss(kept)`` (DER; DER++ with beta)."""
        del sampler
        base = Base("der", self.alpha, self.beta)
        parameters, kept = train_with_buffer(self, base, download.task_parameters, data, state, rng, pace)
        return kept, TaskUpload(parameters, len(data.labels))
