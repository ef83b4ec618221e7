"""What TARGET and LANDER share: the aggregator makes a set of images without data, and clients distil on it.

How a round of synthesis draws and trains is each method's own (``open_rounds``), and so is the loss of ``local_work``.
Axes: B batch, C channels, H height, W width, K classes, S distilled classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit import checks
from replayfleet.federation.methods.kit.records import ClientId, Parameters, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.steps import data_free
from replayfleet.federation.methods.steps.data_free import Observation
from replayfleet.federation.methods.steps.incremental import LOGITS, distilled_classes, soft_cross_entropy
from replayfleet.federation.methods.steps.synthesis import OpenRound, Student, StudentTraining, synthesise
from replayfleet.federation.methods.steps.task_model import trained_parameters
from replayfleet.federation.methods.synthesis_method import (
    SynthesisMethod,
    known_clients,
    seen_classes,
    uniform_average,
)
from replayfleet.federation.methods.synthesis_records import IMAGES, CountedUpload, SynthesisDownload, SynthesisState
from replayfleet.federation.methods.task_method import TaskMethod
from replayfleet.models.resnet import ResNet

PASSES = ("apart", "joined")
"""How a step's real and synthetic images go through the task model.

``apart``, the references' way: one after the other, so BatchNorm normalises each batch by its own statistics and its
running ones see both. ``joined``: in one batch, so BatchNorm normalises them alike.
"""


@dataclass(frozen=True, slots=True)
class Answered:
    """Synthetic images of one step with what the average model says about them.

    Attributes:
        images: (B, C, H, W) float32.
        by: the average model's features and logits of them.
        known: (S,) int64, the classes whose logits are distilled.
        temperature: of the distillation.
    """

    images: Tensor
    by: Observation
    known: Tensor
    temperature: float

    def distillation(self, logits: Tensor) -> Tensor:
        """Return the soft cross-entropy of logits (B, K), now given for the images, with the answers."""
        return soft_cross_entropy(logits[:, self.known], self.by.logits[:, self.known], self.temperature)


@dataclass(frozen=True, slots=True)
class ReplayPool:
    """Synthetic images and the average model, which is asked about those that a step draws.

    Attributes:
        images: (N, C, H, W) float32 in [-1, 1].
        teacher: the average model, frozen.
        known: (S,) int64, the classes whose logits are distilled.
        temperature: of the distillation.
        batch_size: images per step.
        padding: images are shifted by up to so many pixels and mirrored, drawn anew for every step; None leaves them.
        rng: draws each step's.
    """

    images: Tensor
    teacher: ResNet
    known: Tensor
    temperature: float
    batch_size: int
    padding: int | None
    rng: torch.Generator

    def draw(self) -> Answered:
        """Return a step's images, drawn anew."""
        batch = torch.randperm(len(self.images), generator=self.rng)[: self.batch_size]
        images = self.images[batch.to(self.images.device)]
        if self.padding is not None:
            images = 2 * data_free.augmented((images + 1) / 2, self.padding, self.rng) - 1
        with torch.no_grad():
            features = self.teacher.features(images)
            answers = Observation(features, self.teacher.head(features), ())
        return Answered(images, answers, self.known, self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSynthesisMethod(SynthesisMethod, ABC):
    """Settings and plumbing; a method adds its name, its own settings, ``local_work`` and ``open_rounds``.

    Settings of the task model are those of ``TaskMethod``; those without a default differ between the methods.

    Attributes:
        logits: ``split`` or ``all``; see ``steps.incremental.LOGITS``.
        synthetic_batch_size: synthetic images beside each batch of real ones.
        passes: one of ``PASSES``.
        replay_augmented: whether clients shift and mirror the images anew for every step, as synthesis does.
        temperature: of the distillation.
        synthesis_rounds: rounds of synthesis per round; each leaves one batch of images.
        synthesis_steps: steps of each.
        synthesis_batch_size: images of each.
        generator_learning_rate: of the generator's Adam.
        generator_beta1: of every Adam of the synthesis.
        generator_beta2: of every Adam of the synthesis.
        generator_width: channels of the generator's last hidden maps.
        latent_size: entries of a latent.
        batch_norm_weight: of the distance between BatchNorm statistics.
        batch_norm_momentum: share of earlier rounds of synthesis in the batch's statistics.
        label_weight: of the cross-entropy with the images' labels.
        adversarial_weight: of the adversarial term.
        adversarial_where: ``agree`` or ``disagree``: the images on which it counts.
        warm_up_rounds: rounds of synthesis before the student learns; a round later the adversarial term counts.
        padding: pixels by which images are shifted before a task model sees them.
        student_steps: the student's steps after each round of synthesis.
    """

    keep_warm_up: ClassVar[bool] = True
    """Whether the images of the warm-up are kept."""
    balance_labels: ClassVar[bool] = False
    """Whether a round's labels go through the classes in turn; else they are drawn."""

    logits: str = "all"
    synthetic_batch_size: int = 128
    passes: str = "apart"
    replay_augmented: bool = True
    temperature: float = 2.0
    synthesis_rounds: int = 10
    synthesis_steps: int = 10
    synthesis_batch_size: int = 256
    generator_learning_rate: float = 2e-3
    generator_beta1: float = 0.5
    generator_beta2: float = 0.999
    generator_width: int = 64
    latent_size: int = 256
    batch_norm_weight: float
    batch_norm_momentum: float = 0.9
    label_weight: float = 0.5
    adversarial_weight: float = 1.0
    adversarial_where: str = "agree"
    warm_up_rounds: int
    padding: int = 4
    student_steps: int = 10

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        checks.one_of(LOGITS, self, "logits")
        checks.one_of(PASSES, self, "passes")
        checks.at_least(0, self, ["warm_up_rounds", "padding", "student_steps"])
        checks.at_least(1, self, ["synthesis_rounds", "synthesis_steps", "generator_width", "latent_size"])
        checks.at_least(2, self, ["synthetic_batch_size", "synthesis_batch_size"])
        weights = ["batch_norm_weight", "label_weight", "adversarial_weight"]
        checks.within(0.0, math.inf, self, [*weights, "generator_learning_rate"])
        checks.within(0.0, 1.0, self, ["generator_beta1", "generator_beta2", "batch_norm_momentum"])
        checks.within(1e-3, 1e9, self, ["temperature"])
        checks.one_of(data_free.AGREEMENTS, self, "adversarial_where")

    @abstractmethod
    def _generator(self, parameters: Parameters, rng: torch.Generator) -> nn.Module:
        """Return the generator with these parameters; without any, with first ones drawn from ``rng``."""

    @abstractmethod
    def open_rounds(self, module: Any, rng: torch.Generator) -> OpenRound:
        """Return what opens each round of synthesis; its rounds train ``module``, a ``_generator``, in place."""

    def aggregate(
        self,
        state: SynthesisState,
        uploads: Mapping[ClientId, CountedUpload],
        rng: torch.Generator,
        *,
        sampler: Sampler,
    ) -> tuple[SynthesisState, dict[ClientId, SynthesisDownload]]:
        """Average the uploads, then make a new set of images against the average."""
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
        teacher = data_free.frozen_task_model(self.task, average)
        made, images, _ = self.images_against(teacher, generator, seen, rng)
        return made, images

    def images_against(
        self,
        teacher: data_free.Teacher,
        generator: Parameters,
        classes: tuple[int, ...],
        rng: torch.Generator,
        among: tuple[int, ...] = (),
    ) -> tuple[Parameters, Tensor, Tensor]:
        """Return (the generator trained on, images as bytes, their labels) of some classes; see ``synthesise``."""
        device = next(teacher.parameters()).device
        module = self._generator(generator, rng).to(device).to(memory_format=torch.channels_last)
        student = Student(self.task, StudentTraining(), device, split_generator(rng))
        open_round = self.open_rounds(module, split_generator(rng))
        images, labels = synthesise(teacher, open_round, classes, self, student, split_generator(rng), among)
        trained = trained_parameters(module)
        return (trained if data_free.all_finite(trained) else generator), images, labels

    def features_of(self, module: ResNet, real: Tensor, synthetic: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of a step's real and of its synthetic images, as ``passes`` says."""
        if self.passes == "apart":
            return module.features(real), module.features(synthetic)
        features, size = module.features(torch.cat([real, synthetic])), len(real)
        return features[:size], features[size:]

    def _replay(self, download: SynthesisDownload, rng: torch.Generator) -> ReplayPool:
        pool = data_free.from_bytes(download.synthetic[IMAGES])
        known = distilled_classes(download.seen, self.task.num_classes, self.logits)
        return ReplayPool(
            images=pool,
            teacher=data_free.frozen_task_model(self.task, download.task_parameters),
            known=torch.tensor(known, device=pool.device),
            temperature=self.temperature,
            batch_size=self.synthetic_batch_size,
            padding=self.padding if self.replay_augmented else None,
            rng=rng,
        )
