"""AF-FCL's local training: a flow learns the features' distribution, and the classifier learns from what it replays.

Wuerkaixi et al. 2024, "Accurate Forgetting for Heterogeneous Federated Continual Learning".

Axes: B batch, C channels, H height, W width, F features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.kit.packing import OneSet, Record
from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps.modules import drawn_from, shuffled_batches, trainable
from replayfleet.federation.methods.steps.task_model import EVALUATION_BATCH, trained_parameters
from replayfleet.models.flow import ConditionalFlow, standard_normal_log_density
from replayfleet.models.resnet_plus import NUM_FEATURES, ResNetPlus, build_resnet_plus
from replayfleet.models.specs import TaskSpec

TEMPERATURE = 2.0
"""Of distillation; there is no factor of its square."""

VARIANCE_FLOOR = 1e-6
"""What keeps the local latents' density finite where a class has hardly any spread."""

REPLAY_LAYERS = ("upper", "fc2")
"""What the replayed features train: everything above the features, or only ``fc2`` as in the released code."""


@dataclass(frozen=True, slots=True)
class FlowModels(Record):
    """The parameters of both models."""

    task: Annotated[Parameters, OneSet()]
    flow: Annotated[Parameters, OneSet()]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowReplaySchedule:
    """How to train; one step is a mini-batch.

    Attributes:
        flow_hidden: units of the flow's networks.
        num_batches: steps.
        batch_size: samples per step, of real data and of replay each.
        learning_rate: of the task model's two Adams.
        flow_learning_rate: of the flow's Adam.
        replay_weight: of the loss on replayed features.
        exploration: theta: least share of the replay's class loss, however improbable the replay is.
        last_flow_weight: of the flow's loss on samples of the last flow.
        distillation: of all distillation from the last task model.
        feature_distillation: of its term on features.
        output_distillation: of its terms on outputs.
        replay_layers: one of ``REPLAY_LAYERS``.
    """

    flow_hidden: int
    num_batches: int
    batch_size: int
    learning_rate: float
    flow_learning_rate: float
    replay_weight: float
    exploration: float
    last_flow_weight: float
    distillation: float
    feature_distillation: float
    output_distillation: float
    replay_layers: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """Features that a flow drew.

    Attributes:
        noise: (B, F) what they were drawn from.
        features: (B, F).
        labels: (B,) int64.
    """

    noise: Tensor
    features: Tensor
    labels: Tensor


def build_flow(spec: TaskSpec, hidden: int) -> ConditionalFlow:
    """Return the flow of ``spec`` on the meta device: names and shapes, for layouts and ``functional_call``."""
    with torch.device("meta"):
        return ConditionalFlow(NUM_FEATURES, spec.num_classes, hidden)


