"""LANDER: TARGET with labels' embeddings as anchors, for the generator's input and for the task model's features.

Tran et al. 2024, "Text-Enhanced Data-free Approach for Federated Class-Incremental Learning", as a baseline in
pFedGRP's real-time protocol (its appendices B.1 and B.2).

Which logits take part: as in TARGET here (``federation/methods/target.py``), all of them unless ``logits = "split"``.
In round 0 there is nothing to replay: plain cross-entropy and the anchors.

Differences from the paper:

1. Anchors are random orthogonal vectors, one per class, not a language model's embeddings of the class names: class
   names aren't always words, and no such model ships with this. So the anchors tell labels apart but know nothing of
   their kinship. They have as many entries as the task model's features (128; CLIP's and ResNet-18's have 512), and
   ``anchor_norm`` makes their entries about as large as a raw CLIP embedding's.
2. A round here is a task there: the images are made anew after every round, and the teacher of the distillation is the
   average model that the round started from. C, the number of new classes, is that of this client's round; K, that of
   earlier ones, is the number of classes seen by anybody before it.
3. Synthesis takes 10 rounds of 10 steps, pFedGRP's 100 epochs, with the reference's share of a fifth for warm-up; the
   reference takes 50 rounds of 40 steps. Its step size isn't reported; TARGET's stands. The adversarial term counts
   where student and teacher agree, and the student learns as TARGET's here.
4. The learnt scale of pixels starts at mean 0.5 and standard deviation 0.5, our [-1, 1]; the reference's 0.2 is that of
   images normalised by their own statistics.
5. The bounding loss takes its radius sample by sample.
6. SGD is that of all methods here (pFedGRP's B.2), and every round's model is kept, not the one of least loss.
7. The generator is trained on from round to round (noise layers are drawn anew, as in the paper); images travel as
   bytes.
8. Real and synthetic images go through the task model in one batch, so that BatchNorm normalises them alike.
9. A round whose synthesis diverges (the average model has absurd parameters) keeps generator and images before it.

The parameter count that pFedGRP's Table 6 gives (130.8 M) isn't reproduced: with the reference's sizes it is 5.7 M.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from federation.methods.steps.task_model import Optimisation, descend, trained_parameters
from federation.methods.synthesis_method import SynthesisMethod, known_clients, seen_classes, uniform_average
from federation.methods.synthesis_records import IMAGES, CountedUpload, SynthesisDownload, SynthesisState
from federation.methods.task_method import TaskMethod
from federation.methods.task_records import NoState
from models.build import build_module, initialise
from models.data_free import LanderGenerator
from models.resnet import WIDTHS, ResNet20

NUM_FEATURES = WIDTHS[-1]
"""D: entries of a feature and of an anchor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lander(SynthesisMethod):
    """Settings and both halves of the method; the task model's settings are those of ``TaskMethod``.

    Attributes:
        logits: ``split`` or ``all``; see ``steps.incremental.LOGITS``.
        synthetic_batch_size: synthetic images beside each batch of real ones.
        temperature: of the distillation.
        anchor_weight: of the bounding loss, on the client and in synthesis.
        anchor_radius: of the ball around an anchor, in mean squared distance per entry.
        anchor_norm: length of an anchor.
        synthesis_rounds: rounds of synthesis per round; each leaves one batch of images.
        synthesis_steps: steps of each.
        synthesis_batch_size: images of each.
        samples_per_layer: images that share a noise layer.
        generator_learning_rate: of the generator's Adam.
        scale_learning_rate: of the learnt scale of pixels.
        generator_beta1: of Adam.
        generator_beta2: of Adam.
        generator_width: channels of the generator's last hidden maps.
        latent_size: entries behind the noise layers.
        batch_norm_weight: of the distance between BatchNorm statistics.
        batch_norm_momentum: share of earlier rounds of synthesis in the batch's statistics.
        label_weight: of the cross-entropy with the images' labels.
        adversarial_weight: of the adversarial term.
        adversarial_where: ``agree`` or ``disagree``: the images on which it counts.
        warm_up_rounds: rounds of synthesis before student and adversarial term.
        padding: pixels by which synthesis shifts images before the task model sees them.
        student_steps: the student's steps after each round of synthesis.
    """

    name: ClassVar[str] = "lander"

    logits: str = "all"
    synthetic_batch_size: int = 128
    temperature: float = 2.0
    anchor_weight: float = 5.0
    anchor_radius: float = 0.015
    anchor_norm: float = 5.0
    synthesis_rounds: int = 10
    synthesis_steps: int = 10
    synthesis_batch_size: int = 256
    samples_per_layer: int = 10
    generator_learning_rate: float = 2e-3
    scale_learning_rate: float = 0.01
    generator_beta1: float = 0.5
    generator_beta2: float = 0.999
    generator_width: int = 64
    latent_size: int = 256
    batch_norm_weight: float = 1.0
    batch_norm_momentum: float = 0.9
    label_weight: float = 0.5
    adversarial_weight: float = 1.0
    adversarial_where: str = "agree"
    warm_up_rounds: int = 2
    padding: int = 4
    student_steps: int = 10

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.one_of(LOGITS, self, "logits")
        checks.at_least(0, self, ["warm_up_rounds", "padding", "student_steps"])
        checks.at_least(1, self, ["synthesis_rounds", "synthesis_steps", "samples_per_layer"])
        checks.at_least(1, self, ["generator_width", "latent_size"])
        checks.at_least(2, self, ["synthetic_batch_size", "synthesis_batch_size"])
        weights = ["anchor_weight", "batch_norm_weight", "label_weight", "adversarial_weight"]
        checks.within(0.0, math.inf, self, [*weights, "generator_learning_rate", "scale_learning_rate"])
        checks.within(0.0, math.inf, self, ["anchor_radius", "anchor_norm"])
        checks.within(0.0, 1.0, self, ["generator_beta1", "generator_beta2", "batch_norm_momentum"])
        checks.within(1e-3, 1e9, self, ["temperature"])
        checks.one_of(data_free.AGREEMENTS, self, "adversarial_where")

    def local_round(
        self, state: NoState, data: RoundData, download: SynthesisDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, CountedUpload]:
        """Minimise ``cur (CE + 5 bound) of real samples + pre (soft CE + feature MSE) of synthetic images``."""
        del sampler
        counts, optimisation, start = data.counts(), Optimisation.of(self), download.task_parameters
        anchors = self.anchors().to(data.images.device)[data.labels]
        replay = self._replay(download, split_generator(rng)) if download.synthetic else None
        current_share, earlier_share = scales(len(counts), len(download.seen)) if replay else (1.0, 0.0)
        absent = absent_classes(download.seen, counts, self.logits) if replay else ()

        def batch_loss(module: ResNet20, batch: Tensor) -> Tensor:
            images, replayed = data.images[batch], None
            if replay is not None:
                replayed = replay.draw()
                images = torch.cat([images, replay.images[replayed]])
            features = module.features(images)
            logits, size = module.head(features), len(batch)
            current = current_loss(logits[:size], data.labels[batch], absent)
            bound = data_free.bounding_loss(features[:size], anchors[batch], self.anchor_radius)
            loss = current_share * (current + self.anchor_weight * bound)
            if replay is None or replayed is None:
                return loss
            return loss + earlier_share * replay.loss(features[size:], logits[size:], replayed)

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
        module = self._generator(generator, rng).to(device).to(memory_format=torch.channels_last).train()
        teacher = data_free.frozen_task_model(self.task, average)
        student = Student(self.task, StudentTraining(), device, split_generator(rng))
        anchors, noise_rng = self.anchors().to(device), split_generator(rng)

        def open_round(labels: Tensor) -> NoisyRound:
            for layer in module.noise:
                assert isinstance(layer, nn.Linear)
                fresh = build_module(lambda: nn.Linear(NUM_FEATURES, self.latent_size))
                layer.load_state_dict(initialise(fresh, noise_rng).state_dict())
            return NoisyRound(self, module, anchors[labels])

        images = synthesise(teacher, open_round, seen, self._synthesis(), student, split_generator(rng))
        trained = trained_parameters(module)
        return (trained if data_free.all_finite(trained) else generator), images

    def anchors(self) -> Tensor:
        """Return the anchors of all classes, (K, D); the same everywhere and always."""
        return data_free.label_anchors(self.task.num_classes, NUM_FEATURES, self.anchor_norm)

    def _replay(self, download: SynthesisDownload, rng: torch.Generator) -> AnsweredPool:
        pool = data_free.from_bytes(download.synthetic[IMAGES])
        answered = data_free.answers(self.task, download.task_parameters, pool)
        known = torch.tensor(distilled_classes(download.seen, self.task.num_classes, self.logits), device=pool.device)
        return AnsweredPool(pool, answered, known, self.temperature, self.synthetic_batch_size, rng)

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

    def _generator(self, parameters: Parameters, rng: torch.Generator) -> LanderGenerator:
        spec = self.task
        module = build_module(
            lambda: LanderGenerator(
                spec.image_channels,
                spec.image_size,
                NUM_FEATURES,
                num_noise_layers=math.ceil(self.synthesis_batch_size / self.samples_per_layer),
                samples_per_layer=self.samples_per_layer,
                latent_size=self.latent_size,
                width=self.generator_width,
            )
        )
        if not parameters:
            return initialise(module, rng)
        module.load_state_dict({name: tensor.clone() for name, tensor in parameters.items()})
        return module


