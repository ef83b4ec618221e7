"""Generators of MFCL, TARGET and LANDER: the counts of pFedGRP's Table 6, ranges and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from replayfleet.models.build import build_module, initialise
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.data_free import LanderGenerator, MfclGenerator, PixelScale, TargetGenerator
from tests.support.rng import rng

SIZES = [(1, 28), (3, 32), (3, 64)]


@pytest.mark.parametrize(
    ("image_channels", "image_size", "parameters", "flops"),
    [(1, 28, 6_500_865, 93.76e6), (3, 32, 8_423_939, 123.64e6), (3, 64, 8_571_779, 507.77e6)],
)
def test_mfcls_generator_has_the_size_and_cost_of_the_paper(
    image_channels: int, image_size: int, parameters: int, flops: float
):
    model = build_module(lambda: MfclGenerator(image_channels, image_size))
    assert count_parameters(model) == parameters
    # The last normalisation has no parameters; the paper's tool counts it half as much as ours does.
    assert count_flops(model, (1000,)) == pytest.approx(flops, rel=1e-4)


@pytest.mark.parametrize(
    ("image_channels", "image_size", "parameters", "flops"),
    [(1, 28, 1_834_305, 89.21e6), (3, 32, 2_328_899, 117.70e6), (3, 64, 8_644_931, 470.81e6)],
)
def test_targets_generator_has_the_size_and_cost_of_the_paper(
    image_channels: int, image_size: int, parameters: int, flops: float
):
    model = build_module(lambda: TargetGenerator(image_channels, image_size))
    assert count_parameters(model) == parameters
    upsampled = 128 * ((image_size // 2) ** 2 + image_size**2)  # the paper's tool counts an operation per entry
    assert count_flops(model, (256,)) + upsampled == pytest.approx(flops, rel=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_landers_generator_is_targets_behind_26_noise_layers(size: tuple[int, int]):
    with torch.device("meta"):
        lander, target = LanderGenerator(*size), TargetGenerator(*size)
    assert count_parameters(lander) == count_parameters(target) + 2 * 512 + 26 * (512 * 256 + 256) + 2 * size[0]


def test_mfcls_images_have_the_mean_and_spread_that_they_are_told():
    model = initialise(build_module(lambda: MfclGenerator(3, 32, 20, 8, pixel_mean=-0.4, pixel_std=0.7)), rng())
    images = model.train()(torch.randn(16, 20, generator=rng(1)))
    assert images.shape == (16, 3, 32, 32)
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.full((3,), -0.4), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3)), torch.full((3,), 0.7), atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_targets_and_landers_images_are_between_0_and_1(size: tuple[int, int]):
    target = initialise(build_module(lambda: TargetGenerator(*size, latent_size=20, width=4)), rng())
    lander = initialise(build_module(lambda: LanderGenerator(*size, 16, latent_size=20, width=4)), rng())
    for images in (target(torch.randn(5, 20, generator=rng(1))), lander(torch.randn(5, 16, generator=rng(1)))):
        assert images.shape == (5, size[0], size[1], size[1])
        assert images.min() >= 0
        assert images.max() <= 1
        assert images.std() > 0


def test_landers_scale_begins_as_ours():
    scale = initialise(build_module(lambda: PixelScale(3)), rng())
    images = torch.rand(2, 3, 4, 4, generator=rng())
    torch.testing.assert_close(scale(images), 2 * images - 1)


def test_a_batch_larger_than_the_noise_layers_take_is_refused():
    model = build_module(lambda: LanderGenerator(1, 28, 16, num_noise_layers=2, samples_per_layer=3, width=4))
    assert len(model(torch.zeros(6, 16))) == 6
    with pytest.raises(ValueError, match="7 embeddings at once, expected at most 6"):
        model(torch.zeros(7, 16))


def test_images_of_one_label_differ_between_noise_layers():
    model = build_module(lambda: LanderGenerator(1, 28, 16, num_noise_layers=2, samples_per_layer=2, width=4))
    images = initialise(model, rng()).eval()(torch.ones(4, 16))
    torch.testing.assert_close(images[0], images[1])
    assert not torch.allclose(images[0], images[2])


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4, affine=False), nn.Linear(4, 2)])
def test_every_layer_of_theirs_can_be_initialised(layer: nn.Module):
    fresh = {name: value.clone() for name, value in initialise(layer, rng()).state_dict().items()}
    for value in layer.state_dict().values():
        value.fill_(7)
    initialise(layer, rng())
    assert all(torch.equal(value, fresh[name]) for name, value in layer.state_dict().items())
