"""Resizing a picture to the square that models see: the same on a device and in a simulation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resized(pixels: NDArray[np.uint8], side: int, *, grey: bool = False) -> NDArray[np.uint8]:
    """Return RGB pixels (H, W, 3) as (side, side, 3), whatever their shape was; with ``grey`` their luminance, 2-D.

    Pixels are averaged where the picture is larger than the square, and interpolated linearly where it isn't.
    """
    import cv2

    if grey:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.uint8, copy=False)
    if pixels.shape[:2] != (side, side):
        shrinks = pixels.shape[0] > side or pixels.shape[1] > side
        smaller = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        pixels = smaller.astype(np.uint8, copy=False)
    return pixels
