"""Solids of a simulated world as boxes in a camera's picture: near-plane clipping, the picture's edges, occlusion.

A solid is a cuboid, (4, 3) float64: its middle and three half edges. World axes are CARLA's (x forward, y right, z up,
metres); camera axes here are right, down, forward, so that the third number is the depth. Pixel (0, 0) covers
[0, 1) x [0, 1). Axes: M solids, P points, R rays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes

Array: TypeAlias = NDArray[np.float64]

NEAR_M = 0.1
"""Nothing nearer than this is drawn."""

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
_EDGES = [(a, b) for a in range(8) for b in range(a + 1, 8) if (a ^ b) in (1, 2, 4)]
"""Corners whose signs differ in one place."""

_MIN_HALF_EDGE_M = 0.01
_RAYS_PER_SIDE = 32
_DEPTH_SLACK_M = 0.25
_DEPTH_SLACK = 0.01
"""Share of the distance; meshes stick out of their boxes, and depth is quantised."""


@dataclass(frozen=True, slots=True)
class Lens:
    """A pinhole camera without distortion.

    Attributes:
        width: pixels.
        height: pixels.
        fov: horizontal angle of view, degrees.
    """

    width: int
    height: int
    fov: float

    @property
    def focal(self) -> float:
        # w / (2 tan(fov pi / 360)), in pixels, which are square
        return self.width / (2 * math.tan(self.fov * math.pi / 360))

    @property
    def centre(self) -> Array:
        return np.array([self.width / 2, self.height / 2])


@dataclass(frozen=True, slots=True)
class Limits:
    """Which objects get a label; see ``CarlaSettings``."""

    min_visible: float
    min_size_px: float
    max_distance_m: float


@dataclass(frozen=True, slots=True)
class Solids:
    """What could be seen at one moment.

    Attributes:
        cuboids: (M, 4, 3) in world axes.
        class_ids: (M,) int64.
    """

    cuboids: Array
    class_ids: NDArray[np.int64]


def cuboid(matrix: Sequence[Sequence[float]] | Array, extent: Sequence[float]) -> Array:
    """Return a (4, 3) solid from a box's own (4, 4) pose and its half sizes; a flat one gets a centimetre."""
    pose = np.asarray(matrix, dtype=np.float64)
    half = np.maximum(np.abs(np.asarray(extent, dtype=np.float64)), _MIN_HALF_EDGE_M)
    solid: Array = np.vstack([pose[:3, 3], pose[:3, :3].T * half[:, None]])
    return solid


def moved(cuboids: Array, matrix: Sequence[Sequence[float]] | Array) -> Array:
    """Return (..., 4, 3) solids after a rigid (4, 4) motion: middles are moved, half edges only turned."""
    pose = np.asarray(matrix, dtype=np.float64)
    turned: Array = cuboids @ pose[:3, :3].T
    turned[..., 0, :] += pose[:3, 3]
    return turned


def in_camera_axes(cuboids: Array, world_to_camera: Sequence[Sequence[float]] | Array) -> Array:
    """Return (M, 4, 3) solids as the camera sees them, (x, y, z) become (y, -z, x)."""
    forward_right_up = moved(cuboids, world_to_camera)
    return np.stack([forward_right_up[..., 1], -forward_right_up[..., 2], forward_right_up[..., 0]], axis=-1)


def corners(cuboids: Array) -> Array:
    """Return the (..., 8, 3) corners of (..., 4, 3) solids."""
    corner: Array = cuboids[..., :1, :] + _SIGNS @ cuboids[..., 1:, :]
    return corner


def clipped_at_near_plane(points: Array, near_m: float = NEAR_M) -> Array:
    """Return what remains of a cuboid's edges in front of the plane ``depth = near_m``.

    Args:
        points: (8, 3) corners in camera axes, as ``corners`` orders them.
        near_m: metres, above 0.

    Returns:
        (P, 3): the corners in front of the plane and the points where edges pass through it; all depths are at least
        ``near_m``, and P is 0 if the cuboid lies behind it.
    """
    depth = points[:, 2]
    found = [points[depth >= near_m]]
    for a, b in _EDGES:
        if (depth[a] < near_m) != (depth[b] < near_m):
            crossing = points[a] + (near_m - depth[a]) / (depth[b] - depth[a]) * (points[b] - points[a])
            crossing[2] = near_m
            found.append(crossing[None])
    return np.concatenate(found)


def project(points: Array, lens: Lens) -> Array:
    """Return (P, 2) pixels of (P, 3) points in camera axes, in front of the camera."""
    pixels: Array = lens.focal * points[:, :2] / points[:, 2:] + lens.centre
    return pixels


def box_in_picture(solid: Array, lens: Lens) -> Array | None:
    """Return (4,) left, top, right, bottom of the part of a solid that falls into the picture; None if none does.

    The shadow of a cuboid is convex; it is cut at the picture's edges before it is measured, so that a truck
    which reaches far past the left edge doesn't get the height that it has out there.

    Args:
        solid: (4, 3) in camera axes.
        lens: of the camera.
    """
    points = clipped_at_near_plane(corners(solid))
    if len(points) < 3:
        return None
    outline = _convex_hull(project(points, lens))
    for axis, bound, keep in ((0, 0.0, 1), (0, float(lens.width), -1), (1, 0.0, 1), (1, float(lens.height), -1)):
        outline = _cut(outline, axis, bound, keep)
    if not outline:
        return None
    cut = np.array(outline)
    return np.concatenate([cut.min(axis=0), cut.max(axis=0)])


