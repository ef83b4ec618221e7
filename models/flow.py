"""AF-FCL's normalising flow: an invertible map between features of a class and standard normal noise.

Wuerkaixi et al. 2024, "Accurate Forgetting for Heterogeneous Federated Continual Learning". Four affine couplings (Dinh
et al. 2017, "Density Estimation Using Real NVP"), each with a residual network that sees one half of the features and
the class and gives scale and shift of the other half. With 128 features, 10 classes and 512, 1024 or 2048 hidden units
the flow has the 4,663,808, 17,715,712 or 68,985,344 parameters of pFedGRP's Table 6.

Between couplings entries change places: reversed before the first two, shuffled like two halves of a deck of cards
before the last two. Permutations are fixed, so that every client's flow has the same ones and they need not travel.

Axes: B batch, F features, K classes, H hidden units.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.build import initialise

NUM_COUPLINGS = 4
NUM_BLOCKS = 2
"""Residual blocks of each coupling's network."""

SCALE_SHIFT = 2.0
"""A coupling's scale is ``sigmoid(s + 2) + 0.001``: near 1 at the start, bounded, and never 0."""

MIN_SCALE = 1e-3
"""What is added to the sigmoid."""


class GatedBlock(nn.Module):
    """``h + second(act(first(act(h)))) * sigmoid(gate(class))``: a residual block that the class gates."""

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.gate = nn.Linear(num_classes, hidden)

    def forward(self, h: Tensor, classes: Tensor) -> Tensor:
        """Map (B, H) to (B, H), given one-hot classes (B, K)."""
        inner = self.second(F.leaky_relu(self.first(F.leaky_relu(h))))
        gated: Tensor = h + inner * torch.sigmoid(self.gate(classes))
        return gated


class Coupling(nn.Module):
    """Scales and shifts the second half of the features by what a network makes of the first half and the class."""

    def __init__(self, num_features: int, num_classes: int, hidden: int) -> None:
        super().__init__()
        half = num_features // 2
        self.start = nn.Linear(half + num_classes, hidden)
        self.blocks = nn.ModuleList(GatedBlock(hidden, num_classes) for _ in range(NUM_BLOCKS))
        self.end = nn.Linear(hidden, 2 * (num_features - half))

    def forward(self, first: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), both (B, F/2), from the half that stays as it is."""
        h = self.start(torch.cat([first, classes], dim=1))
        for block in self.blocks:
            h = block(h, classes)
        raw, shift = self.end(h).chunk(2, dim=1)
        return torch.sigmoid(raw + SCALE_SHIFT) + MIN_SCALE, shift


class ConditionalFlow(nn.Module):
    """Features (B, F) and one-hot classes (B, K) <-> noise (B, F), which is N(0, 1) for features of that class.

    Args:
        num_features: F, even.
        num_classes: K.
        hidden: H, units of each coupling's network.

    Raises:
        ValueError: F is odd.
    """

    def __init__(self, num_features: int, num_classes: int, hidden: int) -> None:
        super().__init__()
        if num_features % 2 != 0:
            raise ValueError(f"num_features is {num_features}, expected an even number")
        self.num_features = num_features
        self.couplings = nn.ModuleList(Coupling(num_features, num_classes, hidden) for _ in range(NUM_COUPLINGS))

    def forward(self, features: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return (noise (B, F), log of the absolute determinant of its Jacobian with respect to the features (B,))."""
        x = features
        log_determinant = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for index, coupling in enumerate(self.couplings):
            first, second = _permuted(x, index).chunk(2, dim=1)
            scale, shift = coupling(first, classes)
            x = torch.cat([first, second * scale + shift], dim=1)
            log_determinant = log_determinant + scale.log().sum(dim=1)
        return x, log_determinant

    def inverse(self, noise: Tensor, classes: Tensor) -> Tensor:
        """Return the features (B, F) that ``forward`` maps to this noise."""
        x = noise
        for index, coupling in reversed(list(enumerate(self.couplings))):
            first, second = x.chunk(2, dim=1)
            scale, shift = coupling(first, classes)
            x = _restored(torch.cat([first, (second - shift) / scale], dim=1), index)
        return x

    def log_density(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return ``log p(features | class)`` (B,) by the change of variables."""
        noise, log_determinant = self(features, classes)
        density: Tensor = standard_normal_log_density(noise) + log_determinant
        return density


def standard_normal_log_density(noise: Tensor) -> Tensor:
    """Return the log-density of N(0, I) at each row: (B, F) -> (B,)."""
    return -0.5 * (noise.square().sum(dim=1) + noise.shape[1] * math.log(2 * math.pi))


@torch.no_grad()
def initialise_flow(flow: ConditionalFlow, rng: torch.Generator) -> ConditionalFlow:
    """Draw a flow's parameters anew: linear layers as everywhere, but each residual block starts near the identity."""
    initialise(flow, rng)
    for module in flow.modules():
        if isinstance(module, GatedBlock):
            module.second.weight.uniform_(-1e-3, 1e-3, generator=rng)
            module.second.bias.uniform_(-1e-3, 1e-3, generator=rng)
    return flow


def _permuted(x: Tensor, index: int) -> Tensor:
    permuted: Tensor = x.flip(1) if index < NUM_COUPLINGS // 2 else x.view(len(x), 2, -1).transpose(1, 2).flatten(1)
    return permuted


def _restored(x: Tensor, index: int) -> Tensor:
    restored: Tensor = x.flip(1) if index < NUM_COUPLINGS // 2 else x.view(len(x), -1, 2).transpose(1, 2).flatten(1)
    return restored
