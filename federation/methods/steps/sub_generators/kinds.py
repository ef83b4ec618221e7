"""The kinds of generative model that a sub-generator can be, each behind the same four verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.kit.pace import ShouldStop, never
from replayfleet.federation.methods.kit.privacy import Trained, composed
from replayfleet.federation.methods.kit.records import Parameters, Sampler
from replayfleet.federation.methods.kit.seeding import noise_generator
from replayfleet.federation.methods.steps.dp_sgd import DpSgd
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.sub_generators.ddpm import (
    DdpmSchedule,
    denoising_sampler,
    new_denoiser,
    train_denoiser,
)
from replayfleet.federation.methods.steps.sub_generators.gaussian import (
    check_mixture,
    learned,
    new_mixture,
    pooled,
)
from replayfleet.federation.methods.steps.sub_generators.private_moments import NUM_STEPS, private_moments
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.models.build import build_generator
from replayfleet.models.ddpm import build_denoiser
from replayfleet.models.specs import GeneratorSpec, MixtureSpec, TaskSpec


class SubGeneratorKind(Protocol):
    """One kind: how its sub-generators begin, learn, draw, and are laid out."""

    @property
    def graph_spec(self) -> GeneratorSpec | None:
        """What ``export.graphs.graph.sub_generator_graph`` takes for it; None if only PyTorch runs this kind."""

    def new(self, rng: torch.Generator) -> SubGenerator:
        """Return one with first parameters from ``rng``."""

    @property
    def batch_size(self) -> int:
        """Samples per step."""

    @property
    def privacy(self) -> DpSgd | None:
        """How single samples are hidden; None if they needn't be."""

    def train(
        self,
        start: SubGenerator,
        images: Tensor,
        num_epochs: int,
        rng: torch.Generator,
        should_stop: ShouldStop = never,
    ) -> SubGenerator:
        """Return it after training on images (B, C, H, W); ``start`` is left untouched."""

    def planned(self, num_samples: int, num_epochs: int) -> Trained | None:
        """Return what a training at full length costs; None where nothing is hidden."""

    def sampler(self) -> Sampler:
        """Return what runs it in PyTorch."""

    def layout(self) -> Parameters:
        """Return its parameters on the meta device, as they travel."""

    def check(self, parameters: Parameters) -> None:
        """Raise ValueError for parameters that have the layout, are finite, and yet impossible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WganGp:
    """A Wasserstein GAN with gradient penalty; the attributes are those of ``GanSchedule``, and ``spec``'s width."""

    spec: TaskSpec
    batch_size: int
    learning_rate: float
    betas: tuple[float, float]
    critic_steps_per_generator_step: int
    privacy: DpSgd | None = None

    @property
    def graph_spec(self) -> GeneratorSpec | None:
        """Its own spec: the graph's width is that of the sub-generator."""
        return self.spec

    def new(self, rng: torch.Generator) -> SubGenerator:
        return new_sub_generator(self.spec, rng)

    def train(
        self,
        start: SubGenerator,
        images: Tensor,
        num_epochs: int,
        rng: torch.Generator,
        should_stop: ShouldStop = never,
    ) -> SubGenerator:
        return train_sub_generator(self.spec, start, images, self.schedule(num_epochs, should_stop), rng)

    def schedule(self, num_epochs: int, should_stop: ShouldStop = never) -> GanSchedule:
        """Return how to train for ``num_epochs``."""
        return GanSchedule(
            num_epochs=num_epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            betas=self.betas,
            critic_steps_per_generator_step=self.critic_steps_per_generator_step,
            should_stop=should_stop,
            privacy=self.privacy,
        )

    def planned(self, num_samples: int, num_epochs: int) -> Trained | None:
        return None if self.privacy is None else self.privacy.planned(num_samples, self.batch_size, num_epochs)

    def sampler(self) -> Sampler:
        return eager_sampler(self.spec)

    def layout(self) -> Parameters:
        return packing.layout(build_generator(self.spec, device="meta"))

    def check(self, parameters: Parameters) -> None:
        """Any finite numbers draw images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ddpm:
    """A diffusion model; ``width`` is the denoiser's, ``num_sampling_steps`` its calls per sample."""

    spec: TaskSpec
    width: int
    batch_size: int
    learning_rate: float
    num_sampling_steps: int
    privacy: DpSgd | None = None

    @property
    def graph_spec(self) -> GeneratorSpec | None:
        """None: a draw is a loop over the denoiser, which no graph here holds."""
        return None

    def new(self, rng: torch.Generator) -> SubGenerator:
        return new_denoiser(self.spec, self.width, rng)

    def train(
        self,
        start: SubGenerator,
        images: Tensor,
        num_epochs: int,
        rng: torch.Generator,
        should_stop: ShouldStop = never,
    ) -> SubGenerator:
        schedule = DdpmSchedule(
            num_epochs=num_epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            should_stop=should_stop,
            privacy=self.privacy,
        )
        return train_denoiser(self.spec, self.width, start, images, schedule, rng)

    def planned(self, num_samples: int, num_epochs: int) -> Trained | None:
        return None if self.privacy is None else self.privacy.planned(num_samples, self.batch_size, num_epochs)

    def sampler(self) -> Sampler:
        return denoising_sampler(self.spec, self.width, self.num_sampling_steps)

    def layout(self) -> Parameters:
        return packing.layout(build_denoiser(self.spec, self.width, device="meta"))

    def check(self, parameters: Parameters) -> None:
        """Any finite numbers draw images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A mixture of Gaussians, learned in one step and in closed form, whatever the number of epochs.

    One with privacy has a single component: whose image is in which cluster would have to be hidden too.
    """

    spec: MixtureSpec
    batch_size: int = 2**30
    privacy: DpSgd | None = None

    @property
    def graph_spec(self) -> GeneratorSpec | None:
        """Its own."""
        return self.spec

    def new(self, rng: torch.Generator) -> SubGenerator:
        return new_mixture(self.spec)

    def train(
        self,
        start: SubGenerator,
        images: Tensor,
        num_epochs: int,
        rng: torch.Generator,
        should_stop: ShouldStop = never,
    ) -> SubGenerator:
        if self.privacy is None:
            return learned(self.spec, start, images, rng)
        fresh = private_moments(images, self.spec.num_dims, self.privacy, noise_generator(rng))
        mechanism = Trained(self.privacy.noise_multiplier, 1.0, NUM_STEPS)
        return SubGenerator(pooled(self.spec, [start.generator], [fresh]), {}, composed(start.history, mechanism))

    def planned(self, num_samples: int, num_epochs: int) -> Trained | None:
        """All samples take part in each of two steps, whatever the epochs."""
        return None if self.privacy is None else Trained(self.privacy.noise_multiplier, 1.0, NUM_STEPS)

    def sampler(self) -> Sampler:
        return eager_sampler(self.spec)

    def layout(self) -> Parameters:
        return packing.layout(build_generator(self.spec, device="meta"))

    def check(self, parameters: Parameters) -> None:
        check_mixture(parameters)
