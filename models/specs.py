"""What a fleet's models look like, as plain values: this module never imports torch.

Both ends derive every parameter shape from a ``TaskSpec``, so the spec travels once and shapes never do.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT_SIZE = 100
"""Z: entries of a sub-generator's latent vector."""

IMAGE_SIZES = (28, 32, 64)
"""Image sides, in pixels, that a WGAN-GP sub-generator exists for."""

STEMS = ("cifar", "imagenet")
"""First convolution of the task model: 3x3 stride 1, or 5x5 stride 2 padding 1."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The classification task that a fleet learns.

    Attributes:
        image_channels: C, 1 or 3.
        image_size: side of the square image in pixels, one of ``IMAGE_SIZES``.
        class_names: K names; a class id is an index into them.
        stem: one of ``STEMS``.
        generator_width: channels of the sub-generator's last hidden layer (16, 64, 128 in the paper).
    """

    image_channels: int
    image_size: int
    class_names: tuple[str, ...]
    stem: str = "cifar"
    generator_width: int = 16

    def __post_init__(self) -> None:
        if self.image_channels not in {1, 3}:
            raise ValueError(f"image_channels is {self.image_channels}, expected 1 or 3")
        if self.image_size not in IMAGE_SIZES:
            raise ValueError(f"image_size is {self.image_size}, expected one of {IMAGE_SIZES}")
        if self.stem not in STEMS:
            raise ValueError(f"stem is {self.stem!r}, expected one of {STEMS}")
        if not 2 <= len(self.class_names) <= 4096:
            raise ValueError(f"a task needs 2 to 4096 classes, got {len(self.class_names)}")
        if not 1 <= self.generator_width <= 512:
            raise ValueError(f"generator_width is {self.generator_width}, expected 1 to 512")

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image; values are float32 in [-1, 1]."""
        return (self.image_channels, self.image_size, self.image_size)
