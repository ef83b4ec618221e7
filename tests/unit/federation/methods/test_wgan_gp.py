from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    critic_loss,
    generator_loss,
    gradient_penalty,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.federation.methods.steps.task_model import trainable
from replayfleet.models.build import build_critic, build_generator
from tests.support.toy import TOY, toy_data

SHORT = GanSchedule(num_epochs=2, batch_size=8, learning_rate=1e-3, betas=(0.0, 0.9), critic_steps_per_generator_step=2)


class LinearCritic(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 2, 2), scale))

    def forward(self, images: Tensor) -> Tensor:
        return (images * self.weight).sum(dim=(1, 2, 3))


def test_the_penalty_of_a_linear_critic_is_its_norm_minus_one_squared() -> None:
    real, fake = torch.randn(5, 1, 2, 2), torch.randn(5, 1, 2, 2)
    for scale in (0.5, 1.0, 2.0):
        penalty = gradient_penalty(LinearCritic(scale), real, fake, torch.Generator().manual_seed(0))
        assert penalty.item() == pytest.approx((2 * scale - 1) ** 2, abs=1e-6)


def test_the_penalty_of_a_quadratic_critic_is_taken_between_real_and_fake() -> None:
    def critic(images: Tensor) -> Tensor:
        return 0.5 * images.flatten(1).square().sum(dim=1)

    real, fake = torch.randn(6, 1, 2, 2), torch.randn(6, 1, 2, 2)
    penalty = gradient_penalty(critic, real, fake, torch.Generator().manual_seed(7))  # type: ignore[arg-type]
    share = torch.rand(6, 1, 1, 1, generator=torch.Generator().manual_seed(7))
    norms = (share * real + (1 - share) * fake).flatten(1).norm(dim=1)  # the gradient of x^2/2 is x
    assert penalty.item() == pytest.approx(((norms - 1) ** 2).mean().item(), rel=1e-5)


def test_the_penaltys_derivative_matches_a_finite_difference() -> None:
    real, fake = torch.randn(4, 1, 2, 2), torch.randn(4, 1, 2, 2)

    def value(scale: float) -> float:
        return gradient_penalty(LinearCritic(scale), real, fake, torch.Generator().manual_seed(0)).item()

    critic = LinearCritic(1.3)
    gradient_penalty(critic, real, fake, torch.Generator().manual_seed(0)).backward()
    assert critic.weight.grad is not None
    numeric = (value(1.301) - value(1.299)) / 0.002
    assert critic.weight.grad.sum().item() == pytest.approx(numeric, rel=1e-2)


def test_the_critics_loss_is_fake_minus_real_plus_ten_penalties() -> None:
    critic = LinearCritic(0.5)  # its gradient has norm 1: no penalty
    real, fake = torch.ones(3, 1, 2, 2), torch.zeros(3, 1, 2, 2)
    assert critic_loss(critic, real, fake, torch.Generator()).item() == pytest.approx(-2.0)
    steep = LinearCritic(1.0)
    assert critic_loss(steep, real, fake, torch.Generator()).item() == pytest.approx(-4.0 + 10.0)


def test_the_generators_loss_is_minus_the_critics_mean() -> None:
    fake = torch.tensor([1.0, -3.0]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    assert generator_loss(LinearCritic(0.5), fake).item() == pytest.approx(-(2.0 - 6.0) / 2)


def test_the_generator_moves_against_the_gradient_of_its_loss_after_the_critics_step() -> None:
    """Adam's first step has the size of the step and the sign of the gradient; so small a step leaves the critic be."""
    images = toy_data({2: 8}).images
    start = new_sub_generator(TOY, torch.Generator().manual_seed(0))
    one = GanSchedule(
        num_epochs=1, batch_size=8, learning_rate=1e-7, betas=(0.0, 0.9), critic_steps_per_generator_step=1
    )
    trained = train_sub_generator(TOY, start, images, one, torch.Generator().manual_seed(3))

    twin = torch.Generator().manual_seed(3)
    torch.randperm(8, generator=twin)
    torch.randn(8, 100, generator=twin)  # the critic's fakes
    torch.rand(8, 1, 1, 1, generator=twin)
    generator, critic = build_generator(TOY), build_critic(TOY)
    trainable(generator, start.generator).train()
    trainable(critic, start.critic).train()
    generator_loss(critic, generator(torch.randn(8, 100, generator=twin))).backward()
    moved, against = [], []
    for name, parameter in generator.named_parameters():
        clear = parameter.grad.abs() > 1e-4
        moved.append((trained.generator[name] - start.generator[name])[clear])
        against.append(-parameter.grad[clear])
    signs = torch.cat(moved).sign()
    assert (signs != 0).float().mean() > 0.5, "the step is lost in rounding"
    agree = (signs == torch.cat(against).sign())[signs != 0].float().mean()
    assert agree > 0.99


@pytest.mark.learning
def test_training_moves_samples_towards_the_class() -> None:
    images = toy_data({2: 32}).images
    start = new_sub_generator(TOY, torch.Generator().manual_seed(0))
    schedule = GanSchedule(
        num_epochs=80, batch_size=16, learning_rate=5e-3, betas=(0.0, 0.9), critic_steps_per_generator_step=1
    )
    trained = train_sub_generator(TOY, start, images, schedule, torch.Generator().manual_seed(1))
    latents = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    before = (eager_sampler(TOY)(start.generator)(latents).mean(dim=0) - images.mean(dim=0)).norm()
    after = (eager_sampler(TOY)(trained.generator)(latents).mean(dim=0) - images.mean(dim=0)).norm()
    assert after < 0.6 * before


def test_one_seed_gives_the_same_bits_and_leaves_the_start_untouched() -> None:
    images = toy_data({1: 12}).images
    start = new_sub_generator(TOY, torch.Generator().manual_seed(0))
    copy = {name: tensor.clone() for name, tensor in start.generator.items()}
    first = train_sub_generator(TOY, start, images, SHORT, torch.Generator().manual_seed(5))
    second = train_sub_generator(TOY, start, images, SHORT, torch.Generator().manual_seed(5))
    assert all(torch.equal(first.generator[name], second.generator[name]) for name in first.generator)
    assert all(torch.equal(first.critic[name], second.critic[name]) for name in first.critic)
    assert all(torch.equal(start.generator[name], copy[name]) for name in copy)
    assert any(not torch.equal(first.generator[name], copy[name]) for name in copy)


def test_a_lost_critic_starts_anew() -> None:
    start = new_sub_generator(TOY, torch.Generator().manual_seed(0))
    recovered = SubGenerator(start.generator, {})
    trained = train_sub_generator(TOY, recovered, toy_data({1: 9}).images, SHORT, torch.Generator().manual_seed(0))
    assert trained.critic.keys() == start.critic.keys()


def test_a_class_without_images_is_refused() -> None:
    start = new_sub_generator(TOY, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="at least one image"):
        train_sub_generator(TOY, start, torch.empty(0, 1, 28, 28), SHORT, torch.Generator())
