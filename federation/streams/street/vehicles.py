"""Cars, vans, buses, bikes and motobikes, heading for +z with the rear at z = 0."""

from __future__ import annotations

import functools
import math

from replayfleet.federation.streams.street.meshes import Mesh, MeshBuilder, Vertex, circle, turned

_LEFT, _RIGHT, _UP, _BACK, _AHEAD = (-1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, -1), (0, 0, 1)

LENGTHS_M = {"car": 4.35, "van": 5.2, "bus": 10.5, "truck": 9.5, "bike": 1.75, "motobike": 2.1}
"""Every kind, and how long it is."""


@functools.lru_cache(maxsize=256)
def vehicle_mesh(kind: str, phase: int, quarters: int) -> Mesh:
    """Return a kind's mesh.

    Args:
        kind: key of ``LENGTHS_M``.
        phase: of a cyclist's legs, 0 to 3.
        quarters: turns to the right: 0 drives ahead of the camera, 2 towards it.
    """
    builder = MeshBuilder()
    if kind == "car":
        _car(builder)
    elif kind == "bike":
        _bike(builder, phase)
    elif kind == "motobike":
        _motobike(builder)
    else:
        _boxy(builder, kind)
    return turned(builder.build(), quarters)


def _car(add: MeshBuilder) -> None:
    half, roof, length = 0.9, 0.68, LENGTHS_M["car"]
    _wheels(add, half, length, 0.33, (0.85, 3.45))
    lower = [(0.0, 0.28), (0.0, 0.78), (0.12, 0.95), (3.15, 1.0), (4.2, 0.82), (length, 0.55), (length, 0.28)]
    cabin = [(0.12, 0.95, half), (0.7, 1.42, roof), (2.3, 1.46, roof), (3.15, 1.0, half)]
    for side, outside in ((-1, _LEFT), (1, _RIGHT)):
        add.polygon([(side * half, y, z) for z, y in lower], "body", 0.78, outside=outside)
        add.polygon([(side * x, y, z) for z, y, x in cabin], "glass", 0.9, outside=outside)
        pillar = [
            (side * half, 0.98, 1.5),
            (side * roof, 1.44, 1.5),
            (side * roof, 1.44, 1.62),
            (side * half, 0.98, 1.62),
        ]
        add.polygon(pillar, "body", 0.75, outside=outside, detail=0.25)
        for middle in (0.85, 3.45):
            add.polygon(circle((side * (half + 0.01), 0.33, middle), 0.33), "tyre", outside=outside, detail=0.7)
            add.polygon(circle((side * (half + 0.02), 0.33, middle), 0.18), "hub", outside=outside, detail=0.35)
    strip = functools.partial(_strip, add)
    strip((cabin[1][0], cabin[1][1], roof), (cabin[2][0], cabin[2][1], roof), "body", 1.1, _UP)
    strip((0.12, 0.95, half), (0.7, 1.42, roof), "glass", 1.1, (0, 0.8, -1))
    strip((3.15, 1.0, half), (2.3, 1.46, roof), "glass", 1.1, (0, 0.8, 1))
    strip((3.15, 1.0, half), (4.2, 0.82, half), "body", 1.15, _UP)
    strip((0.0, 0.78, half), (0.12, 0.95, half), "body", 1.0, _BACK)
    strip((0.0, 0.28, half), (0.0, 0.78, half), "body", 0.88, _BACK)
    strip((4.2, 0.82, half), (length, 0.55, half), "body", 0.95, _AHEAD)
    strip((length, 0.28, half), (length, 0.55, half), "body", 0.8, _AHEAD)
    _panel(add, 0.0, (-0.3, 0.3, 0.42, 0.54), "plate", _BACK, detail=0.3)
    _panel(add, length, (-0.45, 0.45, 0.38, 0.52), "dark", _AHEAD)
    for side in (-1, 1):
        _panel(add, 0.0, (side * 0.88, side * 0.58, 0.62, 0.78), "tail", _BACK)
        _panel(add, length + 0.01, (side * 0.86, side * 0.55, 0.56, 0.72), "head", _AHEAD)


