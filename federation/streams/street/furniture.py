"""What stands beside the road: houses, trees, lamps, rails, traffic lights and signs."""

from __future__ import annotations

import functools

from replayfleet.federation.streams.street.meshes import Mesh, MeshBuilder, Vertex

_BACK = (0, 0, -1)

HOUSE_WIDTHS_M = (8.0, 10.0, 12.0, 14.0)
SIGN_KINDS = ("limit", "yield", "stop", "parking", "diamond")

_FLOOR_M = 3.0


@functools.lru_cache(maxsize=256)
def house_mesh(width: float, floors: int, side: int, variant: int) -> Mesh:
    """Return a house from z = 0 to z = ``width`` with its front at x = 0; ``side`` is 1 right of the road, -1 left."""
    add = MeshBuilder()
    top, deep = floors * _FLOOR_M + 0.8, side * 9.0
    front: Vertex = (-side, 0, 0)
    add.polygon([(0, 0, 0), (deep, 0, 0), (deep, top, 0), (0, top, 0)], "wall", 0.72, outside=_BACK)
    add.polygon([(0, top, 0), (deep, top, 0), (deep / 2, top + 2.4, 0)], "wall", 0.66, outside=_BACK)
    add.polygon([(0, 0, 0), (0, top, 0), (0, top, width), (0, 0, width)], "wall", 1.0, outside=front)
    add.polygon(
        [(-side * 0.4, top, 0), (-side * 0.4, top, width), (deep / 2, top + 2.4, width), (deep / 2, top + 2.4, 0)],
        "roof",
        outside=(-side, 1, 0),
    )
    add.panes([[(0, top - 0.35, 0), (0, top, 0), (0, top, width), (0, top - 0.35, width)]], "trim")
    lit: list[list[Vertex]] = []
    dark: list[list[Vertex]] = []
    num_bays = int(width // 2)
    for floor in range(floors):
        for bay in range(num_bays):
            low, near = floor * _FLOOR_M + 1.1, (bay + 0.5) * width / num_bays - 0.5
            if floor == 0 and bay == variant % num_bays:
                continue  # the door
            pane: list[Vertex] = [(0, low, near), (0, low + 1.4, near), (0, low + 1.4, near + 1), (0, low, near + 1)]
            (lit if (7 * floor + 5 * bay + 3 * variant) % 4 == 0 else dark).append(pane)
        for column in range(3):
            low, near = floor * _FLOOR_M + 1.1, side * (1.4 + 2.6 * column)
            pane = [(near, low, 0), (near, low + 1.3, 0), (near + side, low + 1.3, 0), (near + side, low, 0)]
            (lit if (5 * floor + 3 * column + variant) % 5 == 0 else dark).append(pane)
    add.panes(dark, "window")
    add.panes(lit, "lit")
    door = (variant % num_bays + 0.5) * width / num_bays - 0.55
    add.panes([[(0, 0, door), (0, 2.2, door), (0, 2.2, door + 1.1), (0, 0, door + 1.1)]], "door")
    return add.build()


@functools.lru_cache(maxsize=16)
def tree_mesh(variant: int) -> Mesh:
    """Return a tree of 5 to 7 m."""
    add = MeshBuilder()
    low = 2.6 + 0.3 * variant
    add.bar((0, 0, 0), (0, low + 1, 0), 0.3, "trunk")
    for x, y, radius, shade in (
        (-0.9, 0.6, 1.2, 0.8),
        (0.9, 0.8, 1.3, 0.9),
        (0.1, 1.8, 1.45, 1.05),
        (-0.3, 1.0, 0.9, 1.15),
    ):
        add.disc((x, low + y, 0), radius, "leaf", shade)
    return add.build()


@functools.lru_cache(maxsize=4)
def bush_mesh() -> Mesh:
    """Return a bush."""
    add = MeshBuilder()
    for x, radius, shade in ((-0.7, 0.7, 0.75), (0.7, 0.8, 0.85), (0.0, 0.95, 1.0)):
        add.disc((x, radius * 0.7, 0), radius, "leaf", shade)
    return add.build()


@functools.lru_cache(maxsize=4)
def lamp_mesh(side: int) -> Mesh:
    """Return a street lamp that leans over the road."""
    add = MeshBuilder()
    add.bar((0, 0, 0), (0, 6.4, 0), 0.14, "pole")
    add.bar((0, 6.4, 0), (-side * 1.5, 6.7, 0), 0.1, "pole")
    add.bar((-side * 1.2, 6.6, 0), (-side * 1.9, 6.6, 0), 0.18, "lamp")
    return add.build()


@functools.lru_cache(maxsize=4)
def rail_mesh(length: float) -> Mesh:
    """Return a guard rail along the road from z = 0."""
    add = MeshBuilder()
    for post in range(3):
        add.bar((0, 0, post * length / 3), (0, 0.7, post * length / 3), 0.1, "pole", 0.7)
    add.polygon([(0, 0.45, 0), (0, 0.8, 0), (0, 0.8, length), (0, 0.45, length)], "pole", 1.1)
    return add.build()


@functools.lru_cache(maxsize=8)
def light_pole_mesh(arm: float) -> Mesh:
    """Return what carries traffic lights, with an arm to x = ``arm``."""
    add = MeshBuilder()
    add.bar((0, 0, 0), (0, 5.6, 0), 0.16, "pole")
    add.bar((0, 5.5, 0), (arm, 5.5, 0), 0.12, "pole")
    return add.build()


@functools.lru_cache(maxsize=8)
def light_mesh(shown: str) -> Mesh:
    """Return a traffic light that shows ``red``, ``amber`` or ``green``, hanging from y = 0."""
    add = MeshBuilder()
    add.polygon([(-0.27, -1.35, 0), (0.27, -1.35, 0), (0.27, 0, 0), (-0.27, 0, 0)], "housing")
    for place, colour in enumerate(("red", "amber", "green")):
        role = f"{colour} on" if colour == shown else f"{colour} off"
        add.disc((0, -0.27 - 0.41 * place, -0.02), 0.17, role, detail=0.4)
    return add.build()


@functools.lru_cache(maxsize=4)
def sign_pole_mesh(height: float) -> Mesh:
    """Return what carries a sign."""
    add = MeshBuilder()
    add.bar((0, 0, 0), (0, height, 0), 0.08, "pole")
    return add.build()


@functools.lru_cache(maxsize=16)
def sign_mesh(kind: str) -> Mesh:
    """Return a traffic sign of ``SIGN_KINDS`` or a motorway's ``panel``, its middle at y = 0."""
    add = MeshBuilder()
    if kind == "limit":
        add.disc((0, 0, 0), 0.42, "sign red")
        add.disc((0, 0, -0.01), 0.31, "sign white", detail=0.6)
        add.panes([_rectangle(-0.17, -0.04, -0.14, 0.14), _rectangle(0.04, 0.17, -0.14, 0.14)], "sign black")
    elif kind == "yield":
        add.polygon([(0, -0.45, 0), (0.5, 0.4, 0), (-0.5, 0.4, 0)], "sign red")
        add.panes([[(0, -0.22, -0.01), (0.29, 0.27, -0.01), (-0.29, 0.27, -0.01)]], "sign white")
    elif kind == "stop":
        a, b = 0.18, 0.43
        add.polygon(
            [(-a, -b, 0), (a, -b, 0), (b, -a, 0), (b, a, 0), (a, b, 0), (-a, b, 0), (-b, a, 0), (-b, -a, 0)], "sign red"
        )
        add.panes([_rectangle(-0.3, 0.3, -0.08, 0.08)], "sign white")
    elif kind == "parking":
        add.polygon(_rectangle(-0.38, 0.38, -0.42, 0.42), "sign blue")
        add.panes([_rectangle(-0.15, -0.03, -0.28, 0.28), _rectangle(-0.03, 0.18, 0.0, 0.28)], "sign white")
    elif kind == "diamond":
        add.polygon([(0, -0.52, 0), (0.52, 0, 0), (0, 0.52, 0), (-0.52, 0, 0)], "sign white")
        add.panes([[(0, -0.4, -0.01), (0.4, 0, -0.01), (0, 0.4, -0.01), (-0.4, 0, -0.01)]], "sign yellow")
    else:
        add.polygon(_rectangle(-1.9, 1.9, -1.1, 1.1), "sign white")
        add.panes([_rectangle(-1.8, 1.8, -1.0, 1.0)], "sign blue")
        lines = [
            _rectangle(-1.4, 0.6, 0.35, 0.65),
            _rectangle(-1.4, 1.0, -0.2, 0.1),
            _rectangle(-1.4, 0.1, -0.75, -0.45),
        ]
        add.panes(lines, "sign white")
    return add.build()


def _rectangle(left: float, right: float, low: float, high: float) -> list[Vertex]:
    return [(left, low, -0.01), (right, low, -0.01), (right, high, -0.01), (left, high, -0.01)]
