"""Frechet distance between real and replayed images: Table 10 of pFedGRP.

Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium": features of
both sets are taken for Gaussians, whose distance is ||mu_1 - mu_2||^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2)).

Difference from the paper: the features are the fleet's task model's own 128 (``fid_task_features``), which needs no
download. Such distances compare with each other, never with the paper's, which are of Inception's features;
``fid_inception`` has those where torchmetrics and its weights are installed.
Axes: B batch, C channels, H height, W width, F features.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.models.build import build_task_model
from replayfleet.models.specs import TaskSpec

_BATCH_SIZE = 512
_INCEPTION_BATCH_SIZE = 64
_INCEPTION_FEATURES = 2048

Features = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) -> features (B, F)."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """What a set of features is taken for.

    Attributes:
        mean: (F,) float64.
        covariance: (F, F) float64, unbiased.
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """Fit one to features (B, F).

        Raises:
            ValueError: Fewer than two samples, or a feature that is no number.
        """
        if len(features) < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {len(features)}")
        exact = features.to(torch.float64)
        if not bool(exact.isfinite().all()):
            raise ValueError("features are not finite")
        mean = exact.mean(dim=0)
        centred = exact - mean
        return cls(mean, centred.T @ centred / (len(exact) - 1))


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return ||mu_1 - mu_2||^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2)), never negative.

    (S_1 S_2)^(1/2) has the trace of (R S_2 R)^(1/2) with R = S_1^(1/2), which is symmetric: its eigenvalues are real,
    and those that rounding made negative are 0. That holds for singular covariances (fewer samples than features) too.
    """
    root = _psd_root(first.covariance)
    inner = root @ second.covariance @ root
    eigenvalues: Tensor = torch.linalg.eigvalsh((inner + inner.T) / 2)
    mixed = eigenvalues.clamp_min(0.0).sqrt().sum()
    squared = (first.mean - second.mean).square().sum()
    distance = squared + first.covariance.trace() + second.covariance.trace() - 2 * mixed
    return max(0.0, float(distance))


def fid_task_features(features: Features, real: Tensor, generated: Tensor) -> float:
    """Return the distance of two sets of images (B, C, H, W) in a task model's features."""
    return frechet_distance(Gaussian.of(_in_batches(features, real)), Gaussian.of(_in_batches(features, generated)))


def task_features(spec: TaskSpec, parameters: Parameters) -> Features:
    """Return what the head of a task model sees, in eval mode: images (B, C, H, W) -> (B, 128)."""
    model = build_task_model(spec)
    model.load_state_dict(dict(parameters))
    model.eval()

    @torch.no_grad()
    def features(images: Tensor) -> Tensor:
        seen: Tensor = model.features(images)
        return seen

    return features


def fid_inception(real: Tensor, generated: Tensor) -> float:
    """Return the usual FID of images (B, C, H, W) in [-1, 1]; one channel is repeated to three.

    Raises:
        SettingsError: torchmetrics or Inception's weights are absent.
    """
    require_inception()
    metric = importlib.import_module("torchmetrics.image.fid")
    try:
        fid = metric.FrechetInceptionDistance(feature=_INCEPTION_FEATURES, normalize=True)
    except (OSError, RuntimeError, ModuleNotFoundError) as error:
        raise SettingsError(f"Inception's weights can't be had ({error}); use --features task") from error
    for images, is_real in ((real, True), (generated, False)):
        for batch in images.split(_INCEPTION_BATCH_SIZE):
            fid.update(((batch + 1) / 2).clamp(0, 1).expand(-1, 3, -1, -1), real=is_real)
    return float(fid.compute())


def require_inception() -> None:
    """Raise SettingsError if torchmetrics can't be imported."""
    try:
        importlib.import_module("torchmetrics.image.fid")
    except ImportError as error:
        raise SettingsError(
            f"--features inception needs torchmetrics ({error}); install replayfleet[fid], or use --features task"
        ) from error


def _psd_root(matrix: Tensor) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    root: Tensor = (vectors * eigenvalues.clamp_min(0.0).sqrt()) @ vectors.T
    return root


def _in_batches(features: Features, images: Tensor) -> Tensor:
    return torch.cat([features(batch) for batch in images.split(_BATCH_SIZE)])
