"""Every parameter count and FLOPs figure of pFedGRP's Table 6 that concerns these models."""

from __future__ import annotations

import pytest
from torch import nn

from replayfleet.models import Critic, Generator, ResNet
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.specs import LATENT_SIZE


@pytest.mark.parametrize(
    ("image_channels", "image_size", "stem", "parameters", "flops"),
    [
        (1, 28, "cifar", 701_178, 29_053_184),
        (3, 32, "cifar", 701_466, 35_661_056),
        (3, 64, "imagenet", 702_234, 35_771_120),
    ],
)
def test_the_task_model_has_the_size_and_cost_of_the_paper(
    image_channels: int, image_size: int, stem: str, parameters: int, flops: int
):
    model = ResNet(image_channels, 10, stem)
    assert count_parameters(model) == parameters
    assert count_flops(model, (image_channels, image_size, image_size)) == flops


@pytest.mark.parametrize(
    ("image_channels", "image_size", "width", "parameters", "generator_flops", "pair_flops"),
    [
        (1, 28, 16, 186_272, 6_062_080, 7_189_504),
        (3, 32, 64, 1_732_224, 76_922_880, 94_539_776),
        (3, 64, 128, 6_101_248, 338_395_136, 409_149_440),
        (1, 28, 32, 536_384, 20_512_768, 24_864_768),
        (3, 32, 128, 6_085_888, 288_063_488, 356_851_712),
    ],
)
def test_the_wgan_pair_has_the_size_and_cost_of_the_paper(
    image_channels: int, image_size: int, width: int, parameters: int, generator_flops: int, pair_flops: int
):
    generator = Generator(image_channels, width, image_size)
    critic = Critic(image_channels, width, image_size)
    assert count_parameters(generator) + count_parameters(critic) == parameters
    cost = count_flops(generator, (LATENT_SIZE,))
    assert cost == generator_flops
    assert cost + count_flops(critic, (image_channels, image_size, image_size)) == pair_flops


def test_counting_leaves_mode_hooks_and_running_statistics_alone():
    model = ResNet(1, 10).train()
    count_flops(model, (1, 28, 28))
    assert model.training
    assert model.norm.num_batches_tracked == 0
    assert all(not layer._forward_hooks for layer in model.modules())


def test_a_grouped_convolution_counts_only_the_channels_it_reads():
    assert count_flops(nn.Conv2d(4, 8, 1, groups=2), (4, 5, 5)) == 8 * 25 * 2