def soft_cross_entropy(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return ``-sum_k softmax(teacher / T)_k log softmax(logits / T)_k``, the mean over the batch; (B, K) each."""
    target = (teacher / TEMPERATURE).softmax(dim=1)
    return -(target * (logits / TEMPERATURE).log_softmax(dim=1)).sum(dim=1).mean()


def mean_density(log_densities: Tensor, num_features: int) -> Tensor:
    """Return the mean over the batch of each sample's density per feature, ``exp(log p / F)``: scalar.

    How well this round's features agree with what the flow knows of their classes.
    """
    return (log_densities / num_features).exp().mean()


def credibility(noise: Tensor, labels: Tensor, local_noise: Tensor, local_labels: Tensor, default: Tensor) -> Tensor:
    """Return how probable each replayed sample is under this round's data, (B,), in the flow's latent space.

    A class's local latents are fitted with a Gaussian of its own mean and variance per entry; a sample's credibility is
    the mean over entries of that density at its latent. A class with fewer than two local samples gets ``default``.

    Args:
        noise: (B, F) latents of replayed samples.
        labels: (B,) their classes.
        local_noise: (N, F) latents that the flow gives this round's features.
        local_labels: (N,) their classes.
        default: scalar, ``mean_density`` of this round's data.
    """
    shares = default.expand(len(noise)).clone()
    for class_id in torch.unique(labels).tolist():
        local = local_noise[local_labels == class_id]
        if len(local) < 2:
            continue
        mean, variance = local.mean(dim=0), local.var(dim=0, unbiased=False) + VARIANCE_FLOOR
        distance = (noise[labels == class_id] - mean).square() / variance
        density = torch.exp(-0.5 * distance) / torch.sqrt(2 * math.pi * variance)
        shares[labels == class_id] = density.mean(dim=1)
    return shares


def replay_loss(logits: Tensor, labels: Tensor, shares: Tensor, agreement: Tensor, exploration: float) -> Tensor:
    """Return ``((1 - theta) agreement + theta) mean_B(share * CE)``: replay counts by its credibility.

    Args:
        logits: (B, K) of replayed features.
        labels: (B,).
        shares: (B,) each sample's ``credibility``.
        agreement: scalar, ``mean_density`` of this round's data.
        exploration: theta.
    """
    weighted = (shares * F.cross_entropy(logits, labels, reduction="none")).mean()
    return ((1 - exploration) * agreement + exploration) * weighted


@torch.no_grad()
def draw_features(flow: ConditionalFlow, classes: Tensor, num_classes: int, rng: torch.Generator) -> Replayed:
    """Return features of these classes (B,), drawn from the flow."""
    noise = torch.randn(len(classes), flow.num_features, generator=rng).to(classes.device)
    return Replayed(noise, flow.inverse(noise, _one_hot(classes, num_classes)), classes)


def train_with_flow(
    spec: TaskSpec,
    start: FlowModels,
    data: RoundData,
    known: Sequence[int],
    schedule: FlowReplaySchedule,
    rng: torch.Generator,
) -> FlowModels:
    """Return both models after the round; ``start`` is left untouched.

    Every mini-batch: one step of the flow, one of the upper layers on replayed features, one of the task model.

    Args:
        spec: the task.
        start: the global models, on the torch device that trains; but in the first round they are the last models too,
            which the flow is reminded of and the task model distilled from.
        data: this round's samples.
        known: ids of the classes that the global models know; empty in the first round.
        schedule: lengths, step sizes and weights.
        rng: draws batches, classes and latents.
    """
    module = trainable(build_resnet_plus(spec), start.task).to(memory_format=torch.channels_last)
    flow = trainable(build_flow(spec, schedule.flow_hidden), start.flow)
    last = _LastModels.of(spec, start, data.images, list(known), schedule) if known else None
    training = _Training(schedule, module, flow, sorted({*known, *data.counts()}), last, rng)
    upper = [tensor for name, tensor in module.named_parameters() if name.startswith(_trained_by_replay(schedule))]
    flow_adam = torch.optim.Adam(flow.parameters(), lr=schedule.flow_learning_rate)
    upper_adam = torch.optim.Adam(upper, lr=schedule.learning_rate)
    task_adam = torch.optim.Adam(module.parameters(), lr=schedule.learning_rate)
    for batch in shuffled_batches(len(data.labels), schedule.batch_size, schedule.num_batches, split_generator(rng)):
        images, labels = data.images[batch], data.labels[batch]
        module.eval()
        with torch.no_grad():
            features = module.features(images)
        _descend(flow_adam, training.flow_loss(features, labels))
        _descend(upper_adam, training.upper_loss(features, labels))
        module.train()
        _descend(task_adam, training.task_loss(images, labels, batch))
    return FlowModels(trained_parameters(module), trained_parameters(flow))


@dataclass(frozen=True, slots=True)
class _LastModels:
    """The models that the round began with, frozen, and what they make of its samples.

    Attributes:
        module: the task model.
        flow: the flow.
        known: ids of the classes that the flow knows.
        features: (N, F) of the round's samples.
        logits: (N, K) of the round's samples.
    """

    module: ResNetPlus
    flow: ConditionalFlow
    known: list[int]
    features: Tensor
    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, spec: TaskSpec, models: FlowModels, images: Tensor, known: list[int], schedule: FlowReplaySchedule
    ) -> _LastModels:
        """Freeze the models and run the task model once over the round's images."""
        module = trainable(build_resnet_plus(spec), models.task).requires_grad_(False).eval()
        flow = trainable(build_flow(spec, schedule.flow_hidden), models.flow).requires_grad_(False).eval()
        features = torch.cat([module.features(part) for part in images.split(EVALUATION_BATCH)])
        return cls(module, flow, known, features, module.classify(features))


@dataclass(frozen=True, slots=True)
class _Training:
    """The two models that train, and what their losses need."""

    schedule: FlowReplaySchedule
    module: ResNetPlus
    flow: ConditionalFlow
    replayable: list[int]
    last: _LastModels | None
    rng: torch.Generator

    def flow_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood of the features, and of features that the last flow draws."""
        loss = -self.flow.log_density(features, self._one_hot(labels)).mean()
        if self.last is None or self.schedule.last_flow_weight == 0.0:
            return loss
        reminder = self._drawn(self.last.flow, self.last.known, labels)
        reminded = -self.flow.log_density(reminder.features, self._one_hot(reminder.labels)).mean()
        return loss + self.schedule.last_flow_weight * reminded

    def upper_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the loss on features that the flow draws: their classes, by credibility, and distillation."""
        with torch.no_grad():
            local_noise, log_determinants = self.flow(features, self._one_hot(labels))
            log_densities = standard_normal_log_density(local_noise) + log_determinants
            agreement = mean_density(log_densities, self.flow.num_features)
            replay = self._drawn(self.flow, self.replayable, labels)
            shares = credibility(replay.noise, replay.labels, local_noise, labels, agreement)
        logits = self.module.classify(replay.features)
        loss = replay_loss(logits, replay.labels, shares, agreement, self.schedule.exploration)
        if self.last is not None:
            teacher = self.last.module.classify(replay.features)
            weight = self.schedule.distillation * self.schedule.output_distillation
            loss = loss + weight * soft_cross_entropy(teacher, logits)
        return self.schedule.replay_weight * loss

    def task_loss(self, images: Tensor, labels: Tensor, batch: Tensor) -> Tensor:
        """Return the cross-entropy on real samples and the distillation of their features and outputs."""
        features = self.module.features(images)
        logits = self.module.classify(features)
        loss = F.cross_entropy(logits, labels)
        if self.last is None:
            return loss
        on_features = self.schedule.feature_distillation * F.mse_loss(features, self.last.features[batch])
        on_outputs = self.schedule.output_distillation * soft_cross_entropy(self.last.logits[batch], logits)
        return loss + self.schedule.distillation * (on_features + on_outputs)

    def _drawn(self, flow: ConditionalFlow, choices: list[int], like: Tensor) -> Replayed:
        classes = drawn_from(choices, len(like), self.rng).to(like.device)
        return draw_features(flow, classes, self.module.num_classes, self.rng)

    def _one_hot(self, labels: Tensor) -> Tensor:
        return _one_hot(labels, self.module.num_classes)


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    return F.one_hot(labels, num_classes).to(torch.float32)


def _trained_by_replay(schedule: FlowReplaySchedule) -> tuple[str, ...]:
    """Return the prefixes of the parameters' names that replayed features train."""
    return ("fc2.",) if schedule.replay_layers == "fc2" else ("fc1.", "fc2.", "head.")


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
