"""Paints things far to near, and knows afterwards which of them can be seen. Needs OpenCV. Axes: H height, W width."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.streams.street.meshes import Form, Mesh, Part
from replayfleet.federation.streams.street.towns import BEAM_M, GLOWING, GLOWING_AT_NIGHT, LIT, PALETTE, Colour, Town
from replayfleet.federation.streams.street.traffic import Colours, Thing
from replayfleet.federation.streams.street.view import NEAR_M, Points, View, clip_near, whole_pixels

Pixels = NDArray[np.uint8]
Contour = NDArray[np.int32]
Extent = tuple[int, int, int, int]

MIN_WIDTH, MIN_HEIGHT = 4, 8
"""Smallest box, in pixels."""

MIN_VISIBLE = 0.35
"""Share of an object's pixels that must not lie behind others."""

MIN_INSIDE = 0.35
MIN_AREA = 0.015
"""Of what reaches past the edge: the share of its box that must lie inside, or of the picture that it must cover."""

MAX_BOXES = 200

_DETAIL_PIXELS = 4.0
_CIRCLE = np.array([(math.cos(a * math.pi / 6), math.sin(a * math.pi / 6)) for a in range(12)])


@dataclass(frozen=True, slots=True)
class _Marked:
    """An annotated thing that was painted: its mark in the mask, and how large it is before others cover it.

    Attributes:
        mark: its pixels in the mask.
        class_id: index into the class names.
        extent: of what lies in the picture.
        whole_area: of its box, what lies outside the picture included.
        num_pixels: that it covers in the picture.
    """

    mark: int
    class_id: int
    extent: Extent
    whole_area: int
    num_pixels: int


