from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from support.toy import TOY, toy_data
from torch import Tensor

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.simulator.measures import fid
from replayfleet.federation.simulator.measures.fid import Gaussian, frechet_distance
from replayfleet.models.build import build_task_model, initialise


def samples(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_equal_sets_have_no_distance():
    features = samples(50, 8)
    assert frechet_distance(Gaussian.of(features), Gaussian.of(features.clone())) == pytest.approx(0, abs=1e-9)


def test_shifted_sets_are_as_far_apart_as_their_means():
    features = samples(50, 4)
    shift = torch.tensor([3.0, 0.0, -4.0, 0.0])
    assert frechet_distance(Gaussian.of(features), Gaussian.of(features + shift)) == pytest.approx(25.0)


def test_gaussians_with_diagonal_covariances_have_the_closed_form():
    first = Gaussian(torch.zeros(3).double(), torch.diag(torch.tensor([1.0, 4.0, 9.0]).double()))
    second = Gaussian(torch.ones(3).double(), torch.diag(torch.tensor([4.0, 4.0, 1.0]).double()))
    assert frechet_distance(first, second) == pytest.approx(3 + (1 - 2) ** 2 + 0 + (3 - 1) ** 2)


def test_covariances_that_commute_with_nothing_have_the_closed_form_in_two_dimensions():
    """tr (AB)^(1/2) of 2x2 matrices is sqrt(tr(AB) + 2 sqrt(det(AB)))."""
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    b = torch.tensor([[1.0, -0.7], [-0.7, 3.0]]).double()
    zero = torch.zeros(2).double()
    mixed = torch.sqrt((a @ b).trace() + 2 * torch.sqrt(torch.linalg.det(a @ b)))
    expected = a.trace() + b.trace() - 2 * mixed
    assert frechet_distance(Gaussian(zero, a), Gaussian(zero, b)) == pytest.approx(float(expected))


def test_the_distance_is_symmetric_and_not_negative_with_fewer_samples_than_features():
    first, second = Gaussian.of(samples(5, 20, 1)), Gaussian.of(samples(6, 20, 2))
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first))
    assert frechet_distance(first, first) >= 0
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)


def test_a_nearly_singular_covariance_gives_a_number():
    features = samples(100, 3)
    flat = features * torch.tensor([1.0, 1e-12, 0.0]).double()
    assert frechet_distance(Gaussian.of(flat), Gaussian.of(flat)) == pytest.approx(0, abs=1e-9)


def test_one_sample_and_features_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        Gaussian.of(samples(1, 3))
    with pytest.raises(ValueError, match="not finite"):
        Gaussian.of(torch.tensor([[0.0], [float("nan")]]))


def test_a_gaussian_has_the_unbiased_covariance():
    features = samples(30, 4)
    assert torch.allclose(Gaussian.of(features).covariance, torch.cov(features.T))


def test_task_features_tell_like_images_from_unlike_ones():
    parameters = initialise(build_task_model(TOY), seeded_generator(0, 0, "model")).state_dict()
    features = fid.task_features(TOY, parameters)
    real, alike, other = (toy_data(counts, seed).images for counts, seed in (({0: 40}, 0), ({0: 40}, 1), ({3: 40}, 2)))
    assert features(real).shape == (40, 32)
    assert fid.fid_task_features(features, real, alike) < fid.fid_task_features(features, real, other)
    assert fid.fid_task_features(features, real, real) == pytest.approx(0, abs=1e-9)


def test_inception_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("torchmetrics", "torchmetrics.image.fid"):  # another test may have imported either
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=r"install replayfleet\[fid\]"):
        fid.fid_inception(torch.zeros(2, 1, 28, 28), torch.zeros(2, 1, 28, 28))


class FakeInception:
    def __init__(self, feature: int, *, normalize: bool) -> None:
        assert (feature, normalize) == (2048, True)
        self.seen: dict[bool, list[Tensor]] = {True: [], False: []}

    def update(self, images: Tensor, *, real: bool) -> None:
        self.seen[real].append(images)

    def compute(self) -> Tensor:
        real, generated = (torch.cat(self.seen[key]) for key in (True, False))
        assert real.shape == (3, 3, 28, 28)
        return real.mean() - generated.mean()


def test_inception_gets_three_channels_in_its_own_range(monkeypatch: pytest.MonkeyPatch):
    package = ModuleType("torchmetrics.image.fid")
    package.FrechetInceptionDistance = FakeInception
    for name in ("torchmetrics", "torchmetrics.image"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchmetrics.image.fid", package)
    assert fid.fid_inception(torch.ones(3, 1, 28, 28), -torch.ones(2, 1, 28, 28)) == 1.0


def test_weights_that_cannot_be_had_are_one_line(monkeypatch: pytest.MonkeyPatch):
    package = ModuleType("torchmetrics.image.fid")
    package.FrechetInceptionDistance = Mock(side_effect=OSError("no network"))
    for name in ("torchmetrics", "torchmetrics.image"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchmetrics.image.fid", package)
    with pytest.raises(SettingsError, match="use --features task"):
        fid.fid_inception(torch.zeros(2, 1, 28, 28), torch.zeros(2, 1, 28, 28))
