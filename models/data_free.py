"""Generators that a server trains without data: MFCL's, TARGET's and LANDER's.

Sizes are those of pFedGRP's Table 6, which the parameter counts fix: a linear layer to maps of a quarter of the image's
side, then nearest-neighbour upsampling and 3x3 convolutions. Latent entries are N(0, 1).

Range of images: everything here trains on images in [-1, 1]. MFCL's generator ends in Tanh and BatchNorm without
parameters, so its images have zero mean and unit variance: it draws in the space of *normalised* images, and
``pixel_mean`` and ``pixel_std`` of the data (in the scale [-1, 1]) take it back. TARGET's and LANDER's end in a sigmoid
and draw in [0, 1]; ``x -> 2 x - 1``, or LANDER's learnt ``PixelScale``, takes them to the task model's scale.

Axes: B batch, C image channels, H height, W width, Z latent, D entries of a label's embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SLOPE = 0.2
"""Of every LeakyReLU here."""

MFCL_EPSILON = 0.8
"""Of MFCL's hidden BatchNorms: the reference passes its momentum in epsilon's place, and its results rest on that."""


class MfclGenerator(nn.Module):
    """Latents (B, Z) -> images (B, C, H, W) of mean ``pixel_mean`` and standard deviation ``pixel_std`` per channel.

    Babakniya et al. 2023, Table 6, with 1000 latent entries where the paper has 200 (the count in pFedGRP's Table 6 is
    that of the reference's default). 64 pixels get one more convolution and upsampling.

    Args:
        image_channels: C.
        image_size: H and W; a multiple of 4, and of 8 from 64 pixels on.
        latent_size: Z.
        width: channels of the last hidden maps; the earlier ones have twice as many.
        pixel_mean: of real images in the scale [-1, 1].
        pixel_std: of real images in the scale [-1, 1].
    """

    def __init__(
        self,
        image_channels: int,
        image_size: int,
        latent_size: int = 1000,
        width: int = 64,
        *,
        pixel_mean: float = 0.0,
        pixel_std: float = 1.0,
    ) -> None:
        super().__init__()
        wide = 2 * width
        hidden = [wide, width] if image_size < 64 else [wide, wide, width]
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        side = image_size // 2 ** len(hidden)
        layers: list[nn.Module] = [
            nn.Linear(latent_size, wide * side**2),
            nn.Unflatten(1, (wide, side, side)),
            nn.BatchNorm2d(wide),
        ]
        channels = wide
        for width_here in hidden:
            layers += [
                nn.Upsample(scale_factor=2),
                nn.Conv2d(channels, width_here, 3, padding=1),
                nn.BatchNorm2d(width_here, eps=MFCL_EPSILON),
                nn.LeakyReLU(SLOPE),
            ]
            channels = width_here
        layers += [
            nn.Conv2d(channels, image_channels, 3, padding=1),
            nn.Tanh(),
            nn.BatchNorm2d(image_channels, affine=False),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: Tensor) -> Tensor:
        """Return images, not clipped: (B, Z) -> (B, C, H, W)."""
        standardised: Tensor = self.layers(latents)
        return self.pixel_mean + self.pixel_std * standardised


class TargetGenerator(nn.Module):
    """Latents (B, Z) -> images (B, C, H, W) in [0, 1], as in TARGET (Zhang et al. 2023).

    Args:
        image_channels: C.
        image_size: H and W, a multiple of 4.
        latent_size: Z.
        width: channels of the last hidden maps; the earlier ones have twice as many.
    """

    def __init__(self, image_channels: int, image_size: int, latent_size: int = 256, width: int = 64) -> None:
        super().__init__()
        wide, side = 2 * width, image_size // 4
        self.layers = nn.Sequential(
            nn.Linear(latent_size, wide * side**2),
            nn.Unflatten(1, (wide, side, side)),
            nn.BatchNorm2d(wide),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.LeakyReLU(SLOPE),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(wide, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(SLOPE),
            nn.Conv2d(width, image_channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Return images: (B, Z) -> (B, C, H, W)."""
        images: Tensor = self.layers(latents)
        return images


class PixelScale(nn.Module):
    """``(x - mean) / std`` per channel with learnt mean and std: images in [0, 1] -> the task model's scale (LANDER).

    Args:
        image_channels: C.
    """

    INITIAL = 0.5
    """Both start here: with it the scale is exactly [-1, 1], as real images have it."""

    def __init__(self, image_channels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((image_channels,), self.INITIAL))
        self.std = nn.Parameter(torch.full((image_channels,), self.INITIAL))

    def forward(self, images: Tensor) -> Tensor:
        """Return scaled images: (B, C, H, W) -> (B, C, H, W). A std below 0.05 counts as 0.05."""
        mean, std = self.mean[:, None, None], self.std.clamp_min(0.05)[:, None, None]
        return (images - mean) / std


class LanderGenerator(nn.Module):
    """Embeddings of labels (B, D) -> images (B, C, H, W) in [0, 1], as in LANDER (Tran et al. 2024).

    The embeddings carry no noise; variety comes from *noise layers*, linear layers that are drawn anew for every
    round of synthesis. Each draws ``samples_per_layer`` images of a batch. Behind them stands TARGET's stack.

    Args:
        image_channels: C.
        image_size: H and W, a multiple of 4.
        embedding_size: D.
        num_noise_layers: a batch has at most ``num_noise_layers * samples_per_layer`` images.
        samples_per_layer: images per noise layer.
        latent_size: entries behind the noise layers.
        width: as in ``TargetGenerator``.
    """

    def __init__(
        self,
        image_channels: int,
        image_size: int,
        embedding_size: int = 512,
        *,
        num_noise_layers: int = 26,
        samples_per_layer: int = 10,
        latent_size: int = 256,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.samples_per_layer = samples_per_layer
        self.norm = nn.BatchNorm1d(embedding_size)
        self.noise = nn.ModuleList(nn.Linear(embedding_size, latent_size) for _ in range(num_noise_layers))
        self.decoder = TargetGenerator(image_channels, image_size, latent_size, width)
        self.scale = PixelScale(image_channels)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return images: (B, D) -> (B, C, H, W); ``scale`` is left to the caller, who may augment in between.

        Raises:
            ValueError: More embeddings than the noise layers take.
        """
        parts = self.norm(embeddings).split(self.samples_per_layer)
        if len(parts) > len(self.noise):
            most = len(self.noise) * self.samples_per_layer
            raise ValueError(f"{len(embeddings)} embeddings at once, expected at most {most}")
        latents = torch.cat([layer(part) for part, layer in zip(parts, self.noise, strict=False)])
        images: Tensor = self.decoder(latents)
        return images
