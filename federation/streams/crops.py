"""A square around an object, cut from a picture: the same on a device and in a simulation.

Axes: H height, W width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_SIDE_PIXELS = 8
"""Longer side of the smallest object that is worth a crop, in pixels of the picture: less shows nothing but a blur."""

MARGIN = 1.2
"""Side of the square in longer sides of the box: a little of what surrounds an object tells small ones apart."""


def worth_a_crop(corners: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return (N,) which boxes show enough: of what lies inside the picture, the longer side counts.

    Args:
        corners: (N, 4) left, top, right, bottom in pixels.
        size: (width, height) of the picture.
    """
    inside = np.minimum(corners[:, 2:], size) - np.maximum(corners[:, :2], 0)
    large: NDArray[np.bool_] = (inside.max(axis=1, initial=0) >= MIN_SIDE_PIXELS) & (inside > 0).all(axis=1)
    return large


def square_crop(pixels: NDArray[np.uint8], corners: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the square around a box, (S, S, 3); where it reaches past the picture, edge pixels are repeated.

    Args:
        pixels: (H, W, 3) uint8.
        corners: (4,) left, top, right, bottom in pixels; must overlap the picture.

    Raises:
        ValueError: The box doesn't overlap the picture.
    """
    height, width = pixels.shape[:2]
    left, top = np.maximum(corners[:2], 0.0)
    right, bottom = np.minimum(corners[2:], (width, height))
    if not (left < right and top < bottom):
        raise ValueError(f"box {corners.tolist()} doesn't overlap the picture of {width} x {height} pixels")
    side = max(2, round(MARGIN * float(max(right - left, bottom - top))))
    first_column = round(float(left + right) / 2 - side / 2)
    first_row = round(float(top + bottom) / 2 - side / 2)
    rows = np.clip(np.arange(first_row, first_row + side), 0, height - 1)
    columns = np.clip(np.arange(first_column, first_column + side), 0, width - 1)
    return pixels[rows[:, None], columns]
