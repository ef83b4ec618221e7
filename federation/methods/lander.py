"""LANDER: TARGET with labels' embeddings as anchors, for the generator's input and for the task model's features.

Tran et al. 2024, "Text-Enhanced Data-free Approach for Federated Class-Incremental Learning", as a baseline in
pFedGRP's real-time protocol (its appendices B.1 and B.2).

Which logits take part: as in TARGET here (``federation/methods/target.py``), all of them unless ``logits = "split"``.
In round 0 there is nothing to replay: plain cross-entropy and the anchors.
Differences from the paper: ``docs/methods/lander.md``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.federation.methods.image_synthesis_method import Answered, ImageSynthesisMethod
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.data_free import Observation
from replayfleet.federation.methods.steps.incremental import absent_classes, current_loss
from replayfleet.federation.methods.steps.synthesis import OpenRound
from replayfleet.federation.methods.synthesis_method import built_generator
from replayfleet.federation.methods.synthesis_records import CountedUpload, SynthesisDownload
from replayfleet.models.build import num_features
from replayfleet.models.data_free import LanderGenerator
from replayfleet.models.resnet import ResNet


@dataclass(frozen=True, kw_only=True, slots=True)
class Lander(ImageSynthesisMethod):
    """Settings and both halves of the method; the other settings are those of ``ImageSynthesisMethod``.

    ``latent_size`` counts the entries behind the noise layers.

    Attributes:
        anchor_weight: of the bounding loss, on the client and in synthesis.
        anchor_radius: of the ball around an anchor, in mean squared distance per entry.
        anchor_norm: length of an anchor.
        samples_per_layer: images that share a noise layer.
        scale_learning_rate: of the learnt scale of pixels.
        batch_norm_weight: of the distance between BatchNorm statistics.
        warm_up_rounds: rounds of synthesis before the ``synthesis_rounds``, whose images aren't kept; student and
            adversarial term come after them.
    """

    name: ClassVar[str] = "lander"
    keep_warm_up: ClassVar[bool] = False
    balance_labels: ClassVar[bool] = True

    synthetic_batch_size: int = 64
    student_steps: int = 50
    anchor_weight: float = 5.0
    anchor_radius: float = 0.015
    anchor_norm: float = 5.0
    samples_per_layer: int = 10
    scale_learning_rate: float = 0.01
    batch_norm_weight: float = 1.0
    warm_up_rounds: int = 2

    def __post_init__(self) -> None:
        ImageSynthesisMethod.__post_init__(self)
        checks.at_least(1, self, ["samples_per_layer"])
        weights = ["anchor_weight", "anchor_radius", "anchor_norm"]
        checks.within(0.0, math.inf, self, [*weights, "scale_learning_rate"])

    def local_work(
        self, state: NoState, data: RoundData, download: SynthesisDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, CountedUpload]]:
        """Minimise ``cur (CE + 5 bound) of real samples + pre (soft CE + feature MSE) of synthetic images``."""
        counts, start = data.counts(), download.task_parameters
        anchors = self.anchors().to(data.images.device)[data.labels]
        replay = self._replay(download, split_generator(rng)) if download.synthetic else None
        current_share, earlier_share = scales(download.seen, counts) if replay else (1.0, 0.0)
        absent = absent_classes(download.seen, counts, self.logits) if replay else ()

        def loss_of_real(module: ResNet, features: Tensor, batch: Tensor) -> Tensor:
            bound = data_free.bounding_loss(features, anchors[batch], self.anchor_radius)
            return current_loss(module.head(features), data.labels[batch], absent) + self.anchor_weight * bound

        def batch_loss(module: ResNet, batch: Tensor) -> Tensor:
            if replay is None:
                return loss_of_real(module, module.features(data.images[batch]), batch)
            replayed = replay.draw()
            real, synthetic = self.features_of(module, data.images[batch], replayed.images)
            current = current_share * loss_of_real(module, real, batch)
            return current + earlier_share * replay_loss(replayed, synthetic, module.head(synthetic))

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        return state, CountedUpload(parameters, counts)

    def open_rounds(self, module: LanderGenerator, rng: torch.Generator) -> OpenRound:
        """Return what opens each round of synthesis: the labels' anchors, and noise layers drawn anew."""
        anchors = self.anchors().to(module.scale.mean.device)

        def open_round(labels: Tensor) -> NoisyRound:
            for layer in module.noise:
                assert isinstance(layer, nn.Linear)
                draw_noise(layer, rng)
            return NoisyRound(self, module, anchors[labels])

        return open_round

    def anchors(self) -> Tensor:
        """Return the anchors of all classes, (K, D); the same everywhere and always."""
        return data_free.label_anchors(self.task.num_classes, num_features(self.task), self.anchor_norm)

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> LanderGenerator:
        spec = self.task
        return built_generator(
            lambda: LanderGenerator(
                spec.image_channels,
                spec.image_size,
                num_features(spec),
                num_noise_layers=math.ceil(self.synthesis_batch_size / self.samples_per_layer),
                samples_per_layer=self.samples_per_layer,
                latent_size=self.latent_size,
                width=self.generator_width,
            ),
            parameters,
            rng,
        )


