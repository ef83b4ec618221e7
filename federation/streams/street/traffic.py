"""Where everything stands at a moment: a function of seed and time, so any picture can be drawn without the others.

Moving things follow lanes. A lane is cut into stretches that move with it; a stretch's number decides what it holds.
What stands still comes in blocks of road from crossing to crossing, decided by the block's number in the same way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from replayfleet.federation.streams.street import furniture
from replayfleet.federation.streams.street.meshes import Mesh
from replayfleet.federation.streams.street.towns import CAR_COLOURS, COAT_COLOURS, WALL_COLOURS, Colour, Town
from replayfleet.federation.streams.street.vehicles import LENGTHS_M, vehicle_mesh
from replayfleet.federation.streams.street.view import FAR_M

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
"""As recorded driving has them."""

BLOCK_M = 96.0
CROSSING_M = 11.0
"""The crossing at a block's beginning."""

RIGHT_CURB_M, LEFT_CURB_M = 4.3, -7.8
MOTORWAY_EDGES_M = (5.8, -17.0)

_LIGHT, _SIGN = CLASS_NAMES.index("traffic_light"), CLASS_NAMES.index("traffic_sign")
_OFFSET = 2**31
"""Makes numbers of stretches, which may be negative, fit for a seed."""

_LEADER_S = 18.0
_LIGHT_S = 24.0
"""How long a leader stays, and a traffic light's period."""

Colours: TypeAlias = tuple[tuple[str, Colour], ...]


@dataclass(frozen=True, slots=True)
class Thing:
    """Something in the street.

    Attributes:
        mesh: what it looks like.
        x: metres to the right of the camera's lane.
        y: metres above the road.
        z: metres ahead of the camera.
        depth: its distance: of its near end, of its far end for what lines the road.
        class_id: index into ``CLASS_NAMES``; -1 for what isn't annotated.
        colours: roles with colours of its own.
    """

    mesh: Mesh
    x: float
    y: float
    z: float
    depth: float
    class_id: int = -1
    colours: Colours = ()

    def ahead(self, distance: float) -> Thing:
        """Return the thing moved ahead."""
        return Thing(self.mesh, self.x, self.y, self.z + distance, self.depth + distance, self.class_id, self.colours)


