"""LwF in a federation: clients hold on to what earlier models say about new samples, and replay nothing.

Li & Hoiem 2016, "Learning without Forgetting", with the downloaded model as teacher; Usmanova et al. 2021, "A
distillation-based approach integrating continual learning and federated learning for pervasive services" (FLwF-2T),
has a second one, the client's own model at the end of the task before.
Differences from the papers: ``docs/methods/lwf.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.packing import CLASS_IDS, OneSet, Record
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.incremental import (
    LOGITS,
    absent_classes,
    current_loss,
    distilled_classes,
    soft_cross_entropy,
)
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.methods.task_method import AveragingMethod
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, slots=True)
class Past(Record):
    """What a client remembers of the task before: models and class ids, no sample.

    Attributes:
        own: its model after the last round.
        past: its model at the end of the task before; empty in the first task.
        met: classes that it met so far, in rising order.
        old: those that it met before this task.
    """

    own: Annotated[Parameters, OneSet("own")] = field(default_factory=dict)
    past: Annotated[Parameters, OneSet("past")] = field(default_factory=dict)
    met: Annotated[tuple[int, ...], CLASS_IDS] = ()
    old: Annotated[tuple[int, ...], CLASS_IDS] = ()

    def at_border(self, counts: dict[int, int]) -> Past:
        """Return what is to be remembered in a round of these classes: one never met before begins a new task."""
        if not self.met or set(counts) <= set(self.met):
            return self
        return Past(self.own, self.own, self.met, self.met)

    def after(self, own: Parameters, counts: dict[int, int]) -> Past:
        """Return what is remembered after the round."""
        return Past(own, self.past, tuple(sorted({*self.met, *counts})), self.old)


@dataclass(frozen=True, kw_only=True, slots=True)
class LwF(AveragingMethod):
    """The client's half and its settings; the aggregator's, and the other settings, are those of FedAvg.

    Attributes:
        new_weight: of the cross-entropy of this round's samples, once there is an earlier task.
        past_weight: of the distillation of the client's own model at the end of the task before.
        server_weight: of the distillation of the downloaded model.
        temperature: of both.
        logits: ``split`` or ``all``; see ``steps.incremental.LOGITS``.
    """

    name: ClassVar[str] = "lwf"
    ClientState: ClassVar[type[Any]] = Past

    task: TaskSpec
    new_weight: float = 1.0
    past_weight: float = 0.0
    server_weight: float = 3.0
    temperature: float = 2.0
    logits: str = "split"

    def __post_init__(self) -> None:
        AveragingMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["new_weight", "past_weight", "server_weight"])
        checks.within(1e-3, 1e9, self, ["temperature"])
        checks.one_of(LOGITS, self, "logits")

    def local_work(
        self, state: Past, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Past, TaskUpload]]:
        """Minimise cross-entropy and the distillation of both teachers on this round's samples."""
        counts, start = data.counts(), download.task_parameters
        remembered = state.at_border(counts)
        if not remembered.old:
            parameters = yield self.training(data, start, rng)
            return remembered.after(parameters, counts), TaskUpload(parameters, len(data.labels))
        known = list(distilled_classes(remembered.old, self.task.num_classes, self.logits))
        classes = torch.tensor(known, device=data.images.device)
        teachers = [(self.past_weight, remembered.past), (self.server_weight, start)]
        answers = [(weight, self._answers(teacher, data.images)) for weight, teacher in teachers if weight > 0]
        absent = absent_classes(remembered.old, counts, self.logits)

        def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
            logits = module(data.images[batch])
            loss = self.new_weight * current_loss(logits, data.labels[batch], absent)
            for weight, said in answers:
                told = soft_cross_entropy(logits[:, classes], said[batch][:, classes], self.temperature)
                loss = loss + weight * told
            return loss

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        return remembered.after(parameters, counts), TaskUpload(parameters, len(data.labels))

    def _answers(self, teacher: Parameters, images: Tensor) -> Tensor:
        judge = judge_with(self.task, teacher)
        with torch.no_grad():
            return torch.cat([judge(part) for part in images.split(max(2, self.batch_size))])
