from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState
from replayfleet.federation.methods.steps.memory import kind_of, sampler_of
from tests.support.toy import TOY, toy_data


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"replayfleet\[ddpm\]"):
        PFedGRP(task=TOY, sub_generator="ddpm")


pytest.importorskip("diffusers")

from replayfleet.federation.methods.steps.sub_generators.ddpm import (  # noqa: E402
    NUM_TIMESTEPS,
    DdpmSchedule,
    denoised,
    denoising_sampler,
    new_denoiser,
    noise_loss,
    start_noise,
    train_denoiser,
)
from replayfleet.models.counting import count_parameters  # noqa: E402
from replayfleet.models.ddpm import build_denoiser  # noqa: E402
from replayfleet.models.specs import TaskSpec  # noqa: E402
from tests.support.rng import rng  # noqa: E402

WIDTH = 4
TINY = PFedGRP(
    task=TOY,
    sub_generator="ddpm",
    ddpm_width=WIDTH,
    ddpm_epochs=1,
    ddpm_batch_size=4,
    ddpm_sampling_steps=2,
    local_epochs=1,
    batch_size=16,
    gate_samples=4,
    max_tries_factor=2,
    replay_per_client=8,
    aggregation_epochs=1,
)


def alpha_bar() -> Tensor:
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, NUM_TIMESTEPS), dim=0)


def test_noising_on_one_device_leaves_nothing_behind_that_another_device_would_meet() -> None:
    def loss(device: str) -> Tensor:
        images = torch.linspace(-1, 1, 12, device=device).view(3, 1, 2, 2)
        timesteps = torch.tensor([0, 500, 999], device=device)
        return noise_loss(lambda noised, _: noised, images, timesteps, torch.ones_like(images))

    before = loss("cpu")
    assert loss("meta").device.type == "meta"
    assert torch.equal(loss("cpu"), before)


def test_the_denoiser_for_cifar_has_the_size_of_the_ddpm_papers() -> None:
    cifar = TaskSpec(3, 32, tuple("0123456789"))
    assert count_parameters(build_denoiser(cifar, 128, device="meta")) == 35_746_307


@pytest.mark.parametrize("size", [28, 32, 64])
def test_the_denoiser_keeps_the_shape_of_its_images(size: int) -> None:
    spec = TaskSpec(3, size, ("a", "b"))
    module = build_denoiser(spec, WIDTH, device="meta")
    images = torch.empty(2, *spec.image_shape, device="meta")
    assert module(images, torch.empty(2, dtype=torch.int64, device="meta")).shape == images.shape


