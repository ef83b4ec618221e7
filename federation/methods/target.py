"""TARGET: the aggregator makes a set of images without data; clients distil the average model on it.

Zhang et al. 2023, "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation", as a baseline in
pFedGRP's real-time protocol (its appendices B.1 and B.2).

Which logits take part: ``steps.incremental.LOGITS``. In round 0 there is nothing to replay: plain cross-entropy, which
is FedAvg.
Differences from the paper: ``docs/methods/target.md``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.image_synthesis_method import ImageSynthesisMethod
from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import NoState
from replayfleet.federation.methods.lockstep import Work
from replayfleet.federation.methods.steps.data_free import Observation
from replayfleet.federation.methods.steps.incremental import absent_classes, current_loss
from replayfleet.federation.methods.steps.synthesis import OpenRound
from replayfleet.federation.methods.synthesis_method import built_generator
from replayfleet.federation.methods.synthesis_records import CountedUpload, SynthesisDownload
from replayfleet.models.data_free import TargetGenerator
from replayfleet.models.resnet import ResNet


@dataclass(frozen=True, kw_only=True, slots=True)
class Target(ImageSynthesisMethod):
    """Settings and both halves of the method; the other settings are those of ``ImageSynthesisMethod``.

    ``generator_learning_rate`` is that of the generator's inner Adam; the outer one's is ``synthesis_steps`` times as
    large.

    Attributes:
        distillation_weight: of the distillation on synthetic images.
        latent_learning_rate: of the latents, which are trained too.
        batch_norm_weight: of the distance between BatchNorm statistics.
        warm_up_rounds: rounds of synthesis before student and adversarial term.
    """

    name: ClassVar[str] = "target"

    distillation_weight: float = 25.0
    latent_learning_rate: float = 0.01
    batch_norm_weight: float = 10.0
    warm_up_rounds: int = 20

    def __post_init__(self) -> None:
        ImageSynthesisMethod.__post_init__(self)
        checks.within(0.0, math.inf, self, ["distillation_weight", "latent_learning_rate"])

    def local_work(
        self, state: NoState, data: RoundData, download: SynthesisDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[NoState, CountedUpload]]:
        """Minimise ``CE of real samples + w soft CE with the average model on synthetic images``, T = 2."""
        counts, start = data.counts(), download.task_parameters
        if not download.synthetic:
            parameters = yield self.training(data, start, rng)
            return state, CountedUpload(parameters, counts)
        replay = self._replay(download, split_generator(rng))
        absent = absent_classes(download.seen, counts, self.logits)

        def batch_loss(module: ResNet, batch: Tensor) -> Tensor:
            replayed = replay.draw()
            real, synthetic = self.features_of(module, data.images[batch], replayed.images)
            current = current_loss(module.head(real), data.labels[batch], absent)
            return current + self.distillation_weight * replayed.distillation(module.head(synthetic))

        parameters = yield self.descending(start, len(data.labels), rng, batch_loss)
        return state, CountedUpload(parameters, counts)

    def open_rounds(self, module: TargetGenerator, rng: torch.Generator) -> OpenRound:
        """Return what opens each round of synthesis: fresh latents, and a copy of ``module`` that learns fast."""
        return fast_rounds(self, module, rng)

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> TargetGenerator:
        return target_generator(self, parameters, rng)


def target_generator(settings: Any, parameters: Parameters, rng: torch.Generator) -> TargetGenerator:
    """Return TARGET's generator of a method's settings; see ``built_generator``."""
    spec = settings.task
    return built_generator(
        lambda: TargetGenerator(spec.image_channels, spec.image_size, settings.latent_size, settings.generator_width),
        parameters,
        rng,
    )


def fast_rounds(
    settings: Any, module: TargetGenerator, rng: torch.Generator, kind: type[FastRound] | None = None
) -> Callable[[Tensor], FastRound]:
    """Return what opens each round of synthesis of a method: labels (B,) -> its round, a ``FastRound`` or ``kind``."""
    outer = torch.optim.Adam(
        module.parameters(),
        lr=settings.generator_learning_rate * settings.synthesis_steps,
        betas=(settings.generator_beta1, settings.generator_beta2),
    )

    def open_round(labels: Tensor) -> FastRound:
        latents = torch.randn(len(labels), settings.latent_size, generator=rng).to(labels.device)
        return (kind or FastRound)(settings, module, outer, latents, labels)

    return open_round


class FastRound:
    """A round of synthesis on a copy of the generator, whose gradients' sum then moves the generator (FOMAML).

    Args:
        settings: a method's, with step sizes.
        module: the generator; moved when the round ends.
        outer: its optimiser.
        latents: (B, Z) of this round; trained with the copy.
        labels: (B,) of this round.
    """

    def __init__(
        self, settings: Any, module: nn.Module, outer: torch.optim.Optimizer, latents: Tensor, labels: Tensor
    ) -> None:
        self.settings, self.labels = settings, labels
        self._module, self._outer = module, outer
        self._fast = copy.deepcopy(module).train()
        self._latents = latents.requires_grad_(True)
        self._sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
        groups = [
            {"params": list(self._fast.parameters()), "lr": settings.generator_learning_rate},
            {"params": [self._latents], "lr": settings.latent_learning_rate},
        ]
        self._inner = torch.optim.Adam(groups, betas=(settings.generator_beta1, settings.generator_beta2))

    def draw(self) -> Tensor:
        """Return the round's images in [0, 1]."""
        images: Tensor = self._fast(self._latents)
        return images

    def scaled(self, images: Tensor) -> Tensor:
        """Return ``2 x - 1``."""
        return 2 * images - 1

    def extra_loss(self, judged: Observation) -> Tensor | float:
        """Return nothing of its own."""
        return 0.0

    def descend(self, loss: Tensor) -> None:
        """Move copy and latents, and remember the copy's gradients."""
        self._inner.zero_grad(set_to_none=True)
        loss.backward()
        for total, parameter in zip(self._sums, self._fast.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad
        self._inner.step()

    def finish(self) -> None:
        """Move the generator by the sum of gradients."""
        for parameter, total in zip(self._module.parameters(), self._sums, strict=True):
            parameter.grad = total
        self._outer.step()
