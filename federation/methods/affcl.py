"""AF-FCL: a normalising flow replays features, and replay counts by how well it agrees with this round's data.

Wuerkaixi et al. 2024, "Accurate Forgetting for Heterogeneous Federated Continual Learning" (ICLR), in the real-time
protocol of pFedGRP (its appendices B.1 and B.2): every round is a new task of its own, so the last model and flow are
the global ones that the round begins with, and a client remembers nothing itself.
Differences from the paper: ``docs/methods/affcl.md``.

Axes: B batch, F features, K classes, N samples of the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods import affcl_records as aff
from replayfleet.federation.methods.affcl_records import FlowModels
from replayfleet.federation.methods.kit import checks, packing
from replayfleet.federation.methods.kit.records import ClientId, Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.incremental import soft_cross_entropy
from replayfleet.federation.methods.steps.modules import drawn_from, judge_of, shuffled_batches
from replayfleet.federation.methods.steps.task_model import portions, trainable, trained_parameters
from replayfleet.federation.methods.task_method import in_order_with_shares
from replayfleet.models.build import build_like, initialise
from replayfleet.models.flow import ConditionalFlow, initialise_flow, standard_normal_log_density
from replayfleet.models.resnet_plus import NUM_FEATURES, ResNetPlus, build_resnet_plus
from replayfleet.models.specs import TaskSpec

TEMPERATURE = 2.0
"""Of distillation; there is no factor of its square."""

VARIANCE_FLOOR = 1e-6
"""What keeps the local latents' density finite where a class has hardly any spread."""

REPLAY_LAYERS = ("upper", "fc2")
"""What the replayed features train: everything above the features, or only ``fc2`` as in the released code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AFFCL:
    """Settings and both halves of the method; defaults are the released code's, the flow's size pFedGRP's.

    Attributes:
        task: the classification task.
        flow_hidden: units of the flow's networks.
        local_iterations: mini-batches per round ("epochs" in the papers).
        replay_batch_size: samples per mini-batch, of real data and of replayed features each.
        adam_learning_rate: of the task model's Adams.
        flow_learning_rate: of the flow's Adam.
        replay_weight: of the loss on replayed features.
        exploration: theta: least share of the replay's class loss, however improbable the replay is.
        last_flow_weight: k: of the flow's loss on samples of the last flow.
        distillation: of all distillation from the last task model.
        feature_distillation: of its term on features.
        output_distillation: of its terms on outputs.
        replay_layers: what replayed features train, ``upper`` (all above the features) or ``fc2`` (the released code).
    """

    name: ClassVar[str] = "affcl"
    stores_data: ClassVar[bool] = False
    deployable: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = aff.Upload
    Download: ClassVar[type[Any]] = aff.Download
    ClientState: ClassVar[type[Any]] = NoState
    AggregatorState: ClassVar[type[Any]] = aff.AggregatorState

    task: TaskSpec
    flow_hidden: int = 512
    local_iterations: int = 100
    replay_batch_size: int = 64
    adam_learning_rate: float = 1e-4
    flow_learning_rate: float = 1e-4
    replay_weight: float = 0.1
    exploration: float = 0.2
    last_flow_weight: float = 0.4
    distillation: float = 0.2
    feature_distillation: float = 0.5
    output_distillation: float = 0.1
    replay_layers: str = "upper"

    def __post_init__(self) -> None:
        checks.task_kind(self)
        checks.at_least(1, self, ["flow_hidden", "local_iterations"])
        checks.at_least(2, self, ["replay_batch_size"])
        checks.within(0.0, 1.0, self, ["exploration"])
        weights = ["replay_weight", "last_flow_weight", "distillation", "feature_distillation", "output_distillation"]
        checks.within(0.0, math.inf, self, [*weights, "adam_learning_rate", "flow_learning_rate"])
        checks.one_of(REPLAY_LAYERS, self, "replay_layers")

    def initial_states(self) -> tuple[NoState, aff.AggregatorState]:
        return NoState(), aff.AggregatorState()

    def initial_download(self, rng: torch.Generator) -> aff.Download:
        """Return one random task model and flow, which know no classes."""
        module = initialise(build_resnet_plus(self.task).to_empty(device="cpu"), rng)
        flow = initialise_flow(build_flow(self.task, self.flow_hidden).to_empty(device="cpu"), rng)
        return aff.Download(FlowModels(module.state_dict(), flow.state_dict()))

    def local_round(
        self, state: NoState, data: RoundData, download: aff.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, aff.Upload]:
        """Train flow and task model in turns, mini-batch by mini-batch, on this round's data and replayed features.

        But in the first round the global models, which it starts from, are the last models too: the flow is reminded of
        them and the task model distilled from them.
        """
        start, known = download.models, list(download.classes)
        module = trainable(build_resnet_plus(self.task), start.task).to(memory_format=torch.channels_last)
        flow = trainable(build_flow(self.task, self.flow_hidden), start.flow)
        last = _LastModels.of(self, start, data.images, known) if known else None
        training = _Training(self, module, flow, sorted({*known, *data.counts()}), last, rng)
        replayed = ("fc2.",) if self.replay_layers == "fc2" else ("fc1.", "fc2.", "head.")
        upper = [tensor for name, tensor in module.named_parameters() if name.startswith(replayed)]
        flow_adam = torch.optim.Adam(flow.parameters(), lr=self.flow_learning_rate)
        upper_adam = torch.optim.Adam(upper, lr=self.adam_learning_rate)
        task_adam = torch.optim.Adam(module.parameters(), lr=self.adam_learning_rate)
        size, count = self.replay_batch_size, self.local_iterations
        for batch in shuffled_batches(len(data.labels), size, count, split_generator(rng)):
            images, labels = data.images[batch], data.labels[batch]
            module.eval()  # features once per mini-batch, without moving BatchNorm's statistics a second time
            with torch.no_grad():
                features = module.features(images)
            _descend(flow_adam, training.flow_loss(features, labels))
            _descend(upper_adam, training.upper_loss(features, labels))
            module.train()
            _descend(task_adam, training.task_loss(images, labels, batch))
        models = FlowModels(trained_parameters(module), trained_parameters(flow))
        return state, aff.Upload(models, data.counts())

    def aggregate(
        self,
        state: aff.AggregatorState,
        uploads: Mapping[ClientId, aff.Upload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[aff.AggregatorState, dict[ClientId, aff.Download]]:
        """Average task models and flows by the number of samples behind each."""
        ordered, shares = in_order_with_shares(uploads)
        models = FlowModels(
            weighted_average([upload.models.task for upload in ordered], shares),
            weighted_average([upload.models.flow for upload in ordered], shares),
        )
        earlier = state.latest.classes if state.latest else ()
        classes = tuple(sorted({*earlier, *(c for upload in ordered for c, count in upload.now.items() if count > 0)}))
        clients = tuple(sorted({*state.clients, *uploads}))
        latest = aff.Download(models, classes)
        return aff.AggregatorState(clients, latest), dict.fromkeys(clients, latest)

    def download_for(self, state: aff.AggregatorState, client_id: ClientId, initial: aff.Download) -> aff.Download:
        return state.latest or initial

    def upload_layout(self, name: str) -> Parameters | None:
        if name == "task":
            return packing.layout(build_resnet_plus(self.task))
        return packing.layout(build_flow(self.task, self.flow_hidden)) if name == "flow" else None

    def check_upload(self, upload: aff.Upload) -> None:
        packing.check_counts(upload.now, self.task.num_classes)

    def predictor(self, download: aff.Download) -> Judge:
        return judge_of(build_resnet_plus(self.task), download.models.task, self.task.num_classes)


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
    return build_like(ConditionalFlow, NUM_FEATURES, spec.num_classes, hidden, device="meta")


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
    def of(cls, settings: AFFCL, models: FlowModels, images: Tensor, known: list[int]) -> _LastModels:
        """Freeze the models and run the task model once over the round's images."""
        module = trainable(build_resnet_plus(settings.task), models.task).requires_grad_(False).eval()
        flow = trainable(build_flow(settings.task, settings.flow_hidden), models.flow).requires_grad_(False).eval()
        features = torch.cat([module.features(part) for part in portions(images)])
        return cls(module, flow, known, features, module.classify(features))


