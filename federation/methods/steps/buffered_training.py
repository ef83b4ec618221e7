"""A client's local training beside a buffer of real samples; what the buffer does in it is the method's (DER, A-GEM).

FedGP's ClientUpdate (Dai et al. 2023, Algorithm 2). In the first epoch of a round every batch is offered to the
reservoir once its gradient is there, so a sample can be drawn from the very next step on.

Axes: B batch, S samples drawn from the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit.pace import Pace
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import forked_generator
from replayfleet.federation.methods.steps.kept_samples import Reservoir
from replayfleet.federation.methods.steps.task_model import Optimisation, descend, task_loss

Drawn: TypeAlias = Callable[[], Mapping[str, Tensor] | None]
"""Draws S samples of the buffer anew, under the names of ``Reservoir.samples``; None while it is empty."""

Terms: TypeAlias = Callable[[nn.Module, Drawn], Iterable[Tensor]]
"""(the task model in training, what draws) -> what a step descends beside the loss on its batch."""

Correct: TypeAlias = Callable[[nn.Module, Drawn], None]
"""(the task model after ``backward``, what draws): may change a step's gradients."""


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What a method does with its buffer in local training; by itself nothing.

    Attributes:
        terms: added to each step's loss, one after the other.
        correct: called with each step's gradients.
        keeps_logits: whether the reservoir keeps what the model answered when a sample was met.
    """

    terms: Terms = lambda _module, _drawn: ()
    correct: Correct = lambda _module, _drawn: None
    keeps_logits: bool = False


def train_with_buffer(
    settings: Any,
    use: BufferUse,
    start: Parameters,
    data: RoundData,
    reservoir: Reservoir,
    rng: torch.Generator,
    pace: Pace | None,
) -> tuple[dict[str, Tensor], Reservoir]:
    """Return the task model after a round's training, and the reservoir after the round's samples.

    The order of the samples is drawn from ``rng`` as every method here draws it, everything else from generators beside
    it: if ``use`` is nothing, the result has FedAvg's bits.

    Args:
        settings: a ``BufferedMethod``: epochs, batches, step sizes, the task, and how many samples a step draws.
        use: what the method does with the buffer.
        start: parameters that training starts from; left untouched.
        data: this round's.
        reservoir: before the round.
        rng: on the CPU.
        pace: says when to stop; None for the full length. Samples that no step met stay out of the reservoir.
    """
    keeping, drawing = forked_generator(rng, "reservoir"), forked_generator(rng, "buffer")
    loss_of, is_new = (
        task_loss(settings.task),
        torch.ones(len(data.labels), dtype=torch.bool, device=data.labels.device),
    )
    batch_met = logits_met = torch.empty(0)

    def drawn() -> Mapping[str, Tensor] | None:
        return reservoir.drawn(settings.buffer_batch_size, drawing) if len(reservoir) else None

    def batch_loss(module: nn.Module, batch: Tensor) -> Tensor:
        nonlocal batch_met, logits_met
        logits = module(data.images[batch])
        batch_met, logits_met = batch, logits.detach()
        loss = loss_of(logits, data.labels[batch])
        for term in use.terms(module, drawn):
            loss = loss + term
        return loss

    def after_backward(module: nn.Module) -> None:
        nonlocal reservoir
        use.correct(module, drawn)
        new = is_new[batch_met]
        rows = batch_met[new]
        if len(rows):
            is_new[rows] = False
            logits = logits_met[new].to(torch.float32) if use.keeps_logits else None
            reservoir = reservoir.with_batch(data.images[rows], data.labels[rows], keeping, logits=logits)

    optimisation = Optimisation.of(settings).paced(len(data.labels), pace)
    parameters = descend(settings.task, start, len(data.labels), optimisation, rng, batch_loss, after_backward)
    return parameters, reservoir
