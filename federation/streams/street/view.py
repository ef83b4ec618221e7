"""Where a point of the street stands in the picture.

Coordinates in metres from the camera's place on the road: x to the right, y up, z ahead. Pixels from the picture's top
left corner. Axes: M points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

NEAR_M = 0.7
"""What is nearer than this isn't drawn."""

FAR_M = 130.0
"""What is farther than this isn't drawn."""


@dataclass(frozen=True, slots=True)
class View:
    """The camera at one moment.

    Attributes:
        focal: pixels per metre at one metre's distance.
        centre_x: column of what lies straight ahead.
        horizon_y: row of the horizon.
        x: where the camera stands in its lane.
        eye: its height above the road.
        bend: how far the road curves to the right, 1/m: a point at distance z moves by ``bend * z ** 2``.
    """

    focal: float
    centre_x: float
    horizon_y: float
    x: float
    eye: float
    bend: float

    def project(self, points: Points) -> Points:
        """Return (M, 2) columns and rows of (M, 3) points, all at ``NEAR_M`` or farther."""
        depth = points[:, 2]
        pixels = np.empty((len(points), 2))
        pixels[:, 0] = self.centre_x + self.focal * ((points[:, 0] - self.x) / depth + self.bend * depth)
        pixels[:, 1] = self.horizon_y + self.focal * (self.eye - points[:, 1]) / depth
        return pixels


def clip_near(polygon: Points) -> Points:
    """Return the part of a (M, 3) polygon at ``NEAR_M`` or farther (Sutherland and Hodgman 1974); may be empty."""
    kept: list[Points] = []
    for begin, end in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if begin[2] >= NEAR_M:
            kept.append(begin)
        if (begin[2] >= NEAR_M) != (end[2] >= NEAR_M):
            crossing = begin + (end - begin) * ((NEAR_M - begin[2]) / (end[2] - begin[2]))
            crossing[2] = NEAR_M
            kept.append(crossing)
    return np.array(kept).reshape(-1, 3)


def whole_pixels(points: Points) -> NDArray[np.int32]:
    """Return (M, 2) columns and rows as OpenCV fills them; it can't count beyond 32,767."""
    return np.clip(np.floor(points), -30_000, 30_000).astype(np.int32)
