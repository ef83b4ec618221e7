"""What trains, trains where its images are; nothing here computes (``support.one_device``)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.one_device import OneDevice, on_meta

from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob, train_task_models
from replayfleet.federation.methods.steps.sub_generators.ddpm import DdpmSchedule, new_denoiser, train_denoiser
from replayfleet.federation.methods.steps.sub_generators.grouped_gan import SubGeneratorJob, train_sub_generators
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.federation.methods.steps.task_model import Alignment, Optimisation, train_task_model
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

SPEC = TaskSpec(1, 28, ("a", "b", "c"), "cifar", 4)
GAN = GanSchedule(num_epochs=1, batch_size=4, learning_rate=1e-4, betas=(0.5, 0.9), critic_steps_per_generator_step=1)
SGD = Optimisation(num_epochs=1, batch_size=4, learning_rate=0.1, momentum=0.9, weight_decay=0.1)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images() -> torch.Tensor:
    return torch.empty(8, 1, 28, 28, device="meta")


@pytest.mark.parametrize("has_critic", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_sub_generators_train_where_their_images_are(has_critic: bool, together: bool) -> None:
    fresh = new_sub_generator(SPEC, rng())
    start = SubGenerator(on_meta(fresh.generator), on_meta(fresh.critic) if has_critic else {})
    with OneDevice():
        if together:
            trained = train_sub_generators(SPEC, [SubGeneratorJob(start, images(), rng()) for _ in range(2)], GAN)
        else:
            trained = [train_sub_generator(SPEC, start, images(), GAN, rng())]
    for result in trained:
        assert {tensor.device.type for tensor in (*result.generator.values(), *result.critic.values())} == {"meta"}


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs replayfleet[ddpm]")
def test_diffusion_models_train_where_their_images_are() -> None:
    start = SubGenerator(on_meta(new_denoiser(SPEC, 4, rng()).generator), {})
    with OneDevice():
        schedule = DdpmSchedule(num_epochs=1, batch_size=4, learning_rate=0.1)
        trained = train_denoiser(SPEC, 4, start, images(), schedule, rng())
    assert {tensor.device.type for tensor in trained.generator.values()} == {"meta"}


@pytest.mark.parametrize("together", [True, False])
def test_task_models_train_where_their_images_are(together: bool) -> None:
    start = on_meta(initialise(build_task_model(SPEC), rng()).state_dict())
    labels = torch.zeros(8, dtype=torch.int64, device="meta")
    with OneDevice():
        if together:
            near = Alignment(labels == 0, torch.zeros(8, 3, device="meta"), 0.3)
            jobs = [TaskModelJob(start, images(), labels, rng(), near) for _ in range(2)]
            trained = train_task_models(SPEC, jobs, SGD)
        else:
            trained = [train_task_model(SPEC, start, images(), labels, SGD, rng())]
    for result in trained:
        assert {tensor.device.type for tensor in result.values()} == {"meta"}
