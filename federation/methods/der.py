"""DER: FedAvg whose clients keep a few real samples with the logits they once had, and hold the model to them.

Buzzega et al. 2020, "Dark Experience for General Continual Learning: a Strong, Simple Baseline", Eq. 6, in federated
learning as FedGP's Algorithm 5 has it (Dai et al. 2023, without its projection). Real samples stay on the client.
Differences from the papers: ``docs/methods/der.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.buffered_method import BufferedMethod, BufferUse, Drawn
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.kept_samples import IMAGES, LABELS, LOGITS, Reservoir, as_met
from replayfleet.federation.methods.steps.task_model import judge_with, task_loss
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.models.specs import AnyTaskSpec

TARGETS = ("met", "round")
"""When the kept logits were said: as a sample was met, or by the model that the round began with."""


def refreshed(task: AnyTaskSpec, start: Parameters, reservoir: Reservoir, targets: str) -> Reservoir:
    """Return the reservoir with logits as ``targets``, one of ``TARGETS``, says: anew by the model ``start``, or kept.

    A sample's target is then never older than a round, so a model that was young when it met the sample is forgotten.
    """
    if targets == "met" or not len(reservoir):
        return reservoir
    said = judge_with(task, start)(as_met(reservoir.samples[IMAGES]))
    return replace(reservoir, samples={**reservoir.samples, LOGITS: said.to(torch.float32)})


def dark_experience(task: AnyTaskSpec, alpha: float, beta: float) -> BufferUse:
    """Return DER's use of the buffer, each term on samples drawn anew."""
    loss_of = task_loss(task)

    def terms(module: nn.Module, drawn: Drawn) -> Iterator[Tensor]:
        if alpha > 0.0 and (met := drawn()):
            # Eq. 6; the mean over all logits, as in both papers' code (the text has the squared norm).
            yield alpha * F.mse_loss(module(met[IMAGES]).to(torch.float32), met[LOGITS])
        if beta > 0.0 and (met := drawn()):
            yield beta * loss_of(module(met[IMAGES]), met[LABELS])  # Eq. 7: DER++

    return BufferUse(terms, keeps_logits=alpha > 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DER(BufferedMethod, AveragingMethod):
    """The client's half; the aggregator's is ``AveragingMethod.aggregate``. Other settings are ``BufferedMethod``'s.

    Attributes:
        alpha: weight of the distance to the kept logits. 0, with ``beta`` 0 too, is FedAvg.
        beta: weight of the loss on kept samples' labels (DER++); 0, without it, is DER.
        targets: one of ``TARGETS``; ``met`` is DER's.
    """

    name: ClassVar[str] = "der"

    alpha: float = 1.0
    beta: float = 0.0
    targets: str = "met"

    def __post_init__(self) -> None:
        BufferedMethod.__post_init__(self)
        checks.one_of(TARGETS, self, "targets")
        checks.within(0.0, math.inf, self, ["alpha", "beta"])

    def local_work(
        self, state: Reservoir, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Reservoir, TaskUpload]]:
        """Minimise the loss on new samples and ``dark_experience`` of kept ones."""
        use = dark_experience(self.task, self.alpha, self.beta)
        start = download.task_parameters
        kept = refreshed(self.task, start, state, self.targets) if use.keeps_logits else state
        parameters, kept = yield from self.trained(use, start, data, kept, rng)
        return kept, TaskUpload(parameters, len(data.labels))
