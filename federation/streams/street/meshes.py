"""What things are made of: polygons, bars and discs, each with a role that a palette colours.

Coordinates as in ``view``, from a point on the ground; things that drive head for +z. Axes: M vertices.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.streams.street.view import Points

Vertex = tuple[float, float, float]


class Form(enum.Enum):
    """How a part's vertices are to be read."""

    POLYGON = "polygon"
    """Contours, filled even-odd."""
    BAR = "bar"
    """Two ends of a round bar of diameter ``size``."""
    DISC = "disc"
    """Centre of a ball of radius ``size``."""


@dataclass(frozen=True, slots=True)
class Part:
    """One form of one colour.

    Attributes:
        form: how to read ``contours``.
        contours: which vertices, a slice for each contour.
        role: key of the palette.
        shade: brightness of the role's colour, 1 as it is.
        size: metres, for bars and discs.
        one_sided: drawn only where its outside faces the camera.
        detail: metres that must be some pixels large, or the part is left out; 0 is never left out.
    """

    form: Form
    contours: tuple[slice, ...]
    role: str
    shade: float = 1.0
    size: float = 0.0
    one_sided: bool = False
    detail: float = 0.0


@dataclass(frozen=True, eq=False)
class Mesh:
    """Parts in the order in which they are painted.

    Attributes:
        vertices: (M, 3).
        parts: the first is painted first.
        corners: (parts, 3) indices of a corner of each part, by which the side is told that faces the camera.
        two_sided: (parts,) bool, the parts that are drawn whichever side faces the camera.
        reach: smallest and largest z.
        room: metres by which bars and discs stand out from their vertices, at most.
    """

    vertices: Points
    parts: tuple[Part, ...]
    corners: NDArray[np.int64]
    two_sided: NDArray[np.bool_]
    reach: tuple[float, float]
    room: float


class MeshBuilder:
    """Collects parts; later ones are painted over earlier ones."""

    def __init__(self) -> None:
        self._vertices: list[Vertex] = []
        self._parts: list[Part] = []

    def polygon(
        self,
        points: Sequence[Vertex],
        role: str,
        shade: float = 1.0,
        *,
        outside: Vertex | None = None,
        detail: float = 0.0,
    ) -> None:
        """Add a flat polygon whose first corner is convex; with ``outside``, a direction, it has one side only."""
        if outside is not None:
            a, b, c = (np.array(point) for point in points[:3])
            if np.dot(np.cross(b - a, c - a), outside) < 0:
                points = points[::-1]
        self._parts.append(Part(Form.POLYGON, (self._add(points),), role, shade, 0.0, outside is not None, detail))

    def panes(self, panes: Iterable[Sequence[Vertex]], role: str, shade: float = 1.0) -> None:
        """Add polygons a metre large that never overlap, on a part already there; seen from both sides."""
        contours = tuple(self._add(points) for points in panes)
        if contours:
            self._parts.append(Part(Form.POLYGON, contours, role, shade, detail=1.0))

    def ring(self, centre: Vertex, outer: float, inner: float, role: str) -> None:
        """Add an upright wheel's tyre, seen from the side."""
        contours = tuple(self._add(circle(centre, radius)) for radius in (outer, inner))
        self._parts.append(Part(Form.POLYGON, contours, role))

    def bar(
        self, begin: Vertex, end: Vertex, diameter: float, role: str, shade: float = 1.0, *, detail: float = 0.0
    ) -> None:
        """Add a round bar."""
        self._parts.append(Part(Form.BAR, (self._add([begin, end]),), role, shade, diameter, detail=detail))

    def disc(self, centre: Vertex, radius: float, role: str, shade: float = 1.0, *, detail: float = 0.0) -> None:
        """Add a ball, or a disc that always faces the camera."""
        self._parts.append(Part(Form.DISC, (self._add([centre]),), role, shade, radius, detail=detail))

    def build(self) -> Mesh:
        """Return the mesh."""
        vertices = np.array(self._vertices)
        firsts = [
            (part.contours[0].start, min(part.contours[0].stop, part.contours[0].start + 3)) for part in self._parts
        ]
        corners = np.array([[*range(begin, end), begin, begin][:3] for begin, end in firsts], dtype=np.int64)
        return _mesh(vertices, tuple(self._parts), corners)

    def _add(self, points: Sequence[Vertex]) -> slice:
        first = len(self._vertices)
        self._vertices.extend(points)
        return slice(first, len(self._vertices))


def circle(centre: Vertex, radius: float, num_corners: int = 12) -> list[Vertex]:
    """Return an upright circle in the plane of y and z."""
    x, y, z = centre
    angles = (2 * math.pi * corner / num_corners for corner in range(num_corners))
    return [(x, y + radius * math.cos(angle), z + radius * math.sin(angle)) for angle in angles]


def turned(mesh: Mesh, quarters: int) -> Mesh:
    """Return the mesh turned by quarters to the right around the middle of its footprint."""
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    middle = (low + high) / 2 * (1, 0, 1)
    cos, sin = round(math.cos(quarters * math.pi / 2)), round(math.sin(quarters * math.pi / 2))
    x, y, z = (mesh.vertices - middle).T
    return _mesh(np.stack([cos * x + sin * z, y, cos * z - sin * x], axis=1) + middle, mesh.parts, mesh.corners)


def _mesh(vertices: Points, parts: tuple[Part, ...], corners: NDArray[np.int64]) -> Mesh:
    two_sided = np.array([not part.one_sided for part in parts])
    reach = (float(vertices[:, 2].min()), float(vertices[:, 2].max()))
    return Mesh(vertices, parts, corners, two_sided, reach, max(part.size for part in parts))