def _boxy(add: MeshBuilder, kind: str) -> None:
    """A van, bus or truck: a box on wheels with what tells them apart painted on."""
    length = LENGTHS_M[kind]
    half, top = {"van": (0.98, 2.1), "bus": (1.25, 3.0), "truck": (1.22, 3.3)}[kind]
    radius = 0.36 if kind == "van" else 0.48
    middles = (0.95, length - 0.95) if kind == "van" else (1.8, length - 1.5)
    _wheels(add, half, length, radius, middles)
    cab = length - 2.1  # where a truck's load ends
    body = "load" if kind == "truck" else "body"
    for side, outside in ((-1, _LEFT), (1, _RIGHT)):
        x = side * half
        back = [(x, 0.4, 0.0), (x, top, 0.0), (x, top, cab), (x, 0.4, cab)]
        front_top = top * 0.84 if kind == "truck" else top
        front = [
            (x, 0.4, cab),
            (x, front_top, cab),
            (x, front_top, length - 0.35),
            (x, top * 0.5, length),
            (x, 0.4, length),
        ]
        add.polygon(back, body, 0.76, outside=outside)
        add.polygon(front, "body", 0.8, outside=outside)
        add.polygon(
            [
                (x, top * 0.52, cab + 0.5),
                (x, top * 0.8, cab + 0.5),
                (x, top * 0.8, length - 0.5),
                (x, top * 0.52, length - 0.2),
            ],
            "glass",
            outside=outside,
            detail=0.9,
        )
        if kind == "bus":
            for begin in range(5):
                near, far = 0.5 + 1.55 * begin, 1.8 + 1.55 * begin
                pane = [(x, 1.5, near), (x, 2.5, near), (x, 2.5, far), (x, 1.5, far)]
                add.polygon(pane, "glass", outside=outside, detail=0.9)
        for middle in middles:
            add.polygon(circle((side * (half + 0.01), radius, middle), radius), "tyre", outside=outside, detail=0.7)
            add.polygon(
                circle((side * (half + 0.02), radius, middle), 0.5 * radius), "hub", outside=outside, detail=0.35
            )
    _panel(add, 0.0, (-half, half, 0.4, top), body, _BACK, 0.92, detail=0.0)
    _panel(add, length, (-half, half, 0.4, top * 0.5), "body", _AHEAD, 0.95, detail=0.0)
    _strip(
        add,
        (length, top * 0.5, half),
        (length - 0.35, top * (0.84 if kind == "truck" else 1), half),
        "glass",
        1.1,
        _AHEAD,
    )
    if kind == "truck":
        _panel(add, cab, (-half, half, top * 0.84, top), "load", _AHEAD, 0.85, detail=0.0)
        _panel(add, 0.0, (-0.03, 0.03, 0.5, top - 0.1), "dark", _BACK)
    else:
        _panel(add, 0.0, (-0.8 * half, 0.8 * half, top * 0.55, top * 0.85), "glass", _BACK)
    _panel(add, 0.0, (-0.3, 0.3, 0.5, 0.62), "plate", _BACK, detail=0.3)
    for side in (-1, 1):
        _panel(add, 0.0, (side * half * 0.97, side * half * 0.75, 0.65, 0.95), "tail", _BACK)
        _panel(add, length, (side * half * 0.95, side * half * 0.6, 0.6, 0.82), "head", _AHEAD)


def _bike(add: MeshBuilder, phase: int) -> None:
    rear, front = (0.0, 0.34, 0.35), (0.0, 0.34, 1.4)
    for _, y, z in (rear, front):
        add.ring((0.0, y, z), 0.34, 0.27, "tyre")
        add.bar((0.0, 0.02, z), (0.0, 0.66, z), 0.06, "tyre")  # what is to be seen of a wheel from behind
    seat, crank, bars = (0.0, 0.92, 0.55), (0.0, 0.3, 0.85), (0.0, 1.0, 1.25)
    for begin, end in (
        (rear, seat),
        (rear, crank),
        (seat, crank),
        (crank, bars),
        (seat, (0.0, 0.88, 1.22)),
        (bars, front),
    ):
        add.bar(begin, end, 0.06, "frame", detail=0.4)
    add.bar((-0.25, 1.02, 1.2), (0.25, 1.02, 1.2), 0.05, "dark", detail=0.4)
    for side in (-1, 1):
        angle = phase * math.pi / 2 + (math.pi if side > 0 else 0)
        foot = (side * 0.1, 0.3 + 0.16 * math.cos(angle), 0.85 + 0.16 * math.sin(angle))
        knee = (side * 0.12, 0.66 + 0.12 * math.cos(angle), 1.0 + 0.06 * math.sin(angle))
        add.bar((side * 0.1, 0.98, 0.6), knee, 0.16, "trousers")
        add.bar(knee, foot, 0.13, "trousers", 0.8)
        add.bar(foot, (foot[0], foot[1] - 0.02, foot[2] + 0.16), 0.1, "dark", detail=0.3)
    _rider(add, hips=(0.0, 0.98, 0.58), shoulders=(0.0, 1.42, 0.9), hands=(0.22, 1.04, 1.2), thickness=0.32)
    add.disc((0.0, 1.62, 1.0), 0.12, "skin")
    add.disc((0.0, 1.67, 0.98), 0.115, "helmet")


