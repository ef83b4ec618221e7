"""A sub-generator without a network: a class's images as a mixture of Gaussians, each in few dimensions.

Component m draws ``mean_m + basis_m^T z`` for z from N(0, 1), clipped to [-1, 1]: probabilistic principal component
analysis without its isotropic noise (Tipping and Bishop 1999, "Mixtures of Probabilistic Principal Component
Analysers"). With one component it is the class's mean and its directions of largest variance.

Its parameters are moments, so two of them can be merged (``federation.methods.steps.sub_generators.gaussian``).
float16 rounds a pixel by at most 0.0005, an eighth of what 8 bits do.

Axes: B batch, C channels, M components, D dimensions, P = C * H * W, Z latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.specs import MixtureSpec

_CURVE = (1.5976, 0.07056)
"""sigmoid(a x + b x^3) is the normal distribution function to 0.00015 (Page 1977), in operators that boards have."""

_STEEP = 1e8
"""Times the least difference of two float32 shares, more than 1: a step."""


class GaussianMixture(nn.Module):
    """Latents (B, Z) from N(0, 1) -> images (B, C, H, W) in [-1, 1].

    The first D entries of a latent say where in a component a sample lies, the next one which component it is of.
    """

    num_samples: Tensor
    means: Tensor
    bases: Tensor

    def __init__(self, spec: MixtureSpec) -> None:
        super().__init__()
        self.spec = spec
        components, dims, pixels = spec.num_components, spec.num_dims, spec.num_pixels
        self.register_buffer("num_samples", torch.zeros(components, dtype=torch.int64))
        self.register_buffer("means", torch.zeros(components, pixels, dtype=torch.float16))
        self.register_buffer("bases", torch.zeros(components, dims, pixels, dtype=torch.float16))

    def forward(self, latents: Tensor) -> Tensor:
        """Return images: (B, Z) -> (B, C, H, W)."""
        components, dims = self.spec.num_components, self.spec.num_dims
        places = latents[:, :dims]
        means, bases = self.means.to(torch.float32), self.bases.to(torch.float32)
        if components == 1:
            pixels = means + places @ bases.reshape(dims, self.spec.num_pixels)
        else:
            chosen = self._chosen(latents[:, dims : dims + 1])
            # (B, M, 1) * (B, 1, D) -> (B, M * D)
            spread = (chosen.unsqueeze(2) * places.unsqueeze(1)).reshape(-1, components * dims)
            pixels = chosen @ means + spread @ bases.reshape(components * dims, self.spec.num_pixels)
        return F.hardtanh(pixels).reshape(-1, *self.spec.task.image_shape)

    def _chosen(self, latent: Tensor) -> Tensor:
        """Return (B, M), 1 for the component that a sample is of and 0 for the others."""
        linear, cubic = _CURVE
        share = torch.sigmoid(latent * (linear + cubic * latent * latent))
        counts = self.num_samples.to(torch.float32)
        ends = [counts[:1]]
        for place in range(1, self.spec.num_components):
            ends.append(ends[-1] + counts[place : place + 1])
        passed = [F.hardtanh((share * ends[-1] - end) * _STEEP, 0.0, 1.0) for end in ends[:-1]]
        reached = torch.cat([share * 0.0 + 1.0, *passed], dim=1)
        left = torch.cat([*passed, share * 0.0], dim=1)
        return reached - left