class Traffic:
    """Everything in one town's street.

    Args:
        town: its look.
        seed: equal seeds give equal streets.
    """

    def __init__(self, town: Town, seed: int) -> None:
        self._town = town
        self._seed = seed
        self._draw = functools.lru_cache(maxsize=4096)(self._drawn)
        self._block = functools.lru_cache(maxsize=16)(self._built)

    def driven(self, time_s: float) -> float:
        """Return how far the camera has come, in metres."""
        speed = self._town.speed
        return speed * time_s + 0.3 * speed / 0.21 * math.sin(0.21 * time_s)

    def things(self, time_s: float) -> list[Thing]:
        """Return all that is in sight, the farthest first.

        What is farther from the lane comes before what is nearer to it, for of two things on one ray the outer one is
        the farther: distances alone would paint a parked car over the bus that passes it.
        """
        driven = self.driven(time_s)
        found = list(
            itertools.chain(self._standing(driven, time_s), self._moving(driven, time_s), self._leader(time_s))
        )
        found.sort(key=lambda thing: -thing.depth - 2 * abs(thing.x))
        return found

    def _drawn(self, stream: int, number: int) -> tuple[float, ...]:
        """Eight uniform numbers that belong to a stretch, block or leader for ever."""
        return tuple(np.random.default_rng((self._seed, stream, number + _OFFSET)).random(8).tolist())

    def _moving(self, driven: float, time_s: float) -> Iterator[Thing]:
        for index, lane in enumerate(self._town.lanes):
            moved = lane.speed * time_s - driven
            for number in range(math.floor((-12 - moved) / lane.gap), math.ceil((FAR_M - moved) / lane.gap)):
                luck, kind_luck, place, colour, phase, *_ = self._draw(index, number)
                if luck >= lane.fill:
                    continue
                kind = _pick(lane.kinds, kind_luck)
                z = number * lane.gap + place * (lane.gap - LENGTHS_M[kind] - 2.0) + moved
                yield _vehicle(kind, lane.x, z, colour, 0 if lane.speed > 0 else 2, int(4 * phase + 2.2 * time_s) % 4)

    def _leader(self, time_s: float) -> Iterator[Thing]:
        """Whoever the camera catches up with and loses again."""
        number = math.floor(time_s / _LEADER_S)
        luck, kind_luck, nearest, colour, side, *_ = self._draw(90, number)
        if luck < 0.85:
            kind = _pick(self._town.leaders, kind_luck)
            least = (7.5 + 14 * nearest) * (2.0 if self._town.motorway else 1.0)
            z = least + (FAR_M - least) * (2 * (time_s / _LEADER_S - number) - 1) ** 2
            x = 0.0 if LENGTHS_M[kind] > 3 else 1.6 * (side - 0.5)
            yield _vehicle(kind, x, z, colour, 0, int(2.2 * time_s) % 4)

    def _standing(self, driven: float, time_s: float) -> Iterator[Thing]:
        for number in range(math.floor((driven - 14) / BLOCK_M), math.floor((driven + FAR_M) / BLOCK_M) + 1):
            begin = number * BLOCK_M - driven
            yield from (thing.ahead(begin) for thing in self._block(number) if -14 < thing.z + begin < FAR_M)
            if not self._town.motorway:
                yield from (thing.ahead(begin) for thing in self._crossing(number, time_s))

    def _crossing(self, number: int, time_s: float) -> Iterator[Thing]:
        """Traffic lights of a crossing, and those who cross while they are red."""
        phase = time_s + _LIGHT_S * self._draw(91, number)[0]
        cycle, since = divmod(phase, _LIGHT_S)
        shown = "red" if since < 10 else "green" if since < 22 else "amber"
        light = furniture.light_mesh(shown)
        for x, y, z in ((1.0, 5.4, -0.7), (4.9, 3.4, -0.7), (-8.3, 3.4, CROSSING_M + 0.3)):
            yield Thing(light, x, y, z - 0.1, z - 0.1, _LIGHT)
        for way in (0, 1):
            luck, kind_luck, late, colour, phase_luck, *_ = self._draw(92 + way, 64 * number + int(cycle) % 64)
            if since < 10 and luck < 0.75:
                kind = _pick({"car": 0.5, "van": 0.1, "bike": 0.2, "motobike": 0.2}, kind_luck)
                speed = 5.0 if kind == "bike" else 9.0
                along = speed * (since - 0.5 - 3 * late) - 32
                thing = _vehicle(
                    kind,
                    along if way else -along,
                    3.2 + 3.6 * way,
                    colour,
                    1 if way else 3,
                    int(4 * phase_luck + 2.2 * time_s) % 4,
                )
                yield thing

    def _built(self, number: int) -> tuple[Thing, ...]:
        rng = np.random.default_rng((self._seed, 93, number + _OFFSET))
        return tuple(_motorway_block(rng) if self._town.motorway else _street_block(rng))


def _street_block(rng: np.random.Generator) -> Iterator[Thing]:
    for side in (1, -1):
        curb = RIGHT_CURB_M if side > 0 else LEFT_CURB_M
        yield from _houses(rng, side, curb + side * 3.2)
        for place in np.arange(CROSSING_M + 6, BLOCK_M - 4, 13.0) + rng.uniform(-2, 2):
            if rng.random() < 0.55:
                yield _thing(furniture.tree_mesh(int(rng.integers(4))), curb + side * 1.7, float(place), _leaf(rng))
        for place in (CROSSING_M + 12, CROSSING_M + 54):
            yield _thing(furniture.lamp_mesh(side), curb + side * 0.5, place)
        parked = curb - side * 1.15
        for place in np.arange(CROSSING_M + 8, BLOCK_M - 14, 6.2):
            if rng.random() < 0.3:
                kind = "van" if rng.random() < 0.15 else "car"
                yield _vehicle(kind, parked, float(place), rng.random(), 0 if side > 0 else 2, 0)
        for place in (CROSSING_M + 5, CROSSING_M + 40):
            if rng.random() < 0.6:
                yield from _sign(
                    str(rng.choice(furniture.SIGN_KINDS)), curb + side * 0.45, 2.4, place + rng.uniform(0, 6)
                )
    yield _thing(furniture.light_pole_mesh(-4.2), 5.2, -0.6)
    yield _thing(furniture.light_pole_mesh(0.4), LEFT_CURB_M - 0.9, CROSSING_M + 0.4)