def scales(seen: Collection[int], now: Collection[int]) -> tuple[float, float]:
    """Return (cur, pre): ``a = log2(C/2 + 1)``, ``b = sqrt(K/C)``, ``cur = 0.2 (1 + 1/a) / b``, ``pre = 0.4 a b``.

    C counts all classes up to and with this round, K those before it, so ``b`` is at most 1.

    Args:
        seen: classes met before this round, at least one.
        now: classes of this round.
    """
    num_all, num_earlier = len({*seen, *now}), len(set(seen))
    spread, share = math.log2(num_all / 2 + 1), math.sqrt(num_earlier / num_all)
    return 0.2 * (1 + 1 / spread) / share, 0.4 * spread * share


def replay_loss(replayed: Answered, features: Tensor, logits: Tensor) -> Tensor:
    """Return ``soft CE + feature MSE`` of replayed images with these features (B, D) and logits (B, K)."""
    return replayed.distillation(logits) + F.mse_loss(features, replayed.by.features)


@torch.no_grad()
def draw_noise(layer: nn.Linear, rng: torch.Generator) -> None:
    """Draw a noise layer anew: weights from N(0, 1), no bias. Weights so large stay about as drawn in a short round."""
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng))
    layer.bias.zero_()


class NoisyRound:
    """A round of synthesis that trains the generator itself, from fresh noise layers.

    Args:
        settings: step sizes and the bounding loss.
        module: the generator.
        anchors: (B, D) of the round's labels.
    """

    def __init__(self, settings: Lander, module: LanderGenerator, anchors: Tensor) -> None:
        self._settings, self._module, self._anchors = settings, module, anchors
        drawing = [*module.norm.parameters(), *module.noise.parameters(), *module.decoder.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": drawing},
            {"params": list(module.scale.parameters()), "lr": settings.scale_learning_rate},
        ]
        betas = (settings.generator_beta1, settings.generator_beta2)
        self._adam = torch.optim.Adam(groups, lr=settings.generator_learning_rate, betas=betas)

    def draw(self) -> Tensor:
        """Return the round's images in [0, 1]."""
        images: Tensor = self._module(self._anchors)
        return images

    def scaled(self, images: Tensor) -> Tensor:
        """Return images in the learnt scale."""
        scaled: Tensor = self._module.scale(images)
        return scaled

    def extra_loss(self, judged: Observation) -> Tensor:
        """Return the bounding loss of what the task model saw."""
        settings = self._settings
        return settings.anchor_weight * data_free.bounding_loss(judged.features, self._anchors, settings.anchor_radius)

    def descend(self, loss: Tensor) -> None:
        """Move the generator, its noise layers and the scale."""
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        self._adam.step()

    def finish(self) -> None:
        """Nothing is left to do."""
