"""The sub-generator of pFedGRP and its critic: a DCGAN-shaped WGAN-GP pair for 28, 32 and 64 pixels.

Gulrajani et al. 2017, "Improved Training of Wasserstein GANs", in the sizes of pFedGRP's Table 6: latent 1x1 -> 4x4 ->
8x8 -> 16x16 -> image, and back. The last (first) convolution makes the image size: kernel 4, stride 2, padding 3 for 28
pixels; kernel 4, stride 2, padding 1 for 32; kernel 6, stride 4, padding 1 for 64. No biases.

The critic normalises each image by itself (InstanceNorm): the gradient penalty is a norm per sample, and BatchNorm
would make a sample's score depend on its neighbours.

Axes: B batch, C image channels, Z latent.
"""

from __future__ import annotations

from torch import Tensor, nn

from replayfleet.models.specs import IMAGE_SIZES, LATENT_SIZE

_IMAGE_CONVOLUTION = {28: (4, 2, 3), 32: (4, 2, 1), 64: (6, 4, 1)}
"""Image size -> (kernel, stride, padding) between the image and the 16x16 maps."""


def _image_convolution(image_size: int) -> tuple[int, int, int]:
    if image_size not in _IMAGE_CONVOLUTION:
        raise ValueError(f"image_size is {image_size}, expected one of {IMAGE_SIZES}")
    return _IMAGE_CONVOLUTION[image_size]


class Generator(nn.Module):
    """Latents (B, Z) from N(0, 1) -> images (B, C, H, W) in [-1, 1].

    Args:
        image_channels: C.
        width: channels of the 16x16 maps; the 8x8 and 4x4 maps have twice and four times as many.
        image_size: H and W, one of ``IMAGE_SIZES``.

    Raises:
        ValueError: ``image_size`` is none of them.
    """

    def __init__(self, image_channels: int, width: int, image_size: int) -> None:
        super().__init__()
        kernel, stride, padding = _image_convolution(image_size)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(LATENT_SIZE, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, image_channels, kernel, stride, padding=padding, bias=False),
            nn.Tanh(),
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Return images: (B, Z) -> (B, C, H, W)."""
        images: Tensor = self.layers(latents.unsqueeze(2).unsqueeze(3))
        return images


class Critic(nn.Module):
    """Images (B, C, H, W) -> scores (B,), unbounded; higher means more like the real ones.

    Args and errors are those of ``Generator``.
    """

    def __init__(self, image_channels: int, width: int, image_size: int) -> None:
        super().__init__()
        kernel, stride, padding = _image_convolution(image_size)
        self.layers = nn.Sequential(
            nn.Conv2d(image_channels, width, kernel, stride, padding=padding, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, padding=1, bias=False),
            nn.InstanceNorm2d(2 * width, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, padding=1, bias=False),
            nn.InstanceNorm2d(4 * width, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4, bias=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return scores: (B, C, H, W) -> (B,)."""
        scores: Tensor = self.layers(images)
        return scores.flatten()
