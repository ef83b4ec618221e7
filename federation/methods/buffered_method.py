"""What methods share that train beside a buffer of real samples on the client: DER, A-GEM and FedGP.

What the buffer does in training is the method's own; the loop is FedGP's ClientUpdate (Dai et al. 2023, Algorithm 2).
In the first epoch of a round every batch is offered to the reservoir once its gradient is there, so a sample can be
drawn from the very next step on. A round that brings the same samples as the one before, as in a task that lasts for
several, offers none: the paper's code fills buffers in the first round of each task.

Axes: B batch, S samples drawn from the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import forked_generator
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.kept_samples import Reservoir, fingerprint_of
from replayfleet.federation.methods.steps.task_model import task_loss
from replayfleet.federation.methods.task_method import TaskMethod

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferedMethod(TaskMethod):
    """Settings and plumbing; a method adds its name, its own settings, ``local_work`` and ``aggregate``.

    Attributes:
        buffer_size: real samples that a client keeps.
        buffer_batch_size: of them, how many a step draws.
    """

    stores_data: ClassVar[bool] = True
    ClientState: ClassVar[type[Any]] = Reservoir

    buffer_size: int = 200
    buffer_batch_size: int = 32

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.at_least(2, self, ["buffer_size", "buffer_batch_size"])

    def initial_states(self) -> tuple[Any, Any]:
        return Reservoir(self.buffer_size), self.AggregatorState()

    def trained(
        self, use: BufferUse, start: Parameters, data: RoundData, reservoir: Reservoir, rng: torch.Generator
    ) -> Work[tuple[Parameters, Reservoir]]:
        """Train ``start`` on a round's samples beside the buffer; return it, and the reservoir after the round.

        The order of the samples is drawn from ``rng`` as every method here draws it, everything else from generators
        beside it: if ``use`` is nothing, the result has FedAvg's bits. Samples that no step met stay out of the
        reservoir.
        """
        keeping, drawing = forked_generator(rng, "reservoir"), forked_generator(rng, "buffer")
        loss_of = task_loss(self.task)
        if not use.keeps_logits:
            reservoir = reservoir.without_logits()  # of a version that kept them all the same
        latest = fingerprint_of(data.images)
        is_new = torch.full((len(data.labels),), latest != reservoir.latest, device=data.labels.device)
        batch_met = logits_met = torch.empty(0)

        def drawn() -> Mapping[str, Tensor] | None:
            return reservoir.drawn(self.buffer_batch_size, drawing) if len(reservoir) else None

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

        request = self.descending(start, len(data.labels), rng, batch_loss)
        parameters = yield replace(request, after_backward=after_backward)
        return parameters, replace(reservoir, latest=latest)
