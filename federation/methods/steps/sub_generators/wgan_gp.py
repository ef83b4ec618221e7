"""Training one class's sub-generator as a Wasserstein GAN with gradient penalty.

Gulrajani et al. 2017, "Improved Training of Wasserstein GANs", Algorithm 1.
Axes: B batch, C channels, H height, W width, Z latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import grad

from replayfleet.federation.methods.kit.pace import ShouldStop, never
from replayfleet.federation.methods.kit.privacy import History
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import noise_generator
from replayfleet.federation.methods.steps.dp_sgd import DpSgd, Predict, batches
from replayfleet.federation.methods.steps.task_model import trainable, trained_parameters
from replayfleet.models.build import build_critic, build_generator, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

PENALTY_WEIGHT = 10.0
"""Factor of the gradient penalty (Gulrajani et al., section 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GanSchedule:
    """How long and how to train a sub-generator.

    Attributes:
        num_epochs: passes over the class's samples; every batch is one critic step.
        batch_size: samples per critic step.
        learning_rate: of both Adams.
        betas: of both Adams.
        critic_steps_per_generator_step: critic steps before each generator step (n_critic).
        should_stop: asked after every critic step; True ends training early, with what it reached.
        privacy: how the critic hides single samples; None if it needn't. The generator sees none of them but through
            the critic, and so do its BatchNorm layers.
    """

    num_epochs: int
    batch_size: int
    learning_rate: float
    betas: tuple[float, float]
    critic_steps_per_generator_step: int
    should_stop: ShouldStop = never
    privacy: DpSgd | None = None


@dataclass(frozen=True, slots=True)
class SubGenerator:
    """One class's generative model on the client that trained it.

    Attributes:
        generator: parameters that draw; the only part that is uploaded.
        critic: parameters to go on training from; empty on a client that got its generator back from the aggregator.
        history: what training it with DP-SGD has cost so far.
    """

    generator: Parameters
    critic: Parameters
    history: History = ()

    def on(self, device: torch.device) -> SubGenerator:
        """Return it with its parameters on a torch device."""
        generator, critic = (
            {name: each.to(device) for name, each in part.items()} for part in (self.generator, self.critic)
        )
        return replace(self, generator=generator, critic=critic)


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator) -> Tensor:
    """Return the mean of ``(norm - 1)^2``, without its factor 10.

    ``norm`` is the Euclidean norm of the critic's gradient at ``u * real + (1 - u) * fake``, with one ``u`` from
    U(0, 1) per sample (Gulrajani et al., Algorithm 1, line 7).

    Args:
        critic: images (B, C, H, W) -> (B, ...) with one value per sample that depends on that sample alone.
        real: (B, C, H, W).
        fake: (B, C, H, W).
        rng: draws ``u``.

    Returns:
        Scalar, differentiable with respect to the critic's parameters.
    """
    share = torch.rand(len(real), 1, 1, 1, generator=rng).to(real.device)
    between = (share * real.detach() + (1 - share) * fake.detach()).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norms = gradient.flatten(1).norm(dim=1)
    penalty: Tensor = ((norms - 1) ** 2).mean()
    return penalty


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator) -> Tensor:
    """Return ``E[critic(fake)] - E[critic(real)] + 10 * gradient_penalty`` (Algorithm 1, line 7)."""
    fake = fake.detach()
    scores = critic(torch.cat([real, fake])).flatten()
    wasserstein = scores[len(real) :].mean() - scores[: len(real)].mean()
    # Algorithm 1, line 7
    loss: Tensor = wasserstein + PENALTY_WEIGHT * gradient_penalty(critic, real, fake, rng)
    return loss


