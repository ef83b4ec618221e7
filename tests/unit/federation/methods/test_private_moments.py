from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from replayfleet.federation.methods.kit.privacy import Trained, epsilon_of
from replayfleet.federation.methods.kit.seeding import noise_by
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.dp_sgd import DpSgd
from replayfleet.federation.methods.steps.sub_generators.private_moments import low_frequencies, private_moments
from tests.support.rng import rng
from tests.support.toy import TOY

SHAPE = torch.Size((1, 28, 28))
NORM = math.sqrt(784)


def noisy(multiplier: float) -> DpSgd:
    return DpSgd(noise_multiplier=multiplier, max_grad_norm=1.0)


def smooth(count: int) -> Tensor:
    """Images (N, 1, 28, 28) of low frequencies that differ along three directions."""
    basis = low_frequencies(SHAPE)
    coefficients = torch.zeros(count, len(basis), dtype=torch.float64)
    coefficients[:, 0] = -8.0
    coefficients[:, 1:4] = torch.randn(count, 3, generator=rng(1), dtype=torch.float64) * torch.tensor([3.0, 2.0, 1.0])
    return (coefficients @ basis).reshape(count, *SHAPE).to(torch.float32)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_the_basis_is_orthonormal(shape: tuple[int, int, int]) -> None:
    rows = low_frequencies(torch.Size(shape))
    assert len(rows) == 64 * shape[0]
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows), dtype=torch.float64))


def test_with_hardly_any_noise_they_are_the_moments_of_the_images() -> None:
    images = smooth(2000)
    found = private_moments(images, 32, noisy(1e-6), rng())
    pixels = images.flatten(1)
    torch.testing.assert_close(found.mean, pixels.mean(dim=0), atol=1e-3, rtol=0)
    covariance = torch.cov(pixels.T, correction=0)
    close = (found.factor.T @ found.factor - covariance).norm() / covariance.norm()
    assert close < 0.02  # the largest deviations are clipped


def test_directions_that_noise_alone_would_give_are_dropped() -> None:
    images = smooth(400)[:1].expand(400, -1, -1, -1)  # no variance at all
    assert len(private_moments(images, 32, noisy(1.0), rng()).factor) <= 1
    assert len(private_moments(smooth(4000), 32, noisy(1.0), rng()).factor) >= 2


def test_one_image_changes_what_is_told_by_no_more_than_the_noise_is_made_for() -> None:
    """The mean times N is the first sum: one image more, the farthest that there can be, moves it by at most NORM."""
    images = smooth(50)
    extreme = torch.full((1, *SHAPE), 1e9)  # clipped to 1
    without = private_moments(images, 64, noisy(1e-9), rng())
    with_it = private_moments(torch.cat([images, extreme]), 64, noisy(1e-9), rng())
    assert 0 < (51 * with_it.mean - 50 * without.mean).norm().item() <= NORM + 1e-3
    # no deviation counts for more than its clipped square
    assert with_it.factor.square().sum().item() <= (NORM / 3) ** 2 + 1e-3
    far = torch.cat([extreme, -extreme])  # from their mean, each three times as far as a deviation counts
    assert private_moments(far, 64, noisy(1e-9), rng()).factor.square().sum().item() == pytest.approx(NORM**2 / 9)
    broken = private_moments(torch.cat([images, torch.full((1, *SHAPE), math.nan)]), 64, noisy(1e-9), rng())
    assert broken.mean.isfinite().all()


def test_both_sums_have_noise_of_the_size_of_what_one_image_can_change() -> None:
    """Without it an account would name an epsilon that nothing pays for."""
    basis, multiplier, rows, columns = low_frequencies(SHAPE), 0.1, *torch.triu_indices(3, 3)
    told = [private_moments(smooth(400), 8, noisy(multiplier), rng(seed)) for seed in range(50)]
    sums = torch.stack([400 * basis @ one.mean.to(torch.float64) for one in told])
    assert (sums - sums.mean(dim=0)).std().item() == pytest.approx(multiplier * NORM, rel=0.05)
    factors = [one.factor.to(torch.float64) @ basis.T[:, 1:4] for one in told]  # where the images differ
    products = torch.stack([400 * (factor.T @ factor)[rows, columns] for factor in factors])
    apart = products - products.mean(dim=0)
    for entries in (rows == columns, rows != columns):
        assert apart[:, entries].std().item() == pytest.approx(multiplier * NORM**2 / 9, rel=0.15)


def test_deviations_are_from_the_mean_that_is_told_for_the_true_one_is_nobodys_to_know() -> None:
    image = smooth(1)
    told = private_moments(image, 8, noisy(0.04), rng())
    apart = image.flatten() - told.mean  # the image has low frequencies alone
    assert torch.cosine_similarity(told.factor[0], apart, dim=0).abs() > 0.8


def test_a_gaussians_account_has_two_steps_for_each_training() -> None:
    pytest.importorskip("opacus")
    method = PFedGRP(task=TOY, sub_generator="pca-gaussian", dp_noise_multiplier=4.0)
    kind = method.sub_generator_kind()
    first = kind.train(kind.new(rng()), smooth(40), 5, rng())
    second = kind.train(first, smooth(60), 5, rng())
    assert (first.history, second.history) == ((Trained(4.0, 1.0, 2),), (Trained(4.0, 1.0, 4),))
    assert kind.planned(40, 5) == first.history[0]
    assert 0 < epsilon_of(first.history, 1e-5) < epsilon_of(second.history, 1e-5) < 5
    kind.check(second.generator)


def test_noise_is_the_devices_own() -> None:
    method = PFedGRP(task=TOY, sub_generator="pca-gaussian", dp_noise_multiplier=4.0)
    kind = method.sub_generator_kind()
    seeded = [kind.train(kind.new(rng()), smooth(40), 1, rng(5)).generator["means"] for _ in range(2)]
    assert torch.equal(*seeded)
    with noise_by(lambda: rng(99)):
        own = kind.train(kind.new(rng()), smooth(40), 1, rng(5)).generator["means"]
    assert not torch.equal(own, seeded[0])
