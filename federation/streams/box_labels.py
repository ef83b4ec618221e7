"""From annotated boxes in pixels to the labels that a detector learns from.

Axes: N boxes of one picture, M padded boxes. Needs numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PADDING = -1.0
"""Class id of a row that stands for no box; the rest of the row is 0."""


def box_labels(
    corners: NDArray[np.float32], class_ids: NDArray[np.int64], picture_size: tuple[int, int], max_boxes: int
) -> NDArray[np.float32]:
    """Return one picture's label: (M, 5) float32, see ``federation.methods.kit.records.RoundData``.

    Boxes are cut off at the picture's edge; those outside of it are left out. Of more than M the largest stay.

    Args:
        corners: (N, 4) left, top, right, bottom in pixels of the picture.
        class_ids: (N,) in the order of the task's class names.
        picture_size: its width and height in pixels; the detector may see it at another size.
        max_boxes: M, ``DetectionSpec.max_boxes``.

    Raises:
        ValueError: Shapes don't fit, a corner is not finite, or a class id is negative.
    """
    if corners.ndim != 2 or corners.shape[1] != 4 or class_ids.shape != (len(corners),):
        raise ValueError(f"corners are {corners.shape} and class ids {class_ids.shape}, expected (N, 4) and (N,)")
    if not np.isfinite(corners).all() or (class_ids < 0).any():
        raise ValueError("corners must be finite and class ids 0 or more")
    width, height = picture_size
    inside = (corners / np.array([width, height, width, height], np.float64)).clip(0, 1)
    sides = inside[:, 2:] - inside[:, :2]
    kept = np.flatnonzero((sides > 0).all(axis=1))
    kept = kept[np.argsort(-sides[kept].prod(axis=1), kind="stable")[:max_boxes]]
    label = np.zeros((max_boxes, 5), np.float32)
    label[:, 0] = PADDING
    label[: len(kept), 0] = class_ids[kept]
    label[: len(kept), 1:3] = (inside[kept, :2] + inside[kept, 2:]) / 2
    label[: len(kept), 3:] = sides[kept]
    return label
