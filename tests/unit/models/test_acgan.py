from __future__ import annotations

import pytest
import torch

from replayfleet.models.acgan import AcganCritic, AcganGenerator, build_acgan, initialised_acgan
from replayfleet.models.counting import count_flops, count_parameters
from replayfleet.models.specs import TaskSpec

TEN = tuple("0123456789")


@pytest.mark.parametrize(
    ("image_channels", "image_size", "width", "parameters", "flops"),
    [
        (1, 28, 64, 3_951_692, 241_101_568),  # Table 6, MNIST series
        (1, 28, 128, 14_719_116, 957_470_208),  # Table 6's FLOPs for the CIFAR series; its parameters are 14,719.17 K
        (3, 32, 128, 15_557_006, 1_685_807_104),  # our own, for which the paper has no number
        (3, 64, 128, 21_283_214, 6_743_228_416),
    ],
)
def test_generator_and_critic_have_the_size_and_cost_that_the_page_states(
    image_channels: int, image_size: int, width: int, parameters: int, flops: int
):
    generator, critic = (
        module.to_empty(device="cpu") for module in build_acgan(TaskSpec(image_channels, image_size, TEN), width)
    )
    assert count_parameters(generator) + count_parameters(critic) == parameters
    cost = count_flops(generator, (110,)) + count_flops(critic, (image_channels, image_size, image_size))
    assert cost == flops


@pytest.mark.parametrize(("image_channels", "image_size"), [(1, 28), (3, 32), (3, 64)])
def test_images_have_the_specs_shape_and_range_and_the_critic_answers_per_image(image_channels: int, image_size: int):
    spec = TaskSpec(image_channels, image_size, ("a", "b", "c"))
    generator, critic = initialised_acgan(spec, 2, torch.Generator().manual_seed(0))
    images = generator(torch.randn(4, 103))
    real, classes = critic(images)
    assert images.shape == (4, *spec.image_shape)
    assert images.abs().max() <= 1
    assert real.shape == (4,)
    assert classes.shape == (4, 3)


def test_one_seed_gives_the_same_first_parameters_and_no_global_randomness_is_used():
    spec = TaskSpec(1, 28, ("a", "b"))
    before = torch.get_rng_state()
    drawn = [initialised_acgan(spec, 2, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(before, torch.get_rng_state())
    one, same, other = (gan[0].state_dict()["layers.0.weight"] for gan in drawn)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert drawn[0][1].real.bias.item() == 0.0
    large = AcganGenerator(1, 64, 28, 10)
    assert large.layers[0].weight.shape == (512 * 9, 110)


def test_dropout_follows_its_generator_and_is_off_at_28_pixels_and_in_eval_mode():
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    critic = initialised_acgan(TaskSpec(3, 32, ("a", "b")), 4, torch.Generator().manual_seed(1))[1].train()

    def answer(seed: int | None) -> torch.Tensor:
        return critic(images, None if seed is None else torch.Generator().manual_seed(seed))[1]

    assert torch.equal(answer(5), answer(5))
    assert not torch.equal(answer(5), answer(6))
    critic.eval()
    assert torch.equal(answer(5), answer(None))
    small = AcganCritic(1, 2, 28, 2).train()
    image = torch.zeros(2, 1, 28, 28)
    assert torch.equal(small(image, torch.Generator())[1], small(image)[1])
