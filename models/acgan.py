"""The ACGAN of FedCIL: a generator of images by class, and a critic that also classifies.

Qi et al. 2023, "Better Generative Replay for Continual Federated Learning", in the sizes of pFedGRP's Table 6: with
width 64 at 28 pixels both together have the 3,951,692 parameters and 241.10 M FLOPs that the table states. The table's
FLOPs for 32 pixels (957.47 M) are those of this same one-channel network for 28 pixels at width 128, and its parameters
are within 0.0004 %, so the paper's own networks for 32 and 64 pixels are not known. Here those sizes take width 128 and
the natural continuation of the family: maps of a size/8 side at the narrow end, and a last kernel of 3 instead of 7.

At 32 and 64 pixels the critic has BatchNorm behind all convolutions but the first, and dropout, as FedCIL's for CIFAR.

Axes: B batch, C image channels, K classes, Z latent (K of the class and 100 of noise).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replayfleet.models.build import build_like
from replayfleet.models.specs import LATENT_SIZE, TaskSpec

INITIAL_STD = 0.02
"""Of all weights before training; biases start at 0 and normalisations at scale 1 and shift 0."""

DROPOUT = 0.5
"""Share of the critic's activations that a training step drops at 32 and 64 pixels."""


class AcganGenerator(nn.Module):
    """Latents (B, K + 100) -> images (B, C, H, W) in [-1, 1]; the first K entries are the class, one-hot.

    Args:
        image_channels: C.
        width: channels of the largest maps; the three smaller ones have twice, four and eight times as many.
        image_size: H and W.
        num_classes: K.
    """

    def __init__(self, image_channels: int, width: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        side = image_size // 8
        kernel = image_size - 8 * side + 3  # 28 pixels: 24 to 28 by a kernel of 7; else 3, which keeps the size
        channels = [8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = [
            nn.Linear(num_classes + LATENT_SIZE, channels[0] * side * side),
            nn.Unflatten(1, (channels[0], side, side)),
            nn.BatchNorm2d(channels[0]),
            nn.ReLU(),
        ]
        for narrow, wide in zip(channels[1:], channels[:-1], strict=True):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, padding=1), nn.BatchNorm2d(narrow), nn.ReLU()]
        layers += [nn.ConvTranspose2d(width, image_channels, kernel, padding=1), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor) -> Tensor:
        """Return images: (B, K + 100) -> (B, C, H, W)."""
        images: Tensor = self.layers(latents)
        return images


class AcganCritic(nn.Module):
    """Images (B, C, H, W) -> (logit of being real (B,), logits of the classes (B, K)).

    Args:
        image_channels: C.
        width: channels of the first maps; the next have twice and four times as many.
        image_size: H and W.
        num_classes: K.
    """

    def __init__(self, image_channels: int, width: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        large = image_size > 28
        self.slope = 0.2 if large else 0.01
        self.dropout = DROPOUT if large else 0.0
        channels = [image_channels, width, 2 * width, 4 * width]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 4, 2, padding=1) for before, after in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(after) if large and index > 0 else nn.Identity() for index, after in enumerate(channels[1:])
        )
        num_features = channels[-1] * (image_size // 8) ** 2
        self.real = nn.Linear(num_features, 1)
        self.classes = nn.Linear(num_features, num_classes)

    def forward(self, images: Tensor, dropout: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return (logits of being real (B,), logits of the classes (B, K)).

        Args:
            images: (B, C, H, W) in [-1, 1].
            dropout: draws what is dropped, on the CPU; None drops nothing, and neither does eval mode.
        """
        maps = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            maps = F.leaky_relu(norm(convolution(maps)), self.slope)
            if self.training and dropout is not None and self.dropout > 0:
                kept = torch.rand(maps.shape, generator=dropout).to(maps.device) >= self.dropout
                maps = maps * kept / (1 - self.dropout)
        features = maps.flatten(1)
        return self.real(features).flatten(), self.classes(features)


def build_acgan(spec: TaskSpec, width: int) -> tuple[AcganGenerator, AcganCritic]:
    """Return (generator, critic) on the meta device: names and shapes, for layouts and ``functional_call``."""
    given = (spec.image_channels, width, spec.image_size, spec.num_classes)
    return build_like(AcganGenerator, *given, device="meta"), build_like(AcganCritic, *given, device="meta")


@torch.no_grad()
def initialised_acgan(spec: TaskSpec, width: int, rng: torch.Generator) -> tuple[AcganGenerator, AcganCritic]:
    """Return (generator, critic) on the CPU with first parameters: weights from N(0, 0.02), biases 0."""
    generator, critic = build_acgan(spec, width)
    generator.to_empty(device="cpu")
    critic.to_empty(device="cpu")
    for layer in [*generator.modules(), *critic.modules()]:
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.weight.fill_(1.0)
            layer.bias.zero_()
        elif isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            layer.weight.normal_(0.0, INITIAL_STD, generator=rng)
            if layer.bias is not None:
                layer.bias.zero_()
    return generator, critic
