"""Resizing a picture to the size that models see: the same on a device and in a simulation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resized(
    pixels: NDArray[np.uint8], height: int, width: int | None = None, *, grey: bool = False
) -> NDArray[np.uint8]:
    """Return RGB pixels (H, W, 3) as (height, width, 3), whatever their shape was; with ``grey`` their luminance, 2-D.

    Pixels are averaged where the picture is larger, and interpolated linearly where it isn't.

    Args:
        pixels: uint8.
        height: in pixels.
        width: in pixels; None makes a square.
        grey: one channel instead of three.
    """
    import cv2

    if grey:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.uint8, copy=False)
    width = height if width is None else width
    if pixels.shape[:2] != (height, width):
        shrinks = pixels.shape[0] > height or pixels.shape[1] > width
        scaled = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        pixels = scaled.astype(np.uint8, copy=False)
    return pixels
