"""Shapes, ranges and independence of samples."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import replayfleet.models
from replayfleet.models.build import build_critic, build_generator, build_task_model, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

SIZES = [(1, 28, "cifar"), (3, 32, "cifar"), (3, 64, "imagenet")]


def spec(image_channels: int, image_size: int, stem: str) -> TaskSpec:
    return TaskSpec(image_channels, image_size, ("a", "b", "c"), stem, generator_width=4)


@pytest.mark.parametrize("size", SIZES)
def test_a_sub_generator_makes_images_that_critic_and_task_model_take(size: tuple[int, int, str]):
    task = spec(*size)
    rng = torch.Generator().manual_seed(1)
    images = initialise(build_generator(task), rng)(torch.randn(5, LATENT_SIZE, generator=rng))
    assert images.shape == (5, *task.image_shape)
    assert images.abs().max() <= 1
    assert images.std() > 0
    assert initialise(build_critic(task), rng)(images).shape == (5,)
    assert initialise(build_task_model(task), rng)(images).shape == (5, 3)


def test_the_imagenet_stem_maps_64_pixels_to_31():
    model = build_task_model(spec(3, 64, "imagenet"), device="meta")
    assert model.conv(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 16, 31, 31)


def test_the_critics_score_of_an_image_ignores_the_rest_of_the_batch():
    task = spec(1, 28, "cifar")
    rng = torch.Generator().manual_seed(2)
    critic = initialise(build_critic(task), rng).train()
    images = torch.rand(4, *task.image_shape, generator=rng) * 2 - 1
    torch.testing.assert_close(critic(images)[:1], critic(images[:1]))


@pytest.mark.parametrize("build", [replayfleet.models.Generator, replayfleet.models.Critic])
def test_an_image_size_without_architecture_is_refused_with_the_known_ones(
    build: type[replayfleet.models.Generator] | type[replayfleet.models.Critic],
):
    with pytest.raises(ValueError, match=r"image_size is 48, expected one of \(28, 32, 64\)"):
        build(1, 16, 48)


def test_an_unknown_stem_is_refused():
    with pytest.raises(ValueError, match="stem is 'vgg'"):
        replayfleet.models.ResNet(1, 10, "vgg")


def test_specs_are_importable_without_torch():
    code = "import sys, replayfleet.models.specs, models; replayfleet.models.TaskSpec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'VGG'"):
        _ = replayfleet.models.VGG