class Painter:
    """One picture in the making.

    Args:
        cv2: the module.
        pixels: (H, W, 3) uint8, painted over.
        view: the camera.
        town: light and weather.
    """

    def __init__(self, cv2: Any, pixels: Pixels, view: View, town: Town) -> None:
        self._cv2 = cv2
        self._pixels = pixels
        self._view = view
        self._town = town
        self._mask = np.zeros(pixels.shape[:2], np.uint8)
        self._marked: list[_Marked] = []
        self._everywhere = (0, 0, pixels.shape[1], pixels.shape[0])
        self._glowing = GLOWING_AT_NIGHT if town.night else GLOWING
        self._glows: list[tuple[int, int, int, int, Colour]] = []

    def paint(self, things: Iterable[Thing]) -> None:
        """Paint things in the order given, the farthest first."""
        ahead = [thing for thing in things if thing.z + thing.mesh.reach[1] > NEAR_M + 0.1]
        if not ahead:
            return
        places = np.array([(thing.x, thing.y, thing.z) for thing in ahead])
        sizes = [len(thing.mesh.vertices) for thing in ahead]
        vertices = np.concatenate([thing.mesh.vertices for thing in ahead]) + np.repeat(places, sizes, axis=0)
        uv = self._view.project(np.maximum(vertices, (-1e9, -1e9, NEAR_M)))
        floored = whole_pixels(uv)
        firsts = np.cumsum([0, *sizes]).tolist()
        seen = _faces(uv, ahead, firsts)
        colours = self._colours(ahead)
        room = [self._view.focal * thing.mesh.room / max(thing.z + thing.mesh.reach[0], NEAR_M) for thing in ahead]
        extents = _extents(floored, firsts, np.array(room))
        first_part = 0
        for thing, begin, end, extent in zip(ahead, firsts, firsts[1:], extents, strict=False):
            outlines = _Outlines(self._view, vertices[begin:end], uv[begin:end], floored[begin:end])
            parts = slice(first_part, first_part + len(thing.mesh.parts))
            first_part = parts.stop
            if thing.z + thing.mesh.reach[0] < NEAR_M:
                self._paint(thing, outlines, self._near_faces(thing), colours[parts], self._everywhere)
            elif _overlap(extent, self._everywhere):
                self._paint(thing, outlines, seen[parts], colours[parts], extent)

    def glows(self) -> list[tuple[int, int, int, Colour]]:
        """Return column, row, radius and colour of what shines in the dark and isn't hidden."""
        _, _, width, height = self._everywhere
        return [
            (column, row, radius, colour)
            for mark, column, row, radius, colour in self._glows
            if not (0 <= column < width and 0 <= row < height) or self._mask[row, column] == mark
        ]

    def boxes(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (N, 4) corners and (N,) class ids of annotated things that can be seen.

        A box bounds the whole thing within the picture, also what lies behind others.
        """
        _, _, width, height = self._everywhere
        corners, class_ids = [], []
        for marked in self._marked:
            left, top, right, bottom = marked.extent
            wide, high = right - left, bottom - top
            if wide < MIN_WIDTH or high < MIN_HEIGHT:
                continue
            if wide * high < min(MIN_INSIDE * marked.whole_area, MIN_AREA * width * height):
                continue
            visible = np.count_nonzero(self._mask[top:bottom, left:right] == marked.mark)
            if visible >= MIN_VISIBLE * marked.num_pixels:
                corners.append(marked.extent)
                class_ids.append(marked.class_id)
        return np.array(corners, np.float32).reshape(-1, 4), np.array(class_ids, np.int64)

    def _paint(
        self, thing: Thing, outlines: _Outlines, seen: Sequence[bool], colours: Sequence[Colour], extent: Extent
    ) -> None:
        """Paint a thing that lies within ``extent``."""
        nearest = thing.z + thing.mesh.reach[0]
        crosses = nearest < NEAR_M
        smallest = _DETAIL_PIXELS * max(nearest, NEAR_M) / self._view.focal
        drawn: list[Contour] = []
        solid: list[Contour] = []
        for part, colour, faces in zip(thing.mesh.parts, colours, seen, strict=True):
            if not faces or (0 < part.detail < smallest and not (self._town.night and part.role in self._glowing)):
                continue
            contours = outlines.near(part) if crosses else outlines.of(part)
            if contours:
                self._cv2.fillPoly(self._pixels, contours, colour)
                drawn += contours
                if part.detail == 0:
                    solid += contours
                if self._town.night and part.role in self._glowing and part.role != "lit":
                    self._glow(contours[0], colour, len(self._marked) + 1 if thing.class_id >= 0 else 0)
        if not drawn:
            return
        if thing.class_id < 0 or len(self._marked) == MAX_BOXES:
            if any(_overlap(extent, marked.extent) for marked in self._marked):
                for contour in solid:  # details lie on them
                    self._cv2.fillPoly(self._mask, [contour], 0)
        else:
            self._mark(thing.class_id, drawn)

    def _near_faces(self, thing: Thing) -> list[bool]:
        """Tell for every part of what reaches behind the camera whether its outside faces the camera."""
        a, b, c = (thing.mesh.vertices[thing.mesh.corners[:, place]] for place in range(3))
        to_eye = np.array((self._view.x - thing.x, self._view.eye - thing.y, -thing.z)) - a
        outward = (np.cross(b - a, c - a) * to_eye).sum(axis=1) > 0
        return (outward | thing.mesh.two_sided).tolist()  # type: ignore[no-any-return]

    def _colours(self, things: Sequence[Thing]) -> list[Colour]:
        """Return the colour of every part of all things, each at its distance."""
        distance = np.maximum([thing.z for thing in things], NEAR_M)
        haze, reach = self._town.haze
        clear = np.exp(-distance / reach)
        light = self._town.ambient + self._town.beam * np.exp(-distance / BEAM_M)
        sizes = [len(thing.mesh.parts) for thing in things]
        bases = [_bases(thing.mesh, thing.colours, self._town.night) for thing in things]
        own, shining = (np.concatenate([base[which] for base in bases]) for which in (0, 1))
        clear, light = (np.repeat(values, sizes)[:, None] for values in (clear, light))
        mixed = clear * (light * own + shining) + (1 - clear) * np.array(haze)
        return np.minimum(mixed, 255).astype(np.int64).tolist()  # type: ignore[no-any-return]

    def _mark(self, class_id: int, drawn: Sequence[Contour]) -> None:
        """Note what an annotated thing covers: its convex hull, or, of what reaches past the edge, its very pixels."""
        mark = len(self._marked) + 1
        points = np.concatenate(drawn)
        left, top, right, bottom = whole = _bounds(points)
        _, _, width, height = self._everywhere
        if left >= 0 and top >= 0 and right <= width and bottom <= height:
            self._cv2.fillConvexPoly(self._mask, self._cv2.convexHull(points), mark)
            covered = self._mask[top:bottom, left:right] == mark
        else:
            for contour in drawn:
                self._cv2.fillPoly(self._mask, [contour], mark)
            covered = self._mask == mark
            rows, columns = np.flatnonzero(covered.any(axis=1)), np.flatnonzero(covered.any(axis=0))
            if not len(rows):
                return
            left, top, right, bottom = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
        area = (whole[2] - whole[0]) * (whole[3] - whole[1])
        self._marked.append(_Marked(mark, class_id, (left, top, right, bottom), area, int(np.count_nonzero(covered))))

    def _glow(self, contour: Contour, colour: Colour, mark: int) -> None:
        left, top, right, bottom = _bounds(contour)
        radius = 2 + 2 * max(right - left, bottom - top)
        red, green, blue = colour
        self._glows.append((mark, (left + right) // 2, (top + bottom) // 2, min(radius, 48), (red, green, blue)))


class _Outlines:
    """A thing's parts as outlines in the picture.

    Args:
        view: the camera.
        vertices: (M, 3) from the camera.
        uv: (M, 2), the vertices in the picture; those behind the camera are not to be used.
        floored: (M, 2), the same in whole pixels.
    """

    def __init__(self, view: View, vertices: Points, uv: Points, floored: Contour) -> None:
        self._view = view
        self._vertices = vertices
        self._uv = uv
        self._floored = floored

    def of(self, part: Part) -> list[Contour]:
        """Return a part's outlines."""
        if part.form is Form.POLYGON:
            return [self._floored[contour] for contour in part.contours]
        place = part.contours[0].start
        if part.form is Form.DISC:
            radius = self._view.focal * part.size / self._vertices[place, 2]
            return [(self._uv[place] + radius * _CIRCLE).astype(np.int32)]
        (x0, y0), (x1, y1) = self._uv[place : place + 2].tolist()
        z0, z1 = self._vertices[place : place + 2, 2].tolist()
        half = self._view.focal * part.size / 2
        return [_bar(x0, y0, half / z0, x1, y1, half / z1)]

    def near(self, part: Part) -> list[Contour]:
        """Return a part's outlines as far as they lie ahead of the camera."""
        nearest = [float(self._vertices[contour, 2].min()) for contour in part.contours]
        if min(nearest) >= NEAR_M:
            return self.of(part)
        if part.form is not Form.POLYGON:
            return []
        found = []
        for contour, least in zip(part.contours, nearest, strict=True):
            if least >= NEAR_M:
                found.append(self._floored[contour])
            elif self._vertices[contour, 2].max() > NEAR_M:
                found.append(whole_pixels(self._view.project(clip_near(self._vertices[contour]))))
        return found


def _extents(floored: Contour, firsts: Sequence[int], room: Points) -> list[Extent]:
    """Return what all things lie within, given the (things,) pixels by which bars and discs stand out."""
    low, high = (function.reduceat(floored, firsts[:-1], axis=0) for function in (np.minimum, np.maximum))
    wide = np.ceil(room).astype(np.int64)[:, None] + 1
    return [tuple(extent) for extent in np.concatenate([low - wide, high + wide], axis=1).tolist()]


def _faces(uv: Points, things: Sequence[Thing], firsts: Sequence[int]) -> list[bool]:
    """Tell for every part of all things whether it is drawn: its outside faces the camera, or it has two sides."""
    corners = np.concatenate([thing.mesh.corners + first for thing, first in zip(things, firsts, strict=False)])
    two_sided = np.concatenate([thing.mesh.two_sided for thing in things])
    a, b, c = uv[corners.T]
    forth, on = (b - a).T, (c - b).T
    return ((forth[0] * on[1] > on[0] * forth[1]) | two_sided).tolist()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _bases(mesh: Mesh, colours: Colours, night: bool) -> tuple[Points, Points]:
    """Return (parts, 3) colours that light falls on, and (parts, 3) that shine by themselves."""
    palette = {**PALETTE, **dict(colours)}
    glowing = GLOWING_AT_NIGHT if night else GLOWING
    own, shining = np.zeros((len(mesh.parts), 3)), np.zeros((len(mesh.parts), 3))
    for place, part in enumerate(mesh.parts):
        if part.role in glowing:
            shining[place] = LIT.get(part.role, palette[part.role]) if night else palette[part.role]
        else:
            own[place] = part.shade * np.array(palette[part.role])
    return own, shining


def _bounds(points: Contour) -> Extent:
    """Return the edges of all pixels that an outline covers, its own included."""
    low, high = points.min(axis=0), points.max(axis=0)
    return int(low[0]), int(low[1]), int(high[0]) + 1, int(high[1]) + 1


def _overlap(one: Extent, other: Extent) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _bar(x0: float, y0: float, r0: float, x1: float, y1: float, r1: float) -> Contour:
    """Return a bar's outline with short ends, of half thickness ``r0`` and ``r1``."""
    dx, dy = x1 - x0, y1 - y0
    length = math.hypot(dx, dy)
    dx, dy = (dx / length, dy / length) if length > 1e-6 else (0.0, 1.0)
    corners = (
        (x0 - dy * r0 - dx * r0 * 0.5, y0 + dx * r0 - dy * r0 * 0.5),
        (x1 - dy * r1 + dx * r1 * 0.5, y1 + dx * r1 + dy * r1 * 0.5),
        (x1 + dy * r1 + dx * r1 * 0.5, y1 - dx * r1 + dy * r1 * 0.5),
        (x0 + dy * r0 - dx * r0 * 0.5, y0 - dx * r0 - dy * r0 * 0.5),
    )
    return np.array([(math.floor(x), math.floor(y)) for x, y in corners], np.int32)
