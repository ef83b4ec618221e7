"""Training FedCIL's ACGAN: a generator by class, and a critic that tells real from fake and classes apart.

Odena et al. 2017, "Conditional Image Synthesis with Auxiliary Classifier GANs"; Qi et al. 2023, "Better Generative
Replay for Continual Federated Learning".

Axes: B batch, C channels, H height, W width, K classes, Z latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from replayfleet.federation.methods.kit.packing import OneSet, Record
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.modules import drawn_from
from replayfleet.federation.methods.steps.task_model import trainable, trained_parameters
from replayfleet.models.acgan import AcganCritic, AcganGenerator, build_acgan
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

DrawByClass: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""(labels (B,), rng) -> images (B, C, H, W) of these classes, the generator in eval mode and without gradients."""


@dataclass(frozen=True, slots=True)
class Acgan(Record):
    """The parameters of both halves."""

    generator: Annotated[Parameters, OneSet()]
    critic: Annotated[Parameters, OneSet()]


@dataclass(frozen=True, kw_only=True, slots=True)
class AcganSchedule:
    """What to train and how; one step is a mini-batch.

    Attributes:
        width: of both networks.
        learning_rate: of both Adams.
        betas: of both Adams.
        weight_decay: of both Adams.
        new_weight: share of the new data in the critic's loss where there is replay.
    """

    width: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    new_weight: float = 0.5


@dataclass(frozen=True, slots=True)
class Labelled:
    """Images and their classes, real or replayed.

    Attributes:
        images: (B, C, H, W) in [-1, 1].
        labels: (B,) int64.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one step learns from.

    Attributes:
        new: this round's samples; on the aggregator, samples of what clients learnt in this round.
        replay: samples of what was learnt earlier, or None if there was nothing.
    """

    new: Labelled
    replay: Labelled | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """The global generator, with whose images consistency is enforced.

    Attributes:
        draw: draws from it.
        classes: ids of the classes that it knows.
    """

    draw: DrawByClass
    classes: Sequence[int]


def latents_of(labels: Tensor, num_classes: int, rng: torch.Generator) -> Tensor:
    """Return the generator's input (B, K + 100): the class one-hot, then noise from N(0, 1)."""
    noise = torch.randn(len(labels), LATENT_SIZE, generator=rng)
    one_hot = F.one_hot(labels.cpu(), num_classes).to(noise.dtype)
    return torch.cat([one_hot, noise], dim=1).to(labels.device)


def draw_by_class(spec: TaskSpec, width: int, generator: Parameters) -> DrawByClass:
    """Return a frozen generator as a function; convolutions are laid out as the CPU runs them fastest."""
    module = build_acgan(spec, width)[0].eval()
    fixed = {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for name, tensor in generator.items()
    }
    device = next(iter(generator.values())).device

    @torch.no_grad()
    def draw(labels: Tensor, rng: torch.Generator) -> Tensor:
        images: Tensor = functional_call(
            module, fixed, (latents_of(labels.to(device), spec.num_classes, rng).to(device),)
        )
        return images

    return draw


def balanced_draw(
    draws: Mapping[int, Sequence[DrawByClass]], count: int, rng: torch.Generator, device: torch.device
) -> Labelled:
    """Return ``count`` samples whose classes are drawn uniformly, and whose generators are too among a class's.

    Args:
        draws: class id -> generators that know it, in an order that depends on nothing but the clients' ids.
        count: samples.
        rng: draws classes, generators and latents.
        device: where images and labels go.
    """
    labels = drawn_from(sorted(draws), count, rng)
    ranks = torch.rand(count, generator=rng)
    by_draw: dict[DrawByClass, list[int]] = {}
    for index, (label, rank) in enumerate(zip(labels.tolist(), ranks.tolist(), strict=True)):
        known = draws[label]
        by_draw.setdefault(known[int(rank * len(known))], []).append(index)
    images = [draw(labels[indices], rng).to(device) for draw, indices in by_draw.items()]
    order = [index for indices in by_draw.values() for index in indices]
    return Labelled(torch.cat(images), labels[order].to(device))


def critic_loss(critic: AcganCritic, real: Labelled, fake: Labelled, dropout: torch.Generator | None = None) -> Tensor:
    """Return ``L_S + L_C``, which the critic descends: source and class are told apart, on real and fake images.

    ``-log D(real) - log(1 - D(fake)) - log C(label | real) - log C(label | fake)``, each the mean over the batch.
    """
    real_score, real_logits = critic(real.images, dropout)
    fake_score, fake_logits = critic(fake.images, dropout)
    source = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
    return source + F.cross_entropy(real_logits, real.labels) + F.cross_entropy(fake_logits, fake.labels)


def generator_loss(critic: AcganCritic, fake: Labelled, dropout: torch.Generator | None = None) -> Tensor:
    """Return what the generator descends: ``-log D(fake) - log C(label | fake)``."""
    score, logits = critic(fake.images, dropout)
    return F.softplus(-score).mean() + F.cross_entropy(logits, fake.labels)


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """Return ``KL(softmax(target) || softmax(logits))``, the mean over the batch; differentiable in both (B, K)."""
    return F.kl_div(logits.log_softmax(dim=1), target.log_softmax(dim=1), reduction="batchmean", log_target=True)


