"""Moments of one class's images that hide whether any one of them was there.

The sum of the images and the sum of their deviations' outer products, each with Gaussian noise of the size of what one
image can change (Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", appendix A): two steps of
the Gaussian mechanism in which every image takes part. Deviations are clipped to a norm. Both sums are of an image's
low frequencies, a basis that no image chose: noise grows with the numbers that are told, and a class's images differ
along few of them. Directions whose variance noise alone would give are dropped, which costs no privacy.

Axes: N images, C channels, H height, W width, P = C H W pixels, L coefficients.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from replayfleet.federation.methods.steps.dp_sgd import DpSgd
from replayfleet.federation.methods.steps.sub_generators.gaussian import Moments

FREQUENCIES = 8
"""Lowest frequencies along each side that are kept, of each channel."""

_CLIPPED_TO = 1 / 3
"""Norm of a deviation, over the largest norm that an image in [-1, 1] can have."""

NUM_STEPS = 2
"""Of the Gaussian mechanism, for each training."""


def private_moments(images: Tensor, num_dims: int, privacy: DpSgd, rng: torch.Generator) -> Moments:
    """Return the noisy moments of images (N, C, H, W) in [-1, 1]; N, which isn't hidden, is at least 1.

    Args:
        images: all of one class.
        num_dims: most directions that are kept.
        privacy: how much noise.
        rng: draws it, on the CPU.
    """
    basis = low_frequencies(images.shape[1:]).to(images.device)
    count, num_pixels = len(images), basis.shape[1]
    largest = math.sqrt(num_pixels)
    pixels = images.detach().flatten(1).to(torch.float64).nan_to_num(0.0).clamp(-1, 1)
    coefficients = pixels @ basis.T  # (N, L), norms <= largest

    def noise(*shape: int) -> Tensor:
        return privacy.noise_multiplier * torch.randn(*shape, generator=rng, dtype=torch.float64).to(images.device)

    mean = (coefficients.sum(dim=0) + largest * noise(len(basis))) / count
    apart = coefficients - mean
    norm = _CLIPPED_TO * largest
    apart = apart * (norm / apart.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
    drawn = noise(len(basis), len(basis))
    upper = drawn.triu() + drawn.triu(1).T  # an image changes the numbers on and above the diagonal by norm^2 at most
    covariance = (apart.T @ apart + norm**2 * upper) / count
    values, directions = torch.linalg.eigh(covariance)
    # Wigner: the eigenvalues of the noise alone end at twice its deviation times sqrt(L)
    told = values > 2 * privacy.noise_multiplier * norm**2 * math.sqrt(len(basis)) / count
    kept = told.nonzero().flatten().flip(0)[:num_dims]
    factor = values[kept].clamp(min=0).sqrt()[:, None] * directions[:, kept].T
    return Moments(count, (mean @ basis).to(torch.float32), (factor @ basis).to(torch.float32))


@functools.lru_cache(maxsize=8)
def low_frequencies(image_shape: torch.Size) -> Tensor:
    """Return orthonormal rows (L, P) float64: products of the lowest cosines along both sides, channel by channel."""
    channels, height, width = image_shape
    plane = torch.kron(_cosines(height), _cosines(width))
    return torch.kron(torch.eye(channels, dtype=torch.float64), plane)


def _cosines(length: int) -> Tensor:
    """Return the lowest rows of the orthonormal discrete cosine transform (Ahmed et al. 1974), (F, length)."""
    orders = torch.arange(min(FREQUENCIES, length), dtype=torch.float64)[:, None]
    places = torch.arange(length, dtype=torch.float64)
    rows = torch.cos(math.pi * orders * (2 * places + 1) / (2 * length)) * math.sqrt(2 / length)
    rows[0] /= math.sqrt(2)
    return rows
