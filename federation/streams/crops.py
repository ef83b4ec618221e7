"""A square around an object, cut from a picture: the same on a device and in a simulation.

Axes: H height, W width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MARGIN = 1.2
"""Side of the square in longer sides of the box: a little of what surrounds an object tells small ones apart."""


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
