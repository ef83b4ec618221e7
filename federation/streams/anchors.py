"""Anchors of a detector from the boxes that it will meet: k-means by overlap.

Redmon & Farhadi 2017, "YOLO9000: Better, Faster, Stronger", section 2, "Dimension Clusters": the distance of a box to
an anchor is ``1 - IoU`` of the two with one centre, so that large boxes don't outweigh small ones.
Differences from the paper: clusters start twice, at evenly spaced ranks of the boxes' areas and at boxes that overlap
least, instead of at random, and the better end is taken, so equal boxes give equal anchors; an anchor is the median of
its boxes, which a few giants don't move.

Axes: N boxes, A anchors. Needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_STEPS = 300
"""Clusters settle after ten or twenty; of those that go round in circles the last is taken."""


def fit_anchors(sizes: NDArray[np.floating], num_anchors: int = 5) -> tuple[tuple[float, float], ...]:
    """Return anchors for ``models.specs.DetectionSpec``, smallest area first.

    Args:
        sizes: (N, 2) widths and heights in shares of the picture's, above 0.
        num_anchors: A.

    Raises:
        ValueError: Sizes are not positive numbers, or fewer than A of them differ.
    """
    if sizes.ndim != 2 or sizes.shape[1] != 2 or not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise ValueError(f"sizes are {sizes.shape}, expected (N, 2) finite numbers above 0")
    exact = sizes.astype(np.float64)
    different = np.unique(exact, axis=0)
    if not 1 <= num_anchors <= len(different):
        raise ValueError(f"{num_anchors} anchors were asked for, expected 1 to {len(different)}, the number of sizes")
    ends = [_settled(exact, start(different, num_anchors)) for start in (_by_area, _far_apart)]
    anchors = max(ends, key=lambda end: float(shape_overlaps(exact, end).max(axis=1).mean()))
    order = np.lexsort((anchors[:, 0], anchors.prod(axis=1)))
    return tuple((round(float(width), 6), round(float(height), 6)) for width, height in anchors[order])


def mean_overlap(sizes: NDArray[np.floating], anchors: Sequence[tuple[float, float]]) -> float:
    """Return the mean over boxes of the overlap with the nearest anchor, 0 to 1: how well anchors fit (Figure 2)."""
    return float(shape_overlaps(sizes.astype(np.float64), np.array(anchors)).max(axis=1).mean())


def shape_overlaps(sizes: NDArray[np.float64], anchors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, A) intersection over union of sizes (N, 2) and anchors (A, 2), as if they had one centre."""
    intersections = np.minimum(sizes[:, None], anchors).prod(axis=2)
    unions = sizes.prod(axis=1)[:, None] + anchors.prod(axis=1) - intersections
    overlaps: NDArray[np.float64] = intersections / unions
    return overlaps


def _settled(sizes: NDArray[np.float64], anchors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (A, 2) where k-means from these anchors ends."""
    anchors = anchors.copy()
    previous = np.full(len(sizes), -1)
    for _ in range(MAX_STEPS):
        nearest = shape_overlaps(sizes, anchors).argmax(axis=1)
        if (nearest == previous).all():
            break
        previous = nearest
        for index in range(len(anchors)):
            own = sizes[nearest == index]
            if len(own):
                anchors[index] = np.median(own, axis=0)
    return anchors


def _by_area(different: NDArray[np.float64], num_anchors: int) -> NDArray[np.float64]:
    """Return A of the different sizes (N, 2), at the middles of A equal parts of their order by area."""
    order = np.lexsort((different[:, 0], different.prod(axis=1)))
    ranks = ((np.arange(num_anchors) + 0.5) * len(different) / num_anchors).astype(int)
    chosen: NDArray[np.float64] = different[order][ranks]
    return chosen


def _far_apart(different: NDArray[np.float64], num_anchors: int) -> NDArray[np.float64]:
    """Return A of the different sizes (N, 2): that of median area, then always that which the others overlap least."""
    chosen = _by_area(different, 1)
    while len(chosen) < num_anchors:
        farthest = shape_overlaps(different, chosen).max(axis=1).argmin()
        chosen = np.concatenate([chosen, different[farthest][None]])
    return chosen
