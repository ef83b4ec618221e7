"""A sub-generator that is a diffusion model: training it on one class, and drawing from it.

Ho et al. 2020, "Denoising Diffusion Probabilistic Models", with the noise schedule and scalings of ``diffusers``; drawn
with the second-order multistep solver of Lu et al. 2022, "DPM-Solver++", which needs 20 steps instead of 1000.
Differences from Ho et al.: no dropout, no horizontal flips, and the last parameters instead of their running mean.

Where noise comes from: the solver is deterministic, so a sample is a function of the image-shaped noise that it starts
from. A ``Draw`` gets latents (B, Z), which are too few numbers; row b seeds a generator of its own with its SHA-256,
and that draws the noise of sample b. So equal latents start from equal noise, whatever else is in the batch, and
drawing takes no randomness but the caller's.

Axes: B batch, C channels, H height, W width, Z latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from replayfleet.federation.methods.kit.pace import ShouldStop, never
from replayfleet.federation.methods.kit.records import Draw, Parameters, Sampler
from replayfleet.federation.methods.kit.seeding import digest_generator, noise_generator
from replayfleet.federation.methods.steps.dp_sgd import DpSgd, Predict, batches
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import SubGenerator
from replayfleet.federation.methods.steps.task_model import trained_parameters
from replayfleet.models.build import initialise
from replayfleet.models.ddpm import build_denoiser, require_diffusers
from replayfleet.models.specs import TaskSpec

NUM_TIMESTEPS = 1000
BETAS = (1e-4, 0.02)
"""The first and the last of the linear noise schedule (Ho et al., section 4)."""

PredictNoise: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Noised images (B, C, H, W) and timesteps (B,) int64 -> the noise in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpmSchedule:
    """How long and how to train a denoiser.

    Attributes:
        num_epochs: passes over the class's samples.
        batch_size: samples per step.
        learning_rate: of Adam.
        should_stop: asked after every step; True ends training early, with what it reached.
        privacy: how single samples are hidden; None if they needn't be.
    """

    num_epochs: int
    batch_size: int
    learning_rate: float
    should_stop: ShouldStop = never
    privacy: DpSgd | None = None


def noise_loss(predict: PredictNoise, images: Tensor, timesteps: Tensor, noise: Tensor) -> Tensor:
    """Return ``mean ||noise - predict(sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, t)||^2`` (Ho et al., Eq. 14).

    The norm is a mean over pixels. ``abar_t`` is the product of ``1 - beta`` up to t (``signal_shares``).

    Args:
        predict: the denoiser.
        images: (B, C, H, W) x_0 in [-1, 1].
        timesteps: (B,) int64 from 0 to ``NUM_TIMESTEPS - 1``.
        noise: (B, C, H, W) from N(0, 1).
    """
    kept = signal_shares().to(images.device)[timesteps].view(-1, 1, 1, 1)
    noised = kept**0.5 * images + (1 - kept) ** 0.5 * noise  # Eq. 4
    return F.mse_loss(predict(noised, timesteps), noise)  # Eq. 14


def noise_loss_of_one(predict: Predict, image: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
    """Return ``noise_loss`` of one sample: images (C, H, W), a timestep () and its noise (C, H, W)."""
    return noise_loss(predict, image.unsqueeze(0), timestep.unsqueeze(0), noise.unsqueeze(0))


def signal_shares() -> Tensor:
    """Return ``abar_t`` of each timestep, (T,) on the CPU: computed each time, so no two devices share a tensor."""
    betas = torch.linspace(*BETAS, NUM_TIMESTEPS, dtype=torch.float32)
    return (1.0 - betas).cumprod(dim=0)


def new_denoiser(spec: TaskSpec, width: int, rng: torch.Generator) -> SubGenerator:
    """Return freshly initialised parameters; a diffusion model has no critic."""
    return SubGenerator(trained_parameters(initialise(build_denoiser(spec, width), rng)), {})


def train_denoiser(
    spec: TaskSpec, width: int, start: SubGenerator, images: Tensor, schedule: DdpmSchedule, rng: torch.Generator
) -> SubGenerator:
    """Return the sub-generator after training on the samples of one class (Algorithm 1); ``start`` is left untouched.

    Args:
        spec: image shape.
        width: of the denoiser.
        start: where training starts.
        images: (B, C, H, W) float32 in [-1, 1], all of one class.
        schedule: lengths and step size.
        rng: draws batches, timesteps and noise.

    Raises:
        ValueError: There are no images.
    """
    if len(images) == 0:
        raise ValueError("a sub-generator needs at least one image of its class")
    module = build_denoiser(spec, width, device="meta")
    own = {name: tensor.to(images.device, copy=True) for name, tensor in start.generator.items()}
    module.load_state_dict(own, assign=True)
    module.requires_grad_(True)
    module.train()
    adam = torch.optim.Adam(module.parameters(), lr=schedule.learning_rate)
    size, privacy, step = schedule.batch_size, schedule.privacy, 0
    if privacy is not None:
        rng = noise_generator(rng)
    for batch in batches(len(images), size, schedule.num_epochs, rng, private=privacy is not None):
        real = images[batch.to(images.device)]
        timesteps = torch.randint(NUM_TIMESTEPS, (len(real),), generator=rng).to(real.device)
        noise = torch.randn(real.shape, generator=rng).to(real.device)
        adam.zero_grad(set_to_none=True)
        if privacy is None:
            noise_loss(module, real, timesteps, noise).backward()
        else:
            with sdpa_kernel(SDPBackend.MATH):  # the others have no gradients by sample
                privacy.put_gradients(module, noise_loss_of_one, (real, timesteps, noise), size, rng)
        adam.step()
        step += 1
        if schedule.should_stop():
            break
    history = start.history if privacy is None else privacy.after(start.history, len(images), size, step)
    return SubGenerator(trained_parameters(module), {}, history)


def start_noise(latents: Tensor, image_shape: tuple[int, int, int]) -> Tensor:
    """Return the noise (B, C, H, W) that each row of ``latents`` (B, Z) stands for, on the CPU."""
    rows = latents.detach().cpu().contiguous().numpy()
    drawn = [torch.randn(image_shape, generator=digest_generator(row.tobytes())) for row in rows]
    return torch.stack(drawn) if drawn else torch.empty(0, *image_shape)


@torch.no_grad()
def denoised(predict: PredictNoise, noise: Tensor, num_steps: int) -> Tensor:
    """Return the images (B, C, H, W) in [-1, 1] at the end of DPM-Solver++'s way from ``noise``."""
    solver = _solver(num_steps)
    images = noise
    for timestep in solver.timesteps:
        predicted = predict(images, timestep.to(noise.device).expand(len(noise)))
        images = solver.step(predicted, timestep, images, return_dict=False)[0]
    return images.clamp(-1, 1)