def _motobike(add: MeshBuilder) -> None:
    rear, front = (0.0, 0.32, 0.4), (0.0, 0.32, 1.75)
    for _, y, z in (rear, front):
        add.ring((0.0, y, z), 0.33, 0.16, "tyre")
        add.bar((0.0, 0.09, z), (0.0, 0.58, z), 0.18, "tyre")
    add.bar((0.0, 0.42, 0.75), (0.0, 0.45, 1.35), 0.4, "dark")
    add.bar(front, (0.0, 0.95, 1.5), 0.12, "hub")
    add.bar((0.12, 0.3, 0.2), (0.12, 0.34, 1.0), 0.12, "hub")
    add.bar((0.0, 0.76, 0.2), (0.0, 0.74, 0.8), 0.26, "body", 0.8)
    add.bar((0.0, 0.78, 0.85), (0.0, 0.84, 1.3), 0.42, "body")
    add.bar((0.0, 0.7, 1.55), (0.0, 1.05, 1.5), 0.38, "body", 1.1)
    add.bar((-0.36, 1.08, 1.35), (0.36, 1.08, 1.35), 0.07, "dark")
    for side in (-1, 1):
        knee = (side * 0.26, 0.66, 1.05)
        add.bar((side * 0.16, 0.86, 0.65), knee, 0.2, "trousers")
        add.bar(knee, (side * 0.24, 0.32, 0.8), 0.17, "trousers", 0.8)
    _rider(add, hips=(0.0, 0.9, 0.62), shoulders=(0.0, 1.36, 0.92), hands=(0.33, 1.08, 1.33), thickness=0.44)
    add.disc((0.0, 1.58, 1.0), 0.17, "helmet")
    add.disc((0.0, 1.56, 1.07), 0.12, "glass", detail=0.3)
    add.disc((0.0, 0.74, 0.12), 0.1, "tail")
    add.disc((0.0, 0.92, 1.74), 0.12, "head")


def _rider(add: MeshBuilder, *, hips: Vertex, shoulders: Vertex, hands: Vertex, thickness: float) -> None:
    """Trunk and arms."""
    add.bar(hips, shoulders, thickness, "coat")
    for side in (-1, 1):
        elbow = (side * (hands[0] + 0.04), (shoulders[1] + hands[1]) / 2 - 0.04, (shoulders[2] + hands[2]) / 2)
        add.bar((side * thickness / 2, shoulders[1], shoulders[2]), elbow, 0.12, "coat", 0.85, detail=0.5)
        add.bar(elbow, (side * hands[0], hands[1], hands[2]), 0.1, "coat", 0.8, detail=0.5)


def _wheels(add: MeshBuilder, half: float, length: float, radius: float, middles: tuple[float, float]) -> None:
    """The shadow below, and of the tyres what is to be seen from behind and from ahead."""
    edge = half - 0.03
    add.polygon(
        [(-edge, 0.0, 0.03), (edge, 0.0, 0.03), (edge, 0.0, length - 0.03), (-edge, 0.0, length - 0.03)], "shadow"
    )
    for middle in middles:
        for side in (-1, 1):
            inner, outer = side * (half - 0.26), side * half
            add.polygon(
                [(inner, 0.0, middle), (outer, 0.0, middle), (outer, radius, middle), (inner, radius, middle)],
                "tyre",
                detail=0.7,
            )


def _strip(
    add: MeshBuilder,
    begin: tuple[float, float, float],
    end: tuple[float, float, float],
    role: str,
    shade: float,
    outside: Vertex,
) -> None:
    """Add what reaches across the vehicle between two (z, y, half width)."""
    (z0, y0, x0), (z1, y1, x1) = begin, end
    add.polygon([(-x0, y0, z0), (x0, y0, z0), (x1, y1, z1), (-x1, y1, z1)], role, shade, outside=outside)


def _panel(
    add: MeshBuilder,
    z: float,
    sides: tuple[float, float, float, float],
    role: str,
    outside: Vertex,
    shade: float = 1.0,
    *,
    detail: float = 0.4,
) -> None:
    """Add an upright rectangle across the vehicle: left, right, low and high side."""
    left, right, low, high = sides
    corners = [(left, low, z), (right, low, z), (right, high, z), (left, high, z)]
    add.polygon(corners, role, shade, outside=outside, detail=detail)