def _houses(rng: np.random.Generator, side: int, x: float) -> Iterator[Thing]:
    begin = CROSSING_M + 2.0
    while begin < BLOCK_M - 8:
        width = min(float(rng.choice(furniture.HOUSE_WIDTHS_M)), math.floor(BLOCK_M - begin))
        if rng.random() < 0.14:
            for place in np.arange(begin + 1, begin + width - 1, 2.2):
                yield _thing(furniture.bush_mesh(), x + side * rng.uniform(0, 3), float(place), _leaf(rng))
        else:
            mesh = furniture.house_mesh(width, int(rng.integers(2, 6)), side, int(rng.integers(4)))
            colours = (("wall", _varied(rng, WALL_COLOURS[int(rng.integers(len(WALL_COLOURS)))])),)
            yield Thing(mesh, x + side * rng.choice((0.0, 0.0, 0.8)), 0, begin, begin + width, -1, colours)
        begin += width


def _motorway_block(rng: np.random.Generator) -> Iterator[Thing]:
    right, left = MOTORWAY_EDGES_M
    for edge in (right + 0.9, left - 0.9, -6.9):
        for place in np.arange(0, BLOCK_M, 12.0):
            yield Thing(furniture.rail_mesh(12.0), edge, 0, float(place), float(place) + 12.0)
    for side, edge in ((1, right + 5), (-1, left - 5)):
        for place in rng.uniform(0, BLOCK_M, size=7):
            mesh = furniture.tree_mesh(int(rng.integers(4))) if rng.random() < 0.5 else furniture.bush_mesh()
            yield _thing(mesh, edge + side * rng.uniform(0, 24), float(place), _leaf(rng))
    if rng.random() < 0.75:
        place = float(rng.uniform(10, 80))
        for leg in (right + 1.6, right + 4.4):
            yield _thing(furniture.sign_pole_mesh(4.0), leg, place)
        yield Thing(furniture.sign_mesh("panel"), right + 3.0, 4.2, place - 0.1, place - 0.1, _SIGN)
    if rng.random() < 0.6:
        yield from _sign("limit", right + 1.5, 2.2, float(rng.uniform(5, 90)), 0.2)


def _sign(kind: str, x: float, y: float, z: float, above: float = 0.0) -> Iterator[Thing]:
    yield _thing(furniture.sign_pole_mesh(y), x, z)
    yield Thing(furniture.sign_mesh(kind), x, y + above, z - 0.1, z - 0.1, _SIGN)


def _vehicle(kind: str, x: float, z: float, luck: float, quarters: int, phase: int) -> Thing:
    class_id = CLASS_NAMES.index(kind) if kind in CLASS_NAMES else 0
    mesh = vehicle_mesh(kind, phase if kind == "bike" else 0, quarters)
    place = int(luck * 997)
    body = CAR_COLOURS[place % len(CAR_COLOURS)]
    coat, helmet = COAT_COLOURS[place % len(COAT_COLOURS)], CAR_COLOURS[place // 9 % len(CAR_COLOURS)]
    colours = (("body", body), ("coat", coat), ("helmet", helmet))
    return Thing(mesh, x, 0, z, z, class_id, colours)


def _thing(mesh: Mesh, x: float, z: float, colours: Colours = ()) -> Thing:
    return Thing(mesh, x, 0, z, z, -1, colours)


def _leaf(rng: np.random.Generator) -> Colours:
    return (("leaf", _varied(rng, (66, 112, 54))),)


def _varied(rng: np.random.Generator, colour: Colour) -> Colour:
    red, green, blue = (int(np.clip(value * rng.uniform(0.88, 1.1), 0, 255)) for value in colour)
    return red, green, blue


def _pick(shares: Mapping[str, float], luck: float) -> str:
    """Return the key in whose part of [0, 1) ``luck`` lies."""
    keys: Sequence[str] = list(shares)
    for key in keys:
        luck -= shares[key]
        if luck < 0:
            return key
    return keys[-1]