def solver_schedule(num_steps: int) -> tuple[list[int], list[float]]:
    """Return where the solver calls the denoiser, for ``export.graphs.sampler_graph``, which writes its steps down.

    Args:
        num_steps: calls of the denoiser per sample.

    Returns:
        N timesteps, falling; N + 1 noise levels ``sigma_t / alpha_t`` at them and at the end, where it is 0.
    """
    solver = _solver(num_steps)
    return [int(step) for step in solver.timesteps], [float(level) for level in solver.sigmas]


def denoising_sampler(spec: TaskSpec, width: int, num_steps: int) -> Sampler:
    """Return a sampler that runs denoisers in PyTorch; threads can share it, but not one draw.

    Args:
        spec: image shape.
        width: of the denoiser.
        num_steps: calls of the denoiser per sample.
    """

    def bind(parameters: Parameters) -> Draw:
        module = build_denoiser(spec, width, device="meta").eval()
        module.load_state_dict(parameters, assign=True)
        device = next(iter(parameters.values())).device

        def predict(images: Tensor, timesteps: Tensor) -> Tensor:
            noise: Tensor = module(images, timesteps)
            return noise

        return lambda latents: denoised(predict, start_noise(latents, spec.image_shape).to(device), num_steps)

    return bind


def _solver(num_steps: int) -> Any:
    require_diffusers()
    from diffusers import DPMSolverMultistepScheduler

    solver = DPMSolverMultistepScheduler(
        num_train_timesteps=NUM_TIMESTEPS,
        beta_start=BETAS[0],
        beta_end=BETAS[1],
        beta_schedule="linear",
        algorithm_type="dpmsolver++",
        solver_order=2,
    )
    solver.set_timesteps(num_steps)
    return solver