def scales(num_new: int, num_earlier: int) -> tuple[float, float]:
    """Return (cur, pre): ``a = log2(C/2 + 1)``, ``b = sqrt(K/C)``, ``cur = 0.2 (1 + 1/a) / b``, ``pre = 0.4 a b``.

    Args:
        num_new: C, classes of this round.
        num_earlier: K, classes seen before it.
    """
    spread, share = math.log2(num_new / 2 + 1), math.sqrt(num_earlier / num_new)
    return 0.2 * (1 + 1 / spread) / share, 0.4 * spread * share


@dataclass(frozen=True, slots=True)
class AnsweredPool:
    """Synthetic images with what the average model said about them.

    Attributes:
        images: (B, C, H, W) float32.
        answered: the average model's features and logits of them.
        known: (S,) int64, the classes whose logits are distilled.
        temperature: of the distillation.
        batch_size: images per step.
        rng: draws each step's.
    """

    images: Tensor
    answered: Observation
    known: Tensor
    temperature: float
    batch_size: int
    rng: torch.Generator

    def draw(self) -> Tensor:
        """Return the indices (B,) of a step's images, drawn anew."""
        return torch.randperm(len(self.images), generator=self.rng)[: self.batch_size].to(self.images.device)

    def loss(self, features: Tensor, logits: Tensor, batch: Tensor) -> Tensor:
        """Return ``soft CE + feature MSE`` of the images ``batch`` with these features (B, D) and logits (B, K)."""
        earlier = self.answered.logits[batch][:, self.known]
        distilled = soft_cross_entropy(logits[:, self.known], earlier, self.temperature)
        return distilled + F.mse_loss(features, self.answered.features[batch])


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