@dataclass(frozen=True, slots=True)
class _Training:
    """The two models that train, and what their losses need."""

    settings: AFFCL
    module: ResNetPlus
    flow: ConditionalFlow
    replayable: list[int]
    last: _LastModels | None
    rng: torch.Generator

    def flow_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood of the features, and of features that the last flow draws."""
        loss = -self.flow.log_density(features, self._one_hot(labels)).mean()
        if self.last is None or self.settings.last_flow_weight == 0.0:
            return loss
        reminder = self._drawn(self.last.flow, self.last.known, labels)
        reminded = -self.flow.log_density(reminder.features, self._one_hot(reminder.labels)).mean()
        return loss + self.settings.last_flow_weight * reminded

    def upper_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the loss on features that the flow draws: their classes, by credibility, and distillation."""
        with torch.no_grad():
            local_noise, log_determinants = self.flow(features, self._one_hot(labels))
            log_densities = standard_normal_log_density(local_noise) + log_determinants
            agreement = mean_density(log_densities, self.flow.num_features)
            replay = self._drawn(self.flow, self.replayable, labels)
            shares = credibility(replay.noise, replay.labels, local_noise, labels, agreement)
        logits = self.module.classify(replay.features)
        loss = replay_loss(logits, replay.labels, shares, agreement, self.settings.exploration)
        if self.last is not None:
            teacher = self.last.module.classify(replay.features)
            weight = self.settings.distillation * self.settings.output_distillation
            loss = loss + weight * soft_cross_entropy(logits, teacher, TEMPERATURE)
        return self.settings.replay_weight * loss

    def task_loss(self, images: Tensor, labels: Tensor, batch: Tensor) -> Tensor:
        """Return the cross-entropy on real samples and the distillation of their features and outputs."""
        features = self.module.features(images)
        logits = self.module.classify(features)
        loss = F.cross_entropy(logits, labels)
        if self.last is None:
            return loss
        on_features = self.settings.feature_distillation * F.mse_loss(features, self.last.features[batch])
        alike = soft_cross_entropy(logits, self.last.logits[batch], TEMPERATURE)
        on_outputs = self.settings.output_distillation * alike
        return loss + self.settings.distillation * (on_features + on_outputs)

    def _drawn(self, flow: ConditionalFlow, choices: list[int], like: Tensor) -> Replayed:
        classes = drawn_from(choices, len(like), self.rng).to(like.device)
        return draw_features(flow, classes, self.module.num_classes, self.rng)

    def _one_hot(self, labels: Tensor) -> Tensor:
        return _one_hot(labels, self.module.num_classes)


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    return F.one_hot(labels, num_classes).to(torch.float32)


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
