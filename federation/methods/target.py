"""TARGET: the aggregator makes a set of images without data; clients distil the average model on it.

Zhang et al. 2023, "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation", as a baseline in
pFedGRP's real-time protocol (its appendices B.1 and B.2).

The paper's head grows: cross-entropy on the new logits alone, distillation on the old ones. In this protocol all K
logits exist from the start and classes come back, so by default every logit takes part in both (``logits = "all"``);
with the split nothing would compare old classes with new ones. ``logits = "split"`` does as the paper: cross-entropy
leaves out classes that some client met in an earlier round and this client's round lacks, distillation takes those
seen. In round 0 there is nothing to replay: plain cross-entropy, which is FedAvg.

Differences from the paper:

1. A round here is a task there: the images are made anew after every round, and the teacher of the distillation is the
   average model that the round started from.
2. Settings are the reference's for 32 pixels (pFedGRP's authors used the reference): 10 rounds of synthesis with 10
   steps, which are pFedGRP's 100 epochs. Its warm-up of 20 rounds is longer than that, so neither the student nor the
   adversarial term is ever used, and 2560 images are made; a shorter ``warm_up_rounds`` uses both.
3. The adversarial term counts where student and teacher agree, as the reference has it; the paper's text says disagree
   (``adversarial_where``). The student learns as in SDD, at a tenth of its step size (``steps/synthesis.py``).
4. The generator is trained on from round to round, and optimisers are made anew.
5. SGD is that of all methods here (pFedGRP's B.2), without the reference's crops and flips of real images.
6. Real and synthetic images go through the task model in one batch, so that BatchNorm normalises them alike.
7. Images travel as bytes, and are kept in [-1, 1] as real ones: ``x -> 2 x - 1`` of the sigmoid's.
8. A round whose synthesis diverges (the average model has absurd parameters) keeps generator and images before it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from federation.methods import checks
from federation.methods.records import ClientId, Parameters, RoundData, Sampler
from federation.methods.seeding import split_generator
from federation.methods.steps import data_free
from federation.methods.steps.data_free import Observation
from federation.methods.steps.incremental import (
    LOGITS,
    absent_classes,
    current_loss,
    distilled_classes,
    soft_cross_entropy,
)
from federation.methods.steps.synthesis import Student, StudentTraining, Synthesis, synthesise
from federation.methods.steps.task_model import (
    Optimisation,
    descend,
    train_task_model,
    trained_parameters,
)
from federation.methods.synthesis_method import SynthesisMethod, known_clients, seen_classes, uniform_average
from federation.methods.synthesis_records import IMAGES, CountedUpload, SynthesisDownload, SynthesisState
from federation.methods.task_method import TaskMethod
from federation.methods.task_records import NoState
from models.build import build_module, initialise
from models.data_free import TargetGenerator
from models.resnet import ResNet20


@dataclass(frozen=True, kw_only=True, slots=True)
class Target(SynthesisMethod):
    """Settings and both halves of the method; the task model's settings are those of ``TaskMethod``.

    Attributes:
        logits: ``split`` or ``all``; see ``steps.incremental.LOGITS``.
        synthetic_batch_size: synthetic images beside each batch of real ones.
        distillation_weight: of the distillation on synthetic images.
        temperature: of the distillation.
        synthesis_rounds: rounds of synthesis per round; each leaves one batch of images.
        synthesis_steps: steps of each.
        synthesis_batch_size: images of each.
        generator_learning_rate: of the generator's inner Adam; the outer one's is ``synthesis_steps`` times as large.
        latent_learning_rate: of the latents, which are trained too.
        generator_beta1: of both Adams.
        generator_beta2: of both Adams.
        generator_width: channels of the generator's last hidden maps.
        latent_size: entries of a latent.
        batch_norm_weight: of the distance between BatchNorm statistics.
        batch_norm_momentum: share of earlier rounds of synthesis in the batch's statistics.
        label_weight: of the cross-entropy with the images' labels.
        adversarial_weight: of the adversarial term.
        adversarial_where: ``agree`` or ``disagree``: the images on which it counts.
        warm_up_rounds: rounds of synthesis before student and adversarial term.
        padding: pixels by which synthesis shifts images before the task model sees them.
        student_steps: the student's steps after each round of synthesis.
    """

    name: ClassVar[str] = "target"

    logits: str = "all"
    synthetic_batch_size: int = 128
    distillation_weight: float = 25.0
    temperature: float = 2.0
    synthesis_rounds: int = 10
    synthesis_steps: int = 10
    synthesis_batch_size: int = 256
    generator_learning_rate: float = 2e-3
    latent_learning_rate: float = 0.01
    generator_beta1: float = 0.5
    generator_beta2: float = 0.999
    generator_width: int = 64
    latent_size: int = 256
    batch_norm_weight: float = 10.0
    batch_norm_momentum: float = 0.9
    label_weight: float = 0.5
    adversarial_weight: float = 1.0
    adversarial_where: str = "agree"
    warm_up_rounds: int = 20
    padding: int = 4
    student_steps: int = 10

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.one_of(LOGITS, self, "logits")
        checks.at_least(0, self, ["warm_up_rounds", "padding", "student_steps"])
        checks.at_least(1, self, ["synthesis_rounds", "synthesis_steps", "generator_width", "latent_size"])
        checks.at_least(2, self, ["synthetic_batch_size", "synthesis_batch_size"])
        weights = ["distillation_weight", "batch_norm_weight", "label_weight", "adversarial_weight"]
        checks.within(0.0, math.inf, self, [*weights, "generator_learning_rate", "latent_learning_rate"])
        checks.within(0.0, 1.0, self, ["generator_beta1", "generator_beta2", "batch_norm_momentum"])
        checks.within(1e-3, 1e9, self, ["temperature"])
        checks.one_of(data_free.AGREEMENTS, self, "adversarial_where")

    def local_round(
        self, state: NoState, data: RoundData, download: SynthesisDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, CountedUpload]:
        """Minimise ``CE of real samples + w soft CE with the average model on synthetic images``, T = 2."""
        del sampler
        counts, optimisation, start = data.counts(), Optimisation.of(self), download.task_parameters
        if not download.synthetic:
            parameters = train_task_model(self.task, start, data.images, data.labels, optimisation, rng)
            return state, CountedUpload(parameters, counts)
        pool = data_free.from_bytes(download.synthetic[IMAGES])
        known = torch.tensor(distilled_classes(download.seen, self.task.num_classes, self.logits), device=pool.device)
        targets = data_free.answers(self.task, start, pool).logits[:, known]
        absent, replay_rng = absent_classes(download.seen, counts, self.logits), split_generator(rng)

        def batch_loss(module: ResNet20, batch: Tensor) -> Tensor:
            replayed = torch.randperm(len(pool), generator=replay_rng)[: self.synthetic_batch_size].to(pool.device)
            logits = module(torch.cat([data.images[batch], pool[replayed]]))
            current = current_loss(logits[: len(batch)], data.labels[batch], absent)
            earlier = soft_cross_entropy(logits[len(batch) :, known], targets[replayed], self.temperature)
            return current + self.distillation_weight * earlier

        parameters = descend(self.task, start, len(data.labels), optimisation, rng, batch_loss)
        return state, CountedUpload(parameters, counts)

    def aggregate(
        self,
        state: SynthesisState,
        uploads: Mapping[ClientId, CountedUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[SynthesisState, dict[ClientId, SynthesisDownload]]:
        """Average the uploads, then make a new set of images against the average.

        Raises:
            ValueError: There are no uploads.
        """
        del sampler
        average, seen = uniform_average(uploads), seen_classes(state, uploads)
        generator, images = self.make_images(state.generator, average, seen, rng)
        return self.same_for_all(
            SynthesisState(
                average=average,
                generator=generator,
                synthetic={IMAGES: images} if len(images) else state.synthetic,
                seen=seen,
                clients=known_clients(state, uploads),
            )
        )

    def make_images(
        self, generator: Parameters, average: Parameters, seen: tuple[int, ...], rng: torch.Generator
    ) -> tuple[Parameters, Tensor]:
        """Return (the generator trained on, images as bytes); an empty generator is initialised first."""
        device = next(iter(average.values())).device
        module = self._generator(generator, rng).to(device).to(memory_format=torch.channels_last)
        teacher = data_free.frozen_task_model(self.task, average)
        student = Student(self.task, StudentTraining(), device, split_generator(rng))
        outer = torch.optim.Adam(
            module.parameters(),
            lr=self.generator_learning_rate * self.synthesis_steps,
            betas=(self.generator_beta1, self.generator_beta2),
        )
        latents_rng = split_generator(rng)

        def open_round(labels: Tensor) -> FastRound:
            latents = torch.randn(len(labels), self.latent_size, generator=latents_rng).to(device)
            return FastRound(self, module, outer, latents)

        images = synthesise(teacher, open_round, seen, self._synthesis(), student, split_generator(rng))
        trained = trained_parameters(module)
        return (trained if data_free.all_finite(trained) else generator), images

    def _synthesis(self) -> Synthesis:
        return Synthesis(
            num_rounds=self.synthesis_rounds,
            steps_per_round=self.synthesis_steps,
            batch_size=self.synthesis_batch_size,
            batch_norm_weight=self.batch_norm_weight,
            batch_norm_momentum=self.batch_norm_momentum,
            label_weight=self.label_weight,
            adversarial_weight=self.adversarial_weight,
            adversarial_where=self.adversarial_where,
            warm_up_rounds=self.warm_up_rounds,
            padding=self.padding,
            student_steps=self.student_steps,
        )

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> TargetGenerator:
        spec = self.task
        module = build_module(
            lambda: TargetGenerator(spec.image_channels, spec.image_size, self.latent_size, self.generator_width)
        )
        if not parameters:
            return initialise(module, rng)
        module.load_state_dict({name: tensor.clone() for name, tensor in parameters.items()})
        return module


class FastRound:
    """A round of synthesis on a copy of the generator, whose gradients' sum then moves the generator (FOMAML).

    Args:
        settings: step sizes.
        module: the generator; moved when the round ends.
        outer: its optimiser.
        latents: (B, Z) of this round; trained with the copy.
    """

    def __init__(self, settings: Target, module: nn.Module, outer: torch.optim.Optimizer, latents: Tensor) -> None:
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

    def extra_loss(self, judged: Observation) -> float:
        """Return nothing of its own."""
        del judged
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