def critic_loss_of_one(critic: Predict, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """Return the part of ``critic_loss`` that one sample has, for gradients by sample.

    Args:
        critic: images (B, C, H, W) -> (B,).
        real: (C, H, W).
        fake: (C, H, W).
        share: (1, 1, 1), the ``u`` of this sample.
    """

    def score(image: Tensor) -> Tensor:
        one: Tensor = critic(image.unsqueeze(0)).squeeze(0)
        return one

    slope = grad(score)(share * real + (1 - share) * fake)
    # Algorithm 1, line 7
    loss: Tensor = score(fake) - score(real) + PENALTY_WEIGHT * (slope.norm() - 1) ** 2
    return loss


def generator_loss(critic: nn.Module, fake: Tensor) -> Tensor:
    """Return ``-E[critic(fake)]``, which the generator descends (Algorithm 1, line 12); ``fake``: (B, C, H, W)."""
    loss: Tensor = -critic(fake).mean()  # Algorithm 1, line 12
    return loss


def new_sub_generator(spec: TaskSpec, rng: torch.Generator) -> SubGenerator:
    """Return freshly initialised generator and critic."""
    generator, critic = build_generator(spec), build_critic(spec)
    initialise(generator, rng)
    initialise(critic, rng)
    return SubGenerator(trained_parameters(generator), trained_parameters(critic))


def train_sub_generator(
    spec: TaskSpec, start: SubGenerator, images: Tensor, schedule: GanSchedule, rng: torch.Generator
) -> SubGenerator:
    """Return the sub-generator after training on the samples of one class; ``start`` is left untouched.

    Args:
        spec: image shape and width.
        start: where training starts; a missing critic is initialised anew.
        images: (B, C, H, W) float32 in [-1, 1], all of one class, on the torch device of ``start``.
        schedule: lengths and step sizes.
        rng: draws batches, latents and interpolates; on the CPU.

    Raises:
        ValueError: There are no images.
    """
    if len(images) == 0:
        raise ValueError("a sub-generator needs at least one image of its class")
    generator = trainable(build_generator(spec), start.generator)
    critic = build_critic(spec)
    if start.critic:
        trainable(critic, start.critic)
    else:
        initialise(critic, rng).to(images.device).train()
    generator_adam = torch.optim.Adam(generator.parameters(), lr=schedule.learning_rate, betas=schedule.betas)
    critic_adam = torch.optim.Adam(critic.parameters(), lr=schedule.learning_rate, betas=schedule.betas)
    size, privacy, step = schedule.batch_size, schedule.privacy, 0
    if privacy is not None:
        rng = noise_generator(rng)
    for batch in batches(len(images), size, schedule.num_epochs, rng, private=privacy is not None):
        real = images[batch]
        with torch.no_grad():
            fake = generator(_latents(len(real) if privacy is None else size, rng, images.device))
        critic_adam.zero_grad(set_to_none=True)
        if privacy is None:
            critic_loss(critic, real, fake[: len(real)], rng).backward()
        else:
            # by lot, so that nothing of one sample depends on which others took part; nor does how many are drawn
            beside = fake[torch.randint(len(fake), (len(real),), generator=rng)]
            share = torch.rand(len(real), 1, 1, 1, generator=rng).to(real.device)
            privacy.put_gradients(critic, critic_loss_of_one, (real, beside, share), size, rng)
        critic_adam.step()
        step += 1
        if step % schedule.critic_steps_per_generator_step == 0:
            _generator_step(generator, critic, generator_adam, size, rng)
        if schedule.should_stop():
            break
    history = start.history if privacy is None else privacy.after(start.history, len(images), size, step)
    return SubGenerator(trained_parameters(generator), trained_parameters(critic), history)


def _generator_step(
    generator: nn.Module, critic: nn.Module, adam: torch.optim.Adam, batch_size: int, rng: torch.Generator
) -> None:
    """Descend `generator_loss` on fresh latents."""
    critic.requires_grad_(False)
    adam.zero_grad(set_to_none=True)
    latents = _latents(batch_size, rng, next(generator.parameters()).device)
    generator_loss(critic, generator(latents)).backward()
    adam.step()
    critic.requires_grad_(True)


def _latents(count: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """Return (B, Z) noise for ``count`` samples, and for two where it is one, which BatchNorm can't train on."""
    return torch.randn(max(2, count), LATENT_SIZE, generator=rng).to(device)