def test_building_and_drawing_leave_global_randomness_alone() -> None:
    before = torch.get_rng_state()
    start = new_denoiser(TOY, WIDTH, rng())
    denoising_sampler(TOY, WIDTH, 2)(start.generator)(torch.randn(2, 100, generator=rng()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_is_the_squared_error_of_the_noise_at_the_noised_image() -> None:
    images, noise = torch.randn(3, 1, 28, 28, generator=rng(1)), torch.randn(3, 1, 28, 28, generator=rng(2))
    timesteps = torch.tensor([0, 400, NUM_TIMESTEPS - 1])
    keep = alpha_bar()[timesteps].view(3, 1, 1, 1)
    noised = keep.sqrt() * images + (1 - keep).sqrt() * noise
    loss = noise_loss(lambda x, _: 0.5 * x, images, timesteps, noise)
    assert torch.allclose(loss, ((noise - 0.5 * noised) ** 2).mean(), rtol=1e-5)
    assert noise_loss(lambda *_: noise, images, timesteps, noise) == 0


def test_the_solver_with_the_true_noise_of_one_image_arrives_at_it() -> None:
    """If every training image were x, the noise in y at time t would be (y - sqrt(abar) x) / sqrt(1 - abar)."""
    target = torch.rand(1, 28, 28, generator=rng(3)) * 1.6 - 0.8

    def predict(images: Tensor, timesteps: Tensor) -> Tensor:
        keep = alpha_bar()[timesteps].view(-1, 1, 1, 1)
        return (images - keep.sqrt() * target) / (1 - keep).sqrt()

    drawn = denoised(predict, torch.randn(2, 1, 28, 28, generator=rng(4)), 20)
    assert torch.allclose(drawn, target.expand(2, -1, -1, -1), atol=1e-3)


def test_each_latent_stands_for_noise_of_its_own_wherever_it_is_in_the_batch() -> None:
    latents = torch.randn(3, 100, generator=rng())
    noise = start_noise(latents, (1, 28, 28))
    assert torch.equal(noise[1:2], start_noise(latents[1:2], (1, 28, 28)))
    assert torch.equal(noise.flip(0), start_noise(latents.flip(0), (1, 28, 28)))
    assert not torch.equal(noise[0], noise[1])
    assert abs(float(noise.mean())) < 0.1
    assert abs(float(noise.std()) - 1) < 0.1
    assert start_noise(latents[:0], (1, 28, 28)).shape == (0, 1, 28, 28)


def test_draws_are_a_function_of_parameters_and_latents_in_the_range_of_images() -> None:
    generator = new_denoiser(TOY, WIDTH, rng()).generator
    latents = torch.randn(3, 100, generator=rng())
    draw = denoising_sampler(TOY, WIDTH, 2)(generator)
    first = draw(latents)
    assert first.shape == (3, 1, 28, 28)
    assert float(first.abs().max()) <= 1
    assert torch.equal(draw(latents), first)


@pytest.mark.learning
def test_training_predicts_the_noise_better_and_leaves_its_start_alone() -> None:
    start = new_denoiser(TOY, WIDTH, rng())
    before = {name: tensor.clone() for name, tensor in start.generator.items()}
    images = toy_data({0: 8}).images
    schedule = DdpmSchedule(num_epochs=15, batch_size=8, learning_rate=5e-3)
    trained = train_denoiser(TOY, WIDTH, start, images, schedule, rng(1))
    again = train_denoiser(TOY, WIDTH, start, images, schedule, rng(1))
    assert same_bits(start.generator, before)
    assert same_bits(trained.generator, again.generator)
    assert trained.critic == {}

    def loss(parameters: dict[str, Tensor]) -> float:
        module = build_denoiser(TOY, WIDTH)
        module.load_state_dict(parameters)
        noise = torch.randn(8, 1, 28, 28, generator=rng(7))
        with torch.no_grad():
            return float(noise_loss(module, images, torch.linspace(0, 999, 8).long(), noise))

    assert loss(dict(trained.generator)) < 0.8 * loss(dict(start.generator))
    with pytest.raises(ValueError, match="at least one image"):
        train_denoiser(TOY, WIDTH, start, images[:0], schedule, rng(1))


def test_pfedgrp_runs_with_diffusion_models_and_sends_them_as_sub_generators() -> None:
    sampler = sampler_of(TINY)
    initial = TINY.initial_download(seeded_generator(0, 0, "initial"))
    state, upload = TINY.local_round(
        ClientState(), toy_data({0: 6, 1: 6}), initial, seeded_generator(0, 0, "a"), sampler=sampler
    )
    assert sorted(state.pack().parameter_sets) == ["sub-generator/0", "sub-generator/1"]
    layout = TINY.upload_layout("sub-generator/1")
    assert {k: (t.shape, t.dtype) for k, t in layout.items()} == {
        k: (t.shape, t.dtype) for k, t in upload.sub_generators[1].items()
    }
    _, downloads = TINY.aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "aggregator"), sampler=sampler
    )
    later, again = TINY.local_round(
        state, toy_data({2: 6}, seed=1), downloads["a"], seeded_generator(0, 1, "a"), sampler=sampler
    )
    assert sorted(later.sub_generators) == [0, 1, 2]
    assert list(again.sub_generators) == [2]


def test_no_graph_draws_from_a_diffusion_model_and_there_is_none_for_all_classes() -> None:
    kind = kind_of(TINY)
    assert kind.graph_spec is None
    with pytest.raises(ValueError, match="only a WGAN-GP"):
        replace(TINY, generators="single")
    with pytest.raises(ValueError, match="ddpm_width is 48"):
        replace(TINY, ddpm_width=48)
    with pytest.raises(ValueError, match="sub_generator"):
        replace(TINY, sub_generator="vae")


def test_a_method_loads_what_its_clients_ask_for_at_the_same_time() -> None:
    code = (
        "import diffusers\n"
        "from replayfleet.federation.methods.pfedgrp import PFedGRP\n"
        "from tests.support.toy import TOY\n"
        "assert 'UNet2DModel' not in vars(diffusers)\n"
        "PFedGRP(task=TOY, sub_generator='ddpm')\n"
        "assert {'UNet2DModel', 'DDPMScheduler', 'DPMSolverMultistepScheduler'} <= vars(diffusers).keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[4])
