from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.privacy import Trained
from replayfleet.federation.methods.kit.seeding import NUM_ENTROPY_BYTES, entropy_generator, noise_by
from replayfleet.federation.methods.steps import dp_sgd
from replayfleet.federation.methods.steps.dp_sgd import DpSgd, batches, sample_rate
from replayfleet.federation.methods.steps.sub_generators import ddpm
from replayfleet.federation.methods.steps.sub_generators.ddpm import DdpmSchedule, new_denoiser, train_denoiser
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    SubGenerator,
    critic_loss,
    critic_loss_of_one,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.models.build import build_critic, initialise
from tests.support.rng import rng
from tests.support.toy import TOY, toy_data

EXACT = DpSgd(noise_multiplier=0.0, max_grad_norm=1e9)
CLIPPED = DpSgd(noise_multiplier=0.0, max_grad_norm=0.5)
NOISY = DpSgd(noise_multiplier=1.0, max_grad_norm=1.0)


class Linear(nn.Module):
    """Whose loss has the sample itself as gradient."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, samples: Tensor) -> Tensor:
        return samples @ self.weight


def linear_loss(predict: Any, sample: Tensor) -> Tensor:
    loss: Tensor = predict(sample)
    return loss


def gradient(privacy: DpSgd, samples: Tensor, batch_size: int = 1, seed: int = 0) -> Tensor:
    module = Linear(samples.shape[1])
    privacy.put_gradients(module, linear_loss, (samples,), batch_size, rng(seed))
    assert module.weight.grad is not None
    return module.weight.grad


def schedule(privacy: DpSgd | None, **more: Any) -> GanSchedule:
    usual = {"num_epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "betas": (0.0, 0.9)}
    return GanSchedule(**(usual | {"critic_steps_per_generator_step": 2, "privacy": privacy} | more))


def test_without_noise_or_clipping_it_is_the_gradient_of_the_critics_loss() -> None:
    critic = initialise(build_critic(TOY), rng())
    real, fake = torch.randn(2, 5, 1, 28, 28, generator=rng(1))
    critic_loss(critic, real, fake, rng(2)).backward()
    expected = {name: parameter.grad for name, parameter in critic.named_parameters()}
    share = torch.rand(5, 1, 1, 1, generator=rng(2))
    EXACT.put_gradients(critic, critic_loss_of_one, (real, fake, share), 5, rng())
    for name, parameter in critic.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)


def test_a_denoisers_gradients_by_sample_are_those_of_its_loss() -> None:
    start = new_denoiser(TOY, 4, rng())
    images = torch.randn(3, 1, 28, 28, generator=rng(1)).clamp(-1, 1)
    steps, noise = torch.tensor([3, 500, 900]), torch.randn(3, 1, 28, 28, generator=rng(2))
    module = ddpm.build_denoiser(TOY, 4)
    module.load_state_dict(dict(start.generator))
    ddpm.noise_loss(module, images, steps, noise).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    with ddpm.sdpa_kernel(ddpm.SDPBackend.MATH):
        EXACT.put_gradients(module, ddpm.noise_loss_of_one, (images, steps, noise), 3, rng())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("more", [[100.0, 0.0, 0.0], [3e38, 3e38, 3e38], [math.inf, 0.0, 0.0], [math.nan, 1.0, 1.0]])
def test_one_sample_more_moves_the_sum_by_the_clipping_norm_at_most(more: list[float]) -> None:
    others = torch.randn(4, 3, generator=rng(3))
    without = gradient(CLIPPED, others)
    moved = gradient(CLIPPED, torch.cat([others, torch.tensor([more])])) - without
    assert moved.isfinite().all()
    assert moved.norm() <= 0.5 * (1 + 1e-5)


def test_a_small_gradient_stays_as_it_is_and_a_large_one_keeps_its_direction() -> None:
    assert gradient(CLIPPED, torch.tensor([[0.1, 0.2, 0.0]])).tolist() == pytest.approx([0.1, 0.2, 0.0])
    assert gradient(CLIPPED, torch.tensor([[30.0, 40.0, 0.0]])).tolist() == pytest.approx([0.3, 0.4, 0.0])


def test_noise_has_the_multiplier_times_the_norm_as_its_deviation_also_in_an_empty_step() -> None:
    private = DpSgd(noise_multiplier=3.0, max_grad_norm=2.0)
    drawn = gradient(private, torch.empty(0, 200_000), batch_size=4)
    assert drawn.std().item() == pytest.approx(3.0 * 2.0 / 4, rel=0.02)
    assert abs(drawn.mean().item()) < 0.02


def test_the_sum_is_divided_by_the_batch_size_that_is_expected_not_by_the_one_that_came() -> None:
    two = torch.tensor([[0.1, 0.0], [0.1, 0.0]])
    assert gradient(CLIPPED, two, batch_size=8).tolist() == pytest.approx([0.2 / 8, 0.0])


def test_gradients_that_dont_fit_at_once_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(7, 3, generator=rng(3))
    at_once = gradient(CLIPPED, samples)
    monkeypatch.setattr(dp_sgd, "_MOST_GRADIENTS", 6)
    torch.testing.assert_close(gradient(CLIPPED, samples), at_once)


def test_sample_rates_are_what_a_batch_is_of_the_samples_in_two_digits_and_at_most_all() -> None:
    assert [sample_rate(n, 16) for n in (1, 16, 100, 600, 601)] == [1.0, 1.0, 0.16, 0.027, 0.027]


def test_each_sample_takes_part_in_a_step_by_its_own_lot() -> None:
    steps = list(batches(100, 16, 200, rng(), private=True))
    sizes = torch.tensor([float(len(step)) for step in steps])
    assert len(steps) == 200 * 7
    # binomial: mean 16 and variance 13.44, over 1400 steps
    assert sizes.mean().item() == pytest.approx(16, abs=0.5)
    assert sizes.var().item() == pytest.approx(13.44, abs=2.5)
    assert all(len(step.unique()) == len(step) for step in steps)


def test_without_privacy_every_sample_takes_part_once_an_epoch() -> None:
    first, *_ = (torch.cat(list(batches(10, 4, 1, rng(seed), private=False))) for seed in (1, 2))
    assert first.sort().values.tolist() == list(range(10))
    assert first.tolist() == torch.randperm(10, generator=rng(1)).tolist()


def test_a_training_with_noise_counts_its_steps_and_leaves_its_start_as_it_was() -> None:
    start, images = new_sub_generator(TOY, rng()), toy_data({1: 10}).images
    before = {name: tensor.clone() for name, tensor in start.generator.items()}
    trained = train_sub_generator(TOY, start, images, schedule(NOISY), rng(1))
    again = train_sub_generator(TOY, start, images, schedule(NOISY), rng(1))
    assert trained.history == (Trained(1.0, 0.4, 6),)
    assert same_bits(start.generator, before)
    assert same_bits(trained.generator, again.generator)
    assert not same_bits(trained.generator, start.generator)
    assert train_sub_generator(TOY, trained, images, schedule(NOISY), rng(2)).history == (Trained(1.0, 0.4, 12),)


def test_a_training_that_is_stopped_is_charged_for_the_steps_that_it_made() -> None:
    start, images = new_sub_generator(TOY, rng()), toy_data({1: 10}).images
    stops = iter([False, False, True])
    stopped = train_sub_generator(TOY, start, images, schedule(NOISY, should_stop=lambda: next(stops)), rng(1))
    assert stopped.history == (Trained(1.0, 0.4, 3),)


def test_a_denoiser_is_charged_too() -> None:
    start, images = new_denoiser(TOY, 4, rng()), toy_data({1: 5}).images
    how = DdpmSchedule(num_epochs=2, batch_size=4, learning_rate=1e-3, privacy=NOISY)
    trained = train_denoiser(TOY, 4, start, images, how, rng(1))
    assert trained.history == (Trained(1.0, 0.8, 4),)
    assert all(tensor.isfinite().all() for tensor in trained.generator.values())


def test_without_privacy_nothing_is_charged() -> None:
    start, images = new_sub_generator(TOY, rng()), toy_data({1: 10}).images
    assert train_sub_generator(TOY, start, images, schedule(None), rng(1)).history == ()


def test_on_a_device_the_noise_isnt_what_the_rounds_seed_gives() -> None:
    start, images = new_sub_generator(TOY, rng()), toy_data({1: 10}).images

    def trained(entropy: bytes) -> SubGenerator:
        with noise_by(lambda: entropy_generator(entropy)):
            return train_sub_generator(TOY, start, images, schedule(NOISY), rng(1))

    known = train_sub_generator(TOY, start, images, schedule(NOISY), rng(1))
    first, second = (trained(bytes([byte]) * NUM_ENTROPY_BYTES) for byte in (1, 2))
    assert not same_bits(first.generator, known.generator)
    assert not same_bits(first.generator, second.generator)
    assert same_bits(train_sub_generator(TOY, start, images, schedule(NOISY), rng(1)).generator, known.generator)


def test_every_byte_of_entropy_counts() -> None:
    zeros = bytes(NUM_ENTROPY_BYTES)

    def drawn(entropy: bytes) -> list[float]:
        return torch.rand(1248, generator=entropy_generator(entropy), dtype=torch.float64).tolist()

    base = drawn(zeros)
    for place in (4, 5, 1001, NUM_ENTROPY_BYTES - 1):  # of the first word its highest bit alone is used
        assert drawn(zeros[:place] + b"\1" + zeros[place + 1 :]) != base
