"""Rounds of data-free synthesis whose best images become a replay set, as in TARGET and LANDER.

Fang et al. 2022, "Up to 100x Faster Data-Free Knowledge Distillation", is where their loop comes from.
Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.data_free import Observation, Teacher
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec


class ImageSource(Protocol):
    """What one round of synthesis draws from and trains."""

    def draw(self) -> Tensor:
        """Return the round's images in [0, 1], (B, C, H, W), differentiable."""

    def scaled(self, images: Tensor) -> Tensor:
        """Return images in [0, 1] as the task model takes them."""

    def extra_loss(self, judged: Observation) -> Tensor | float:
        """Return the source's own term of the loss."""

    def descend(self, loss: Tensor) -> None:
        """Take one step."""

    def finish(self) -> None:
        """End the round."""


OpenRound: TypeAlias = Callable[[Tensor], ImageSource]
"""Labels (B,) of a round -> its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentTraining:
    """How the student of the adversarial term learns, as SDD (2025) has it for TARGET's generator.

    But its step size of 0.2 goes with hundreds of steps: after few, BatchNorm's running statistics lag behind
    parameters that move so fast, and in eval mode the student answers absurdly.
    """

    learning_rate: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-4
    temperature: float = 10.0


class Student:
    """An untrained task model that learns from the images made so far; it shows which of them are too easy.

    Args:
        spec: the task.
        training: its optimiser.
        device: torch device of the teacher.
        rng: draws its first parameters and its batches.
    """

    def __init__(self, spec: TaskSpec, training: StudentTraining, device: torch.device, rng: torch.Generator) -> None:
        self._module = initialise(build_task_model(spec), rng).to(device).to(memory_format=torch.channels_last)
        self._rng = rng
        self._temperature = training.temperature
        self._sgd = torch.optim.SGD(
            self._module.parameters(),
            lr=training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )

    def logits(self, images: Tensor) -> Tensor:
        """Return (B, K) in eval mode, differentiable with respect to the images alone."""
        self._module.eval().requires_grad_(False)
        logits: Tensor = self._module(images)
        return logits

    def learn(self, teacher: Teacher, pool: Tensor, classes: Tensor, num_steps: int, batch_size: int) -> None:
        """Take steps on ``T^2 KL(teacher / T || student / T)`` over the logits of ``classes``; ``pool`` is uint8."""
        self._module.train().requires_grad_(True)
        for _ in range(num_steps):
            batch = torch.randperm(len(pool), generator=self._rng)[:batch_size]
            images = data_free.from_bytes(pool[batch.to(pool.device)])
            with torch.no_grad():
                target = (teacher(images)[:, classes] / self._temperature).log_softmax(dim=1)
            answer = (self._module(images)[:, classes] / self._temperature).log_softmax(dim=1)
            loss = F.kl_div(answer, target, reduction="batchmean", log_target=True) * self._temperature**2
            self._sgd.zero_grad(set_to_none=True)
            loss.backward()
            self._sgd.step()


def synthesise(
    teacher: Teacher,
    open_round: OpenRound,
    classes: Sequence[int],
    settings: Any,
    student: Student,
    rng: torch.Generator,
    among: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the images of all rounds, uint8, and their labels: of each round those of the step whose loss was least.

    The loss of a step is ``w_BN * distance + w_CE * CE + w_adv * adversarial`` and the source's own term, of augmented
    images; kept are the images before augmentation.

    Args:
        teacher: the frozen task model, or several.
        open_round: gives the source of a round of labels.
        classes: to make images of.
        settings: an ``ImageSynthesisMethod``, whose attributes say what they mean.
        student: of the adversarial term.
        rng: draws labels and augmentation.
        among: classes whose logits count, ``classes`` among them; without any these alone.

    Returns:
        (B * kept rounds, C, H, W) and (B * kept rounds,) int64; fewer if no step of a round had a finite loss.
    """
    device = next(teacher.parameters()).device
    known = torch.tensor(among or classes, device=device)
    places = torch.tensor([(among or classes).index(class_id) for class_id in classes])
    history: list[tuple[Tensor, Tensor]] = []
    pool: list[Tensor] = []
    shown: list[Tensor] = []
    # A warm-up whose images aren't kept comes before the rounds, one whose images are is part of them.
    for index in range(settings.synthesis_rounds + (0 if settings.keep_warm_up else settings.warm_up_rounds)):
        labels = labels_of_round(len(classes), settings.synthesis_batch_size, rng, balanced=settings.balance_labels)
        targets = places[labels].to(device)
        rival = student if index > settings.warm_up_rounds and settings.adversarial_weight > 0 else None
        source = open_round(known[targets])

        def loss_of(
            judged: Observation,
            images: Tensor,
            targets: Tensor = targets,
            rival: Student | None = rival,
            history: data_free.History = tuple(history),
        ) -> Tensor:
            logits = judged.logits[:, known]
            distance = data_free.batch_norm_distance(judged.layers, history, settings.batch_norm_momentum)
            labelled = F.cross_entropy(logits, targets)
            loss: Tensor = settings.batch_norm_weight * distance + settings.label_weight * labelled
            if rival is None:
                return loss
            answers = rival.logits(images)[:, known]
            where = settings.adversarial_where
            rivalry: Tensor = settings.adversarial_weight * data_free.adversarial_loss(logits, answers, where)
            return loss + rivalry

        best, judged = _best_of_round(teacher, source, loss_of, settings, split_generator(rng))
        if best is None:
            continue
        if settings.keep_warm_up or index >= settings.warm_up_rounds:
            pool.append(best)
            shown.append(known[targets])
        blended = data_free.blend_statistics(history, judged.layers, settings.batch_norm_momentum)
        history = [(mean.detach(), variance.detach()) for mean, variance in blended]
        if index >= settings.warm_up_rounds and settings.adversarial_weight > 0:
            student.learn(teacher, torch.cat(pool), known, settings.student_steps, settings.synthesis_batch_size)
    if not pool:
        return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    return torch.cat(pool), torch.cat(shown)


def labels_of_round(num_classes: int, batch_size: int, rng: torch.Generator, *, balanced: bool) -> Tensor:
    """Return the labels of a round, (B,) int64 below ``num_classes``.

    Balanced ones go 0, 1, ..., K - 1, 0, 1, ..., so that no K neighbours are alike; what is left at the end is drawn.
    """
    in_turn = batch_size // num_classes * num_classes if balanced else 0
    drawn = torch.randint(num_classes, (batch_size - in_turn,), generator=rng)
    return torch.cat([torch.arange(in_turn) % num_classes, drawn])


def _best_of_round(
    teacher: Teacher,
    source: ImageSource,
    loss_of: Callable[[Observation, Tensor], Tensor],
    settings: Any,
    rng: torch.Generator,
) -> tuple[Tensor | None, Observation]:
    """Return (the images of the least finite loss as bytes, the last step's observation)."""
    least, best = math.inf, None
    for _ in range(settings.synthesis_steps):
        drawn = source.draw()
        images = source.scaled(data_free.augmented(drawn, settings.padding, rng))
        judged = data_free.observe(teacher, images)
        loss = loss_of(judged, images) + source.extra_loss(judged)
        if loss.item() < least:
            least, best = loss.item(), data_free.to_bytes(source.scaled(drawn).detach())
        source.descend(loss)
    source.finish()
    return best, judged
