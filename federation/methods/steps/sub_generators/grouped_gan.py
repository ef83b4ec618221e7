"""Training the sub-generators of several classes in one go, with the results of one by one.

The mathematics is that of ``wgan_gp.train_sub_generator``, for N networks that run as one (``models.grouped``), with
the gradient of the critic written out, so that the penalty costs no second derivatives of convolutions. Each network
keeps its own random numbers, its own batches and its own normalisation statistics; Adam works entry by entry anyway. So
the results differ from one by one in rounding alone.

Axes: N networks, B batch, C channels, H height, W width, Z latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.methods.kit.each import by_groups
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import PENALTY_WEIGHT, GanSchedule, SubGenerator
from replayfleet.models import grouped
from replayfleet.models.build import build_critic, build_generator, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec


@dataclass(frozen=True, slots=True)
class SubGeneratorJob:
    """One sub-generator to train.

    Attributes:
        start: where training starts, left untouched; a missing critic is initialised anew.
        images: (B, C, H, W) float32 in [-1, 1], all of one class, at least one.
        rng: draws batches, latents and interpolates of this network.
    """

    start: SubGenerator
    images: Tensor
    rng: torch.Generator


def train_sub_generators(spec: TaskSpec, jobs: Sequence[SubGeneratorJob], schedule: GanSchedule) -> list[SubGenerator]:
    """Return the sub-generators after training, in the order of the jobs.

    Jobs with equally many images run together; others would need batches of different sizes.

    Raises:
        ValueError: A job has no images.
    """
    if any(len(job.images) == 0 for job in jobs):
        raise ValueError("a sub-generator needs at least one image of its class")
    return by_groups(jobs, lambda job: len(job.images), lambda alike: _Group(spec, alike, schedule).train())


class _Group:
    """N networks that train in step; every job has the same number of images."""

    def __init__(self, spec: TaskSpec, jobs: Sequence[SubGeneratorJob], schedule: GanSchedule) -> None:
        self._jobs, self._schedule, self._num = jobs, schedule, len(jobs)
        self._device = jobs[0].images.device
        with torch.device("meta"):
            self._generator_layers = build_generator(spec, device="meta").layers
            self._critic_layers = build_critic(spec, device="meta").layers
        self._starts = [_with_critic(spec, job) for job in jobs]
        self._generator = _trainable([_layers_of(start.generator) for start in self._starts], self._device)
        self._critic = _trainable([_layers_of(start.critic) for start in self._starts], self._device)
        betas, rate = schedule.betas, schedule.learning_rate
        self._generator_adam = torch.optim.Adam(_learnt(self._generator), lr=rate, betas=betas)
        self._critic_adam = torch.optim.Adam(_learnt(self._critic), lr=rate, betas=betas)

    def train(self) -> list[SubGenerator]:
        """Run the schedule (Gulrajani et al., Algorithm 1)."""
        step = 0
        for _ in range(self._schedule.num_epochs):
            orders = [torch.randperm(len(job.images), generator=job.rng).to(self._device) for job in self._jobs]
            for batches in zip(*(order.split(self._schedule.batch_size) for order in orders), strict=True):
                real = torch.cat([job.images[batch] for job, batch in zip(self._jobs, batches, strict=True)], dim=1)
                self._critic_step(real)
                step += 1
                if step % self._schedule.critic_steps_per_generator_step == 0:
                    self._generator_step()
        return [self._result(index) for index in range(self._num)]

    def _critic_step(self, real: Tensor) -> None:
        """Descend the sum over networks of ``wgan_gp.critic_loss``; networks share no parameters."""
        with torch.no_grad():
            fake = self._draw(max(2, len(real)))[: len(real)]
        shares = [torch.rand(len(real), 1, 1, 1, generator=job.rng) for job in self._jobs]
        share = torch.cat(shares, dim=1).to(self._device).repeat_interleave(real.shape[1] // self._num, dim=1)
        between = share * real + (1 - share) * fake
        inputs = torch.cat([real, fake, between]).contiguous(memory_format=torch.channels_last)
        trace = grouped.run(self._critic_layers, self._critic, self._num, inputs)
        scores = trace[-1].flatten(1)  # (3 B, N)
        wasserstein = scores[len(real) : 2 * len(real)].mean(dim=0) - scores[: len(real)].mean(dim=0)
        tail = [values[2 * len(real) :] for values in trace]
        slopes = grouped.input_gradient(self._critic_layers, self._critic, self._num, tail)
        norms = slopes.unflatten(1, (self._num, -1)).flatten(2).norm(dim=2)  # (B, N)
        loss = (wasserstein + PENALTY_WEIGHT * ((norms - 1) ** 2).mean(dim=0)).sum()
        self._critic_adam.zero_grad(set_to_none=True)
        loss.backward()
        self._critic_adam.step()

    def _generator_step(self) -> None:
        """Descend ``-E[critic(generator(z))]`` of each network (Algorithm 1, line 12)."""
        frozen = {name: tensor.detach() for name, tensor in self._critic.items()}
        fake = self._draw(max(2, self._schedule.batch_size)).contiguous(memory_format=torch.channels_last)
        scores = grouped.run(self._critic_layers, frozen, self._num, fake)[-1].flatten(1)
        self._generator_adam.zero_grad(set_to_none=True)
        (-scores.mean(dim=0).sum()).backward()
        self._generator_adam.step()

    def _draw(self, size: int) -> Tensor:
        latents = torch.cat([torch.randn(size, LATENT_SIZE, generator=job.rng) for job in self._jobs], dim=1)
        x = latents.to(self._device)[:, :, None, None]
        return grouped.run(self._generator_layers, self._generator, self._num, x)[-1]

    def _result(self, index: int) -> SubGenerator:
        start = self._starts[index]
        return SubGenerator(
            _named_as_ever(grouped.part(self._generator, index, _layers_of(start.generator))),
            _named_as_ever(grouped.part(self._critic, index, _layers_of(start.critic))),
        )


def _with_critic(spec: TaskSpec, job: SubGeneratorJob) -> SubGenerator:
    if job.start.critic:
        return job.start
    return SubGenerator(job.start.generator, dict(initialise(build_critic(spec), job.rng).state_dict()))


def _layers_of(parameters: Parameters) -> dict[str, Tensor]:
    """Return the parameters of ``Generator.layers`` or ``Critic.layers``, named from there."""
    return {name.removeprefix("layers."): tensor for name, tensor in parameters.items()}


def _named_as_ever(parameters: Parameters) -> dict[str, Tensor]:
    return {f"layers.{name}": tensor for name, tensor in parameters.items()}


def _trainable(parameter_sets: Sequence[Parameters], device: torch.device) -> dict[str, Tensor]:
    """Return the joined parameters; what Adam learns requires a gradient, statistics don't."""
    joined = {}
    for name, tensor in grouped.join(parameter_sets).items():
        own = tensor.detach().to(device).clone()
        if own.ndim == 4:
            own = own.contiguous(memory_format=torch.channels_last)
        joined[name] = own.requires_grad_(name.rpartition(".")[2] in {"weight", "bias"})
    return joined


def _learnt(joined: Parameters) -> list[Tensor]:
    return [tensor for tensor in joined.values() if tensor.requires_grad]