def consistency_loss(
    critic: AcganCritic, real: Labelled, alike: Tensor, own: Tensor, taught: Labelled, dropout: torch.Generator | None
) -> Tensor:
    """Return FedCIL's consistency terms: the class head answers alike on real, own and the global model's images.

    ``KL(C(alike) || C(real)) + KL(C(taught) || C(own)) - log C(label | taught)``.

    Args:
        critic: the one in training.
        real: this round's samples.
        alike: (B, C, H, W) the global generator's images of the classes of ``real``.
        own: (B, C, H, W) the client's generator's images of the classes of ``taught``.
        taught: the global generator's images of any class that it knows.
        dropout: draws the critic's dropout.
    """
    taught_logits = critic(taught.images, dropout)[1]
    return (
        divergence(critic(alike, dropout)[1], critic(real.images, dropout)[1])
        + divergence(taught_logits, critic(own, dropout)[1])
        + F.cross_entropy(taught_logits, taught.labels)
    )


def train_acgan(
    spec: TaskSpec,
    start: Acgan,
    batches: Iterable[MiniBatch],
    classes: Sequence[int],
    schedule: AcganSchedule,
    rng: torch.Generator,
    *,
    teacher: Teacher | None = None,
) -> Acgan:
    """Return the ACGAN after one critic step and one generator step per mini-batch; ``start`` is left untouched.

    Args:
        spec: image shape and classes.
        start: where training starts, on the torch device that trains.
        batches: what to learn from; drawn while training goes on.
        classes: ids of the classes that fakes are drawn of.
        schedule: width and step sizes.
        rng: draws fakes and dropout.
        teacher: enforces consistency with it, if given.
    """
    generator, critic = build_acgan(spec, schedule.width)
    trainable(generator, start.generator).to(memory_format=torch.channels_last)
    trainable(critic, start.critic).to(memory_format=torch.channels_last)
    training = AcganLosses(spec.num_classes, generator, critic, list(classes), schedule, rng)
    optimisers = [
        torch.optim.Adam(
            module.parameters(),
            lr=schedule.learning_rate,
            betas=schedule.betas,
            weight_decay=schedule.weight_decay,
        )
        for module in (critic, generator)
    ]
    for batch in batches:
        for optimiser, loss_of in zip(optimisers, (training.critic_loss, training.generator_loss), strict=True):
            critic.requires_grad_(optimiser is optimisers[0])
            loss = loss_of(batch, teacher)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    critic.requires_grad_(True)
    return Acgan(trained_parameters(generator), trained_parameters(critic))


@dataclass(frozen=True, slots=True)
class AcganLosses:
    """What each half descends on a mini-batch.

    Attributes:
        num_classes: K.
        generator: in training.
        critic: in training.
        classes: ids of the classes that fakes are drawn of.
        schedule: ``new_weight`` is read.
        rng: draws fakes and dropout.
    """

    num_classes: int
    generator: AcganGenerator
    critic: AcganCritic
    classes: list[int]
    schedule: AcganSchedule
    rng: torch.Generator

    def critic_loss(self, batch: MiniBatch, teacher: Teacher | None) -> Tensor:
        """Return ``w L(new) + (1 - w) L(replay) + consistency``, w being ``new_weight``, or 1 where there is no replay.

        L is `critic_loss`, each time against fresh fakes.
        """
        loss = critic_loss(self.critic, batch.new, self._fakes(batch), self.rng)
        if batch.replay is not None:
            replayed = critic_loss(self.critic, batch.replay, self._fakes(batch), self.rng)
            loss = self.schedule.new_weight * loss + (1 - self.schedule.new_weight) * replayed
        if teacher is None:
            return loss
        alike = teacher.draw(batch.new.labels, self.rng)
        labels = drawn_from(list(teacher.classes), len(batch.new.labels), self.rng).to(batch.new.labels.device)
        taught = Labelled(teacher.draw(labels, self.rng), labels)
        with torch.no_grad():
            own = self.generator(latents_of(labels, self.num_classes, self.rng))
        return loss + consistency_loss(self.critic, batch.new, alike, own, taught, self.rng)

    def generator_loss(self, batch: MiniBatch, _teacher: Teacher | None) -> Tensor:
        """Return `generator_loss` of fresh fakes."""
        labels = self._labels(batch)
        images = self.generator(latents_of(labels, self.num_classes, self.rng))
        return generator_loss(self.critic, Labelled(images, labels), self.rng)

    @torch.no_grad()
    def _fakes(self, batch: MiniBatch) -> Labelled:
        labels = self._labels(batch)
        return Labelled(self.generator(latents_of(labels, self.num_classes, self.rng)), labels)

    def _labels(self, batch: MiniBatch) -> Tensor:
        return drawn_from(self.classes, len(batch.new.labels), self.rng).to(batch.new.labels.device)
