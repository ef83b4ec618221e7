"""MFCL: the aggregator trains one generator without data; clients replay from it beside their own samples.

Babakniya et al. 2023, "A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated Class Incremental Learning
for Vision Tasks", sections 3.1 and 3.2, as a baseline in pFedGRP's real-time protocol (its appendices B.1 and B.2).

Which logits count as new in Eq. 6: ``steps.incremental.absent_classes``. In round 0 there is no generator: plain
cross-entropy, which is FedAvg.
Differences from the paper: ``docs/methods/mfcl.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods import mfcl_records as records
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.incremental import (
    LOGITS,
    absent_classes,
    current_loss,
    head_weighted_distance,
)
from replayfleet.federation.methods.steps.task_model import trained_parameters
from replayfleet.federation.methods.synthesis_method import (
    SynthesisMethod,
    built_generator,
    known_clients,
    seen_classes,
    uniform_average,
)
from replayfleet.federation.methods.synthesis_records import CountedUpload
from replayfleet.federation.methods.task_method import TaskMethod
from replayfleet.models.data_free import MfclGenerator
from replayfleet.models.resnet import ResNet

REPLAY_LABELS = ("own", "latents")
"""What a synthetic image shows: what the average model names (the reference), or what its latents ask for (Eq. 1)."""

REPLAYS = ("terms", "as-real")
"""What synthetic images do: take part in Eq. 7 and 8, or count as real ones ("FedAvg + Gen" of its Table 5)."""

Draw = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Draws a step's synthetic images (B, C, H, W), their labels (B,) and the old model's features of them (B, D)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MFCL(SynthesisMethod):
    """Settings and both halves of the method; the task model's settings are those of ``TaskMethod``.

    Attributes:
        task_rounds: rounds that a task lasts; the generator is trained after each task, and what is distilled from is
            the average model at its end.
        logits: ``split`` or ``all``; see ``steps.incremental.LOGITS``.
        replay_labels: one of ``REPLAY_LABELS``.
        replay: one of ``REPLAYS``.
        synthetic_batch_size: synthetic images beside each batch of real ones.
        head_weight: w_FT of Eq. 9, of the head's cross-entropy on real and synthetic features.
        feature_weight: w_KD of Eq. 9.
        generator_steps: steps of the generator per round.
        generator_batch_size: images per step.
        generator_learning_rate: of its Adam.
        generator_width: channels of its last hidden maps.
        latent_size: entries of a latent.
        content_temperature: divides the logits in Eq. 1, where ``replay_labels`` is ``own``.
        diversity_weight: w_div of Eq. 5.
        batch_norm_weight: w_BN of Eq. 5.
        prior_weight: w_pr of Eq. 5.
        pixel_mean: mean of real pixels in the scale [-1, 1]; Fashion-MNIST's.
        pixel_std: their standard deviation; Fashion-MNIST's.
    """

    name: ClassVar[str] = "mfcl"
    Download: ClassVar[type[Any]] = records.Download
    AggregatorState: ClassVar[type[Any]] = records.AggregatorState
    sends_generator: ClassVar[bool] = True

    task_rounds: int = 1
    logits: str = "split"
    replay_labels: str = "own"
    replay: str = "terms"
    synthetic_batch_size: int = 128
    head_weight: float = 1.0
    feature_weight: float = 0.1
    generator_steps: int = 100
    generator_batch_size: int = 128
    generator_learning_rate: float = 1e-3
    generator_width: int = 64
    latent_size: int = 1000
    content_temperature: float = 1000.0
    diversity_weight: float = 1.0
    batch_norm_weight: float = 50.0
    prior_weight: float = 1e-3
    pixel_mean: float = -0.428
    pixel_std: float = 0.706

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.one_of(LOGITS, self, "logits")
        checks.one_of(REPLAY_LABELS, self, "replay_labels")
        checks.one_of(REPLAYS, self, "replay")
        checks.at_least(0, self, ["generator_steps"])
        checks.at_least(1, self, ["task_rounds", "synthetic_batch_size", "generator_width", "latent_size"])
        checks.at_least(2, self, ["generator_batch_size"])
        if self.replay_labels == "latents":
            checks.at_least(self.task.num_classes, self, ["latent_size"])
        weights = ["head_weight", "feature_weight", "diversity_weight", "batch_norm_weight", "prior_weight"]
        checks.within(0.0, math.inf, self, [*weights, "generator_learning_rate"])
        checks.within(1e-3, 1e9, self, ["content_temperature"])
        checks.within(-1.0, 1.0, self, ["pixel_mean"])
        checks.within(1e-3, 2.0, self, ["pixel_std"])

    def local_work(
        self, state: NoState, data: RoundData, download: records.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, CountedUpload]]:
        """Minimise Eq. 9 from the average model, on this round's samples and a fresh synthetic batch per step."""
        counts, start = data.counts(), download.task_parameters
        if not download.generator:
            parameters = yield self.training(data, start, rng)
            return state, CountedUpload(parameters, counts)
        old = data_free.frozen_task_model(self.task, download.teacher or start)
        seen = torch.tensor(download.seen, device=data.images.device)
        draw = self._replay(download.generator, old, seen, split_generator(rng))
        with torch.no_grad():
            old_features = torch.cat([old.features(part) for part in data.images.split(self.batch_size)])
        absent = absent_classes(download.seen, counts, self.logits)

        def batch_loss(module: ResNet, batch: Tensor) -> Tensor:
            synthetic, synthetic_labels, synthetic_features = draw()
            labels = data.labels[batch]
            features = module.features(torch.cat([data.images[batch], synthetic]))
            if self.replay == "as-real":
                return F.cross_entropy(module.head(features), torch.cat([labels, synthetic_labels]))
            current = current_loss(module.head(features[: len(batch)]), labels, absent)  # Eq. 6
            head = F.cross_entropy(module.head(features.detach()), torch.cat([labels, synthetic_labels]))  # Eq. 7
            earlier = torch.cat([old_features[batch], synthetic_features])
            distance = head_weighted_distance(features, earlier, old.head.weight[seen])  # Eq. 8
            return current + self.head_weight * head + self.feature_weight * distance  # Eq. 9

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        return state, CountedUpload(parameters, counts)

    def aggregate(
        self,
        state: records.AggregatorState,
        uploads: Mapping[ClientId, CountedUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[records.AggregatorState, dict[ClientId, records.Download]]:
        """Average the uploads; at the end of a task go on training the generator against the average (Algorithm 1)."""
        average, seen = uniform_average(uploads), seen_classes(state, uploads)
        lasts = (state.rounds_of_task + 1) % self.task_rounds
        met = replace(state, average=average, seen=seen, clients=known_clients(state, uploads), rounds_of_task=lasts)
        if not lasts:
            generator = self.train_generator(state.generator, average, seen, rng)
            teacher = average if self.task_rounds > 1 else {}
            met = replace(met, generator=generator, teacher=teacher, taught=seen)
        return self.same_for_all(met)  # type: ignore[return-value]

    def download_of(self, state: records.AggregatorState) -> records.Download:  # type: ignore[override]
        """Return what everybody gets: the average model, and teacher and generator of the last task that ended."""
        return records.Download(state.average, state.generator, seen=state.taught or state.seen, teacher=state.teacher)

    def train_generator(
        self, generator: Parameters, average: Parameters, seen: tuple[int, ...], rng: torch.Generator
    ) -> Parameters:
        """Return the generator after ``generator_steps`` steps of Adam on Eq. 5; an empty one is initialised first."""
        device = next(iter(average.values())).device
        module = self._generator(generator, rng).to(device).to(memory_format=torch.channels_last)
        teacher = data_free.frozen_task_model(self.task, average)
        classes = torch.tensor(seen, device=device)
        adam = torch.optim.Adam(module.parameters(), lr=self.generator_learning_rate)
        for _ in range(self.generator_steps):
            latents = torch.randn(self.generator_batch_size, self.latent_size, generator=rng).to(device)
            loss = self.generator_loss(teacher, module(latents), classes, latents)
            adam.zero_grad(set_to_none=True)
            loss.backward()
            adam.step()
        trained = trained_parameters(module)
        return trained if data_free.all_finite(trained) else generator

    def generator_loss(self, teacher: ResNet, images: Tensor, classes: Tensor, latents: Tensor) -> Tensor:
        """Return Eq. 5 of the images drawn from ``latents``; only the logits of ``classes``, seen so far, take part."""
        judged = data_free.observe(teacher, images)
        logits = judged.logits[:, classes]
        if self.replay_labels == "latents":
            loss = F.cross_entropy(logits, _asked_for(latents, classes))  # Eq. 1
        else:
            loss = data_free.own_label_loss(logits, self.content_temperature)  # Eq. 1, the reference's labels
        loss = loss + self.diversity_weight * data_free.information_loss(logits)  # Eq. 2
        loss = loss + self.batch_norm_weight * data_free.batch_norm_divergence(judged.layers)  # Eq. 3
        return loss + self.prior_weight * data_free.smoothness_loss(images)  # Eq. 4

    def _replay(self, generator: Parameters, old: ResNet, seen: Tensor, rng: torch.Generator) -> Draw:
        module = self._generator(generator, rng).to(seen.device).eval().requires_grad_(False)

        @torch.no_grad()
        def draw() -> tuple[Tensor, Tensor, Tensor]:
            latents = torch.randn(self.synthetic_batch_size, self.latent_size, generator=rng).to(seen.device)
            images: Tensor = module(latents)
            features = old.features(images)
            if self.replay_labels == "latents":
                return images, seen[_asked_for(latents, seen)], features
            return images, seen[old.head(features)[:, seen].argmax(dim=1)], features

        return draw

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> MfclGenerator:
        spec = self.task
        return built_generator(
            lambda: MfclGenerator(
                spec.image_channels,
                spec.image_size,
                self.latent_size,
                self.generator_width,
                pixel_mean=self.pixel_mean,
                pixel_std=self.pixel_std,
            ),
            parameters,
            rng,
        )


def _asked_for(latents: Tensor, classes: Tensor) -> Tensor:
    """Return (B,) which of ``classes`` (q,) latents (B, Z) name in Eq. 1: the place of the greatest of their entries.

    A class keeps its entry whichever classes are met later, as does one in the paper, which counts them as they come.
    """
    return latents[:, classes].argmax(dim=1)