def visible_share(solid: Array, box: Array, depth_m: NDArray[np.float32], lens: Lens) -> float:
    """Return how much of an object isn't hidden: seen / (seen + hidden) over the rays that meet its solid.

    A ray whose depth lies within the solid sees the object, one that ends before it is hidden from it, one that ends
    behind it passed through a hole or past a corner and says nothing. At most 32 x 32 rays are asked.

    Args:
        solid: (4, 3) in camera axes.
        box: (4,) from ``box_in_picture``.
        depth_m: (H, W) metres along the camera's axis.
        lens: of the camera.

    Returns:
        0 to 1; 0 also where no ray sees anything.
    """
    columns, rows = (_sampled(box[axis], box[axis + 2], size) for axis, size in ((0, lens.width), (1, lens.height)))
    u, v = (grid.ravel() for grid in np.meshgrid(columns, rows))
    directions = np.stack([u + 0.5, v + 0.5], axis=1) - lens.centre
    rays = np.concatenate([directions / lens.focal, np.ones((len(u), 1))], axis=1)
    enters, leaves = _passage(solid, rays)
    meets = leaves >= enters
    slack = _DEPTH_SLACK_M + _DEPTH_SLACK * enters
    met = depth_m[v, u].astype(np.float64)
    hidden = int((meets & (met < enters - slack)).sum())
    seen = int((meets & (met >= enters - slack) & (met <= leaves + slack)).sum())
    return seen / (seen + hidden) if seen else 0.0


def annotate(
    solids: Solids,
    world_to_camera: Sequence[Sequence[float]] | Array,
    lens: Lens,
    depth_m: NDArray[np.float32] | None,
    limits: Limits,
) -> Boxes:
    """Return the labels of a picture.

    Args:
        solids: of the moment at which the picture was taken.
        world_to_camera: (4, 4), the inverse of the camera's pose at that moment.
        lens: of the camera.
        depth_m: (H, W) float32 of the same moment; None takes hidden objects for visible.
        limits: what is too small, too far or too hidden.
    """
    seen = in_camera_axes(solids.cuboids, world_to_camera)
    kept: list[Array] = []
    class_ids: list[int] = []
    for index in np.flatnonzero(_may_be_seen(seen, lens, limits.max_distance_m)):
        box = box_in_picture(seen[index], lens)
        if box is None or min(box[2] - box[0], box[3] - box[1]) < limits.min_size_px:
            continue
        if depth_m is not None and visible_share(seen[index], box, depth_m, lens) < max(limits.min_visible, 1e-9):
            continue
        kept.append(box)
        class_ids.append(int(solids.class_ids[index]))
    if not kept:
        return Boxes.none()
    return Boxes(np.stack(kept).astype(np.float32), np.array(class_ids, dtype=np.int64))


def _may_be_seen(cuboids: Array, lens: Lens, max_distance_m: float) -> NDArray[np.bool_]:
    """(M,) without those that lie wholly beyond one side of the view, or too far."""
    x, y, depth = np.moveaxis(corners(cuboids), -1, 0)
    wide, high = depth * lens.width / 2, depth * lens.height / 2
    beyond = [
        depth < NEAR_M,
        lens.focal * x > wide,
        lens.focal * x < -wide,
        lens.focal * y > high,
        lens.focal * y < -high,
    ]
    outside = np.any([side.all(axis=1) for side in beyond], axis=0)
    kept: NDArray[np.bool_] = ~outside & (np.linalg.norm(cuboids[:, 0], axis=1) <= max_distance_m)
    return kept


def _convex_hull(points: Array) -> list[tuple[float, float]]:
    """Corners in order, by Andrew's monotone chain."""
    ordered = sorted({(float(x), float(y)) for x, y in points})
    if len(ordered) < 3:
        return ordered
    hull: list[tuple[float, float]] = []
    for run in (ordered, ordered[::-1]):
        chain: list[tuple[float, float]] = []
        for point in run:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        hull += chain[:-1]
    return hull


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _cut(outline: list[tuple[float, float]], axis: int, bound: float, keep: int) -> list[tuple[float, float]]:
    """What of a convex polygon lies at ``keep * coordinate >= keep * bound``."""
    left: list[tuple[float, float]] = []
    for index, end in enumerate(outline):
        start = outline[index - 1]
        before, after = keep * (start[axis] - bound), keep * (end[axis] - bound)
        if (before < 0) != (after < 0):
            share = before / (before - after)
            crossing = [s + share * (e - s) for s, e in zip(start, end, strict=True)]
            crossing[axis] = bound
            left.append((crossing[0], crossing[1]))
        if after >= 0:
            left.append(end)
    return left


def _sampled(low: float, high: float, size: int) -> NDArray[np.int64]:
    """Pixels from ``low`` to ``high``, evenly taken where there are many."""
    first = min(max(math.floor(low), 0), size - 1)
    last = min(max(math.ceil(high) - 1, first), size - 1)
    return np.unique(np.linspace(first, last, min(last - first + 1, _RAYS_PER_SIDE)).round().astype(np.int64))


def _passage(solid: Array, rays: Array) -> tuple[Array, Array]:
    """Depths (R,) at which rays from the camera enter and leave a solid; they miss it where they leave first."""
    to_own_axes = np.linalg.inv(solid[1:].T)  # a point within the solid becomes (-1 to 1)^3
    origin = to_own_axes @ -solid[0]
    slopes = rays @ to_own_axes.T
    slopes = np.where(np.abs(slopes) < 1e-12, 1e-12, slopes)
    planes = np.sort(np.stack([(-1 - origin) / slopes, (1 - origin) / slopes]), axis=0)
    return np.maximum(planes[0].max(axis=1), NEAR_M), planes[1].min(axis=1)
