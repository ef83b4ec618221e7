"""A client's local training beside a buffer of real samples: plainly, with DER, with A-GEM, each with or without FedGP.

FedGP's ClientUpdate (Dai et al. 2023, Algorithms 2, 5 and 6). In the first epoch of a round every batch is offered to
the reservoir once its gradient is there, so a sample can be drawn from the very next step on.

Axes: B batch, S samples drawn from the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.kit.pace import Pace
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import forked_generator
from replayfleet.federation.methods.steps.objective import task_loss
from replayfleet.federation.methods.steps.projection import joined, loss_gradient, project_gradient
from replayfleet.federation.methods.steps.reservoir import IMAGES, LABELS, LOGITS, Reservoir
from replayfleet.federation.methods.steps.task_model import Optimisation, TaskModelSettings, computing_in, descend
from replayfleet.models.specs import AnyTaskSpec

BASES = ("plain", "der", "agem")
"""What the buffer does in local training: nothing, DER's term in the loss, or A-GEM's projection of the gradient."""


class BufferedSettings(TaskModelSettings, Protocol):
    """The settings that training with a buffer reads; ``BufferedMethod`` says what they mean."""

    @property
    def task(self) -> AnyTaskSpec:
        """The task."""

    @property
    def buffer_batch_size(self) -> int:
        """S."""


@dataclass(frozen=True, slots=True)
class Base:
    """What the buffer does in local training.

    Attributes:
        name: one of ``BASES``.
        alpha: weight of DER's term; the others have none. 0 leaves it out.
        beta: weight of DER++'s further term, likewise.
        reference: (P,) FedGP's gradient, which every step's gradient is projected against; None where there is none.
    """

    name: str = "plain"
    alpha: float = 0.0
    beta: float = 0.0
    reference: Tensor | None = None


def train_with_buffer(
    settings: BufferedSettings,
    base: Base,
    start: Parameters,
    data: RoundData,
    reservoir: Reservoir,
    rng: torch.Generator,
    pace: Pace | None = None,
) -> tuple[dict[str, Tensor], Reservoir]:
    """Return the task model after a round's training, and the reservoir after the round's samples.

    The order of the samples is drawn from ``rng`` as every method here draws it, everything else from generators beside
    it: without buffer and projection, the result has FedAvg's bits.

    Args:
        settings: epochs, batches and step sizes, the task, and how many samples a step draws from the buffer.
        base: what the buffer does.
        start: parameters that training starts from; left untouched.
        data: this round's.
        reservoir: before the round.
        rng: on the CPU.
        pace: says when to stop; None for the full length. Samples that no step met stay out of the reservoir.
    """
    keeping, drawing = forked_generator(rng, "reservoir"), forked_generator(rng, "buffer")
    steps = _Steps(settings, base, data, reservoir, keeping, drawing)
    optimisation = Optimisation.of(settings).paced(len(data.labels), pace)
    parameters = descend(settings.task, start, len(data.labels), optimisation, rng, steps.loss, steps.after_backward)
    return parameters, steps.reservoir


class _Steps:
    """The steps of one round: what they descend, how they change gradients, and what they leave in the reservoir."""

    def __init__(
        self,
        settings: BufferedSettings,
        base: Base,
        data: RoundData,
        reservoir: Reservoir,
        keeping: torch.Generator,
        drawing: torch.Generator,
    ) -> None:
        self.reservoir = reservoir
        self._settings = settings
        self._base = base
        self._data = data
        self._keeping = keeping
        self._drawing = drawing
        self._loss = task_loss(settings.task)
        self._is_new = torch.ones(len(data.labels), dtype=torch.bool, device=data.labels.device)
        self._batch = torch.empty(0, dtype=torch.int64)
        self._logits = torch.empty(0)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        """Return the task's loss on a batch, and what DER and DER++ add of the buffer.

        DER (Buzzega et al. 2020): ``+ alpha * MSE(logits, logits when met)``. DER++: ``+ beta * loss`` on the labels of
        samples drawn anew.
        """
        logits: Tensor = module(self._data.images[batch])
        self._batch, self._logits = batch, logits.detach()
        loss = self._loss(logits, self._data.labels[batch])
        if self._base.name != "der" or not len(self.reservoir):
            return loss
        if self._base.alpha > 0.0:
            met = self.reservoir.drawn(self._settings.buffer_batch_size, self._drawing)
            loss = loss + self._base.alpha * F.mse_loss(module(met[IMAGES]).to(torch.float32), met[LOGITS])
        if self._base.beta > 0.0:
            met = self.reservoir.drawn(self._settings.buffer_batch_size, self._drawing)
            loss = loss + self._base.beta * self._loss(module(met[IMAGES]), met[LABELS])
        return loss

    def after_backward(self, module: nn.Module) -> None:
        """Project the gradient against the own buffer's (A-GEM), then against the fleet's (FedGP); keep the batch."""
        if self._base.name == "agem" and len(self.reservoir):
            met = self.reservoir.drawn(self._settings.buffer_batch_size, self._drawing)
            with computing_in(self._settings.precision, met[IMAGES].device):
                own = loss_gradient(self._settings.task, module, met[IMAGES], met[LABELS])
            project_gradient(module, joined(own, own))
        if self._base.reference is not None:
            project_gradient(module, self._base.reference)
        self._keep_new_samples()

    def _keep_new_samples(self) -> None:
        new = self._is_new[self._batch]
        rows = self._batch[new]
        if not len(rows):
            return
        self._is_new[rows] = False
        logits = self._logits[new].to(torch.float32) if self._base.name == "der" else None
        images, labels = self._data.images[rows], self._data.labels[rows]
        self.reservoir = self.reservoir.with_batch(images, labels, self._keeping, logits=logits)
