"""Pixels as cameras give them, and as models see them.

Axes: B images, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.streams.resizing import resized
from replayfleet.models.specs import AnyTaskSpec


def fitted(pixels: NDArray[np.uint8], task: AnyTaskSpec) -> NDArray[np.float32]:
    """Return RGB pixels (H, W, 3) as the task's input: (C, height, width) float32 in [-1, 1].

    The picture is stretched to the task's size, whatever its shape was; grey tasks see its luminance.
    """
    channels, height, width = task.image_shape
    grey = channels == 1
    if grey and _is_grey(pixels):
        pixels, grey = pixels[:, :, :1], False
    if grey or pixels.shape[:2] != (height, width):
        pixels = resized(pixels, height, width, grey=grey)
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    image: NDArray[np.float32] = np.ascontiguousarray(planes, dtype=np.float32) / np.float32(127.5) - np.float32(1.0)
    return image


def to_pixels(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return inputs (B, C, H, W) in [-1, 1] as RGB pixels (B, H, W, 3); a grey image gets three equal channels."""
    levels = np.clip(np.rint((images + np.float32(1.0)) * np.float32(127.5)), 0, 255).astype(np.uint8)
    return as_rgb(levels.transpose(0, 2, 3, 1))


def as_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pixels (B, H, W, C) with C of 1 or 3 as (B, H, W, 3)."""
    return np.repeat(pixels, 3, axis=3) if pixels.shape[3] == 1 else np.ascontiguousarray(pixels)


def _is_grey(pixels: NDArray[np.uint8]) -> bool:
    red, green, blue = (pixels[:, :, channel] for channel in range(3))
    return bool((red == green).all() and (green == blue).all())
