"""What stands and drives in the street, as flat polygons: outlines that span from side to side, faces on them, discs.

Metres from a point on the ground: x to the right, y up, z ahead; what drives heads for +z with its rear at z = 0.
Axes: F faces, V corners (a face with fewer repeats its last).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from replayfleet.federation.streams.street.looks import SIGNS, VEHICLES, Colour, Outline

Point = tuple[float, float, float]

NUM_CORNERS = 12
_DARK, _GLASS, _GREY, _WHITE, _SKIN = (28, 28, 31), (46, 60, 72), (112, 116, 118), (232, 232, 226), (206, 160, 130)
_LIGHT = np.array((-0.35, 0.8, -0.5))
_LAMPS: Mapping[str, Colour] = {"red": (255, 48, 40), "amber": (255, 186, 40), "green": (60, 255, 150)}


class Face(NamedTuple):
    """A flat polygon; ``inside`` is a point on its hidden side, None where both sides can be seen."""

    points: Sequence[Point]
    colour: Colour
    inside: Point | None = None
    shining: bool = False


class Shape:
    """Faces in the order in which they are painted.

    Attributes:
        corners: (F, V, 3).
        colours: (F, 3) RGB, 0 to 255, as light from above leaves them.
        shining: (F,) faces that need no light.
        flat: (F,) faces that can be seen from both sides.
    """

    def __init__(self, faces: Sequence[Face]) -> None:
        self.corners = np.array(
            [[*face.points, *[face.points[-1]] * (NUM_CORNERS - len(face.points))] for face in faces]
        )
        self.shining = np.array([face.shining for face in faces])
        self.flat = np.array([face.inside is None for face in faces])
        inside = np.array([face.inside or (0, 0, 0) for face in faces])
        outward = np.cross(self.corners[:, 1] - self.corners[:, 0], self.corners[:, 2] - self.corners[:, 0])
        inward = ((self.corners.mean(axis=1) - inside) * outward).sum(axis=1) < 0
        self.corners[inward] = self.corners[inward, ::-1]
        outward[inward] *= -1
        slope = outward @ _LIGHT / (np.linalg.norm(outward, axis=1) + 1e-9)
        shade = np.where(self.shining | self.flat, 1.0, 0.78 + 0.3 * np.maximum(0, slope))
        self.colours = shade[:, None] * np.array([face.colour for face in faces])


def _solid(outline: Outline, half: float, colour: Colour, x: float = 0.0) -> list[Face]:
    """Return what an outline (z, y) spans from side to side."""
    z, y = np.mean(outline, axis=0)
    inside = (x, float(y), float(z))
    rims = [[(x + side * half, y, z) for z, y in outline] for side in (-1, 1)]
    around = zip(*rims, *(rim[1:] + rim[:1] for rim in rims), strict=True)
    return [Face(points, colour, inside) for points in ([(a, b, d, c) for a, b, c, d in around] + rims)]


def _across(z: float, x: tuple[float, float], y: tuple[float, float], colour: Colour, *, shining: bool = False) -> Face:
    """Return an upright rectangle across the road."""
    return Face([(x[0], y[0], z), (x[1], y[0], z), (x[1], y[1], z), (x[0], y[1], z)], colour, None, shining)


def _disc(x: float, y: float, z: float, radius: float, colour: Colour, corners: int = 12, turn: float = 0) -> Face:
    """Return a regular polygon that faces the camera and stands on a corner."""
    angles = [2 * math.pi * (corner + turn) / corners for corner in range(corners)]
    return Face([(x + radius * math.sin(a), y - radius * math.cos(a), z) for a in angles], colour)


def _wheel(x: float, z: float, radius: float) -> list[Face]:
    """Return the outer side of a wheel at x, and its hub."""
    angles = [2 * math.pi * corner / 12 for corner in range(12)]
    return [
        Face([(x * far, radius - size * math.cos(a), z + size * math.sin(a)) for a in angles], colour, (0, radius, z))
        for size, far, colour in ((radius, 1.01, _DARK), (0.5 * radius, 1.02, (150, 152, 156)))
    ]


@functools.lru_cache(maxsize=1024)
def vehicle(kind: str, colour: Colour, coat: Colour, phase: int, away: bool, night: bool) -> Shape:
    """Return a vehicle.

    Args:
        kind: key of ``LENGTHS_M``.
        colour: of its body.
        coat: of its rider's.
        phase: of a cyclist's legs, 0 to 3.
        away: it drives ahead of the camera, not towards it.
        night: its lamps are lit.
    """
    (length, half, radius), parts = VEHICLES[kind].size, VEHICLES[kind].parts
    colours = {"body": colour, "glass": _GLASS, "load": _WHITE, "dark": _DARK, "frame": _GREY}
    axles = (1.1 * radius, length - 1.1 * radius) if half < 0.5 else (0.2 * length, 0.79 * length)
    floor = [(x * half, 0.01, z) for x, z in ((-0.95, 0.05), (0.95, 0.05), (0.95, length), (-0.95, length))]
    faces = [Face(floor, _DARK)] if half > 0.5 else []  # its shadow
    for side in (-1, 1):  # of the tyres what is to be seen from behind and from ahead
        faces += [_across(z, (side * half, side * max(0, half - 0.24)), (0, 2 * radius), _DARK) for z in axles]
    # Of two parts the one whose hidden end is farther is painted first: a load over its cab, or a cab over its load.
    for name, width, outline in sorted(parts, key=lambda part: -max(part[2])[0] if away else min(part[2])[0]):
        faces += _solid(outline, width, colours[name])
    for side in (-1, 1):
        faces += [face for z in axles for face in _wheel(side * half, z, radius)]
    if half < 0.5:
        faces += _rider(coat, colour, kind == "bike", phase)
    tail, head = ((255, 40, 30), (255, 250, 225)) if night else ((160, 24, 26), (236, 236, 226))
    nose = length + 0.02 if half > 0.5 else length - 0.3
    for side in (-1, 1):
        across = (side * half * 0.95, side * half * 0.66)
        for z, y, lamp in ((-0.02, (0.62, 0.86), tail), (nose, (0.55, 0.75), head)):
            faces.append(_across(z, across, y, lamp, shining=night)._replace(inside=(0, 0.9, length / 2)))
    shape = Shape(faces)
    if not away:
        shape.corners = shape.corners * (-1, 1, -1) + (0, 0, length)
    return shape


def _rider(coat: Colour, helmet: Colour, pedals: bool, phase: int) -> list[Face]:
    faces = []
    for side in (-1, 1):
        swing = 0.16 * math.cos(phase * math.pi / 2 + (math.pi if side > 0 else 0)) if pedals else 0.0
        leg = ((0.5, 0.95), (0.7, 1.02), (1.05, 0.7 + swing / 2), (0.98, 0.3 + swing), (0.8, 0.3 + swing), (0.85, 0.65))
        faces += _solid(leg, 0.08, (50, 56, 78), side * (0.12 if pedals else 0.24))
        faces += _solid(((0.8, 1.36), (0.95, 1.4), (1.28, 1.1), (1.2, 1.02)), 0.06, coat, side * 0.24)
    faces += _solid(((0.45, 0.95), (0.68, 1.45), (0.98, 1.42), (0.78, 0.95)), 0.19 if pedals else 0.24, coat)
    return [*faces, _disc(0, 1.6, 0.95, 0.13, _SKIN), _disc(0, 1.64, 0.93, 0.13 if pedals else 0.18, helmet)]


@functools.lru_cache(maxsize=256)
def house(width: float, floors: int, side: int, variant: int, wall: Colour, night: bool) -> Shape:
    """Return a house from z = 0 to z = ``width`` with its front at x = 0; ``side`` is 1 right of the road, -1 left."""
    top, deep = 3.0 * floors + 0.8, side * 9.0
    inside, bays = (deep / 2, top / 2, width / 2), int(width // 2)
    eaves, ridge = -0.4 * side, [(deep / 2, top + 2.4, width), (deep / 2, top + 2.4, 0)]
    faces = [
        Face([(0, 0, 0), (deep, 0, 0), (deep, top, 0), (deep / 2, top + 2.4, 0), (0, top, 0)], wall, inside),
        Face([(0, 0, 0), (0, top, 0), (0, top, width), (0, 0, width)], wall, inside),
        Face([(eaves, top, 0), (eaves, top, width), *ridge], (134, 72, 58), inside),
    ]
    for floor in range(floors):
        low = 3.0 * floor + 1.1
        for bay in range(bays + 3):  # on the front, and on the end that the camera sees
            lit = night and (7 * floor + 5 * bay + 3 * variant) % 4 == 0
            near = (bay + 0.5) * width / bays - 0.5 if bay < bays else side * (1.4 + 2.6 * (bay - bays))
            ways = (near, near + 1) if bay < bays else (near, near + side)
            places = [(ways[0], low), (ways[1], low), (ways[1], low + 1.4), (ways[0], low + 1.4)]
            points = [(0.0, y, at) if bay < bays else (at, y, 0.0) for at, y in places]
            faces.append(Face(points, (250, 208, 120) if lit else (74, 94, 114), inside, lit))
    return Shape(faces)


@functools.lru_cache(maxsize=64)
def tree(height: float, leaf: Colour) -> Shape:
    """Return a tree, or a bush of less than 2 m."""
    size = min(1.5, height / 3)
    crown = ((-0.6, -0.7, 0.8, 0.75), (0.6, -0.6, 0.85, 0.85), (0, 0, 1.0, 1.0), (-0.25, 0.25, 0.5, 1.12))
    trunk = _across(0, (-0.15, 0.15), (0, height - size), (84, 66, 50))
    shades = [(int(leaf[0] * shade), int(leaf[1] * shade), int(leaf[2] * shade)) for _, _, _, shade in crown]
    discs = [
        _disc(x * size, height - size * (1 - y), 0, part * size, shade)
        for (x, y, part, _), shade in zip(crown, shades, strict=True)
    ]
    return Shape([trunk, *discs])


@functools.lru_cache(maxsize=64)
def pole(height: float, arm: float = 0.0, *, lamp: bool = False, night: bool = False) -> Shape:
    """Return a pole with an arm to x = ``arm`` and perhaps a street lamp under it."""
    faces = [_across(0, (-0.07, 0.07), (0, height), _GREY), _across(0, (0, arm), (height - 0.12, height), _GREY)]
    if lamp:
        colour = (255, 224, 160) if night else _WHITE
        faces.append(_across(0, (0.6 * arm, arm), (height - 0.25, height - 0.1), colour, shining=night))
    return Shape(faces)


@functools.lru_cache(maxsize=1)
def rail() -> Shape:
    """Return 12 m of guard rail along the road from z = 0."""
    posts = [_across(z, (-0.06, 0.06), (0, 0.7), _GREY) for z in (6.0, 0.1)]
    return Shape([*posts, Face([(0, 0.45, 0), (0, 0.8, 0), (0, 0.8, 12), (0, 0.45, 12)], (128, 132, 134))])


@functools.lru_cache(maxsize=16)
def sign(kind: str) -> Shape:
    """Return a sign of ``SIGNS``, or a traffic light in ``red``, ``amber`` or ``green``; its middle at y = 0."""
    if kind in SIGNS:
        return Shape([_disc(0, 0, 0, radius, colour, corners, turn) for corners, turn, radius, colour in SIGNS[kind]])
    faces = [_across(0, (-0.27, 0.27), (-0.68, 0.68), (26, 28, 28))]
    for place, (name, (red, green, blue)) in enumerate(_LAMPS.items()):
        colour = (red, green, blue) if name == kind else (red // 4, green // 4, blue // 4)
        faces.append(_disc(0, 0.41 - 0.41 * place, 0, 0.17, colour)._replace(shining=name == kind))
    return Shape(faces)
