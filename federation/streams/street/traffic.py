"""Where everything stands at a moment: a function of seed and time, so any picture can be drawn without the others.

Moving things follow lanes. A lane is cut into stretches that move with it; a stretch's number decides what it holds.
What stands still comes in blocks of road from crossing to crossing, decided by the block's number in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from replayfleet.federation.streams.street import shapes
from replayfleet.federation.streams.street.looks import CLASS_NAMES, COLOURS, LENGTHS_M, SIGNS, Colour, Town
from replayfleet.federation.streams.street.shapes import Shape

FAR_M = 130.0
"""What is farther than this isn't drawn."""

BLOCK_M, CROSSING_M = 96.0, 11.0
CURBS_M = (-7.8, 4.3)
MOTORWAY_M = (-17.0, 5.8)

_LIGHT, _SIGN = CLASS_NAMES.index("traffic_light"), CLASS_NAMES.index("traffic_sign")
_LEADER_S, _LIGHT_S = 18.0, 24.0
_OFFSET = 2**31
"""Makes numbers of stretches, which may be negative, fit for a seed."""


class Thing(NamedTuple):
    """Something in the street: x metres right of the camera's lane, y above the road, z ahead; -1 isn't annotated."""

    shape: Shape
    x: float
    y: float
    z: float
    class_id: int = -1
    depth_m: float = 0.0
    """Of its far end beyond its near one, for what lines the road: what stands before it is painted over it."""


class Traffic:
    """Everything in one town's street; equal seeds give equal streets."""

    def __init__(self, town: Town, seed: int) -> None:
        self._town = town
        self._seed = seed
        self._luck = functools.lru_cache(maxsize=4096)(self._drawn)
        self._block = functools.lru_cache(maxsize=16)(self._built)

    def driven(self, time_s: float) -> float:
        """Return how far the camera has come, in metres."""
        return self._town.speed * (time_s + math.sin(0.21 * time_s))

    def things(self, time_s: float) -> list[Thing]:
        """Return all that is in sight, the farthest first.

        What is farther from the lane comes before what is nearer to it, for of two things on one ray the outer one is
        the farther: distances alone would paint a parked car over the bus that passes it.
        """
        found = [*self._standing(time_s), *self._moving(time_s)]
        return sorted(found, key=lambda thing: -thing.z - thing.depth_m - 2 * abs(thing.x))

    def _drawn(self, stream: int, number: int) -> list[float]:
        """Four uniform numbers that belong to a stretch, block or leader for ever."""
        return np.random.default_rng((self._seed, stream, number + _OFFSET)).random(4).tolist()  # type: ignore[no-any-return]

    def _moving(self, time_s: float) -> Iterator[Thing]:
        phase = int(2.2 * time_s)
        for index, lane in enumerate(self._town.lanes):
            moved = lane.speed * time_s - self.driven(time_s)
            for number in range(math.floor((-12 - moved) / lane.gap), math.ceil((FAR_M - moved) / lane.gap)):
                there, which, place, look = self._luck(index, number)
                if there < lane.fill:
                    kind = _pick(lane.kinds, which)
                    z = number * lane.gap + place * (lane.gap - LENGTHS_M[kind] - 2.0) + moved
                    yield self._vehicle(kind, lane.x, z, look, phase, away=lane.speed > 0)
        # Somebody whom the camera catches up with and loses again.
        leader, since = divmod(time_s / _LEADER_S, 1)
        there, which, nearest, look = self._luck(90, int(leader))
        if there < 0.85:
            kind = _pick(self._town.leaders, which)
            least = (7.5 + 14 * nearest) * (2.0 if self._town.motorway else 1.0)
            x = 0.0 if LENGTHS_M[kind] > 3 else 1.6 * (look - 0.5)
            yield self._vehicle(kind, x, least + (FAR_M - least) * (2 * since - 1) ** 2, look, phase)

    def _vehicle(self, kind: str, x: float, z: float, look: float, phase: int = 0, *, away: bool = True) -> Thing:
        place = int(look * 997)
        colours = COLOURS["cars"][place % len(COLOURS["cars"])], COLOURS["coats"][place % len(COLOURS["coats"])]
        step = (place + phase) % 4 if kind == "bike" else 0
        shape = shapes.vehicle(kind, *colours, step, away, self._town.night)
        return Thing(shape, x, 0, z, CLASS_NAMES.index(kind) if kind in CLASS_NAMES else 0)

    def _standing(self, time_s: float) -> Iterator[Thing]:
        driven = self.driven(time_s)
        for number in range(math.floor((driven - 14) / BLOCK_M), math.floor((driven + FAR_M) / BLOCK_M) + 1):
            begin = number * BLOCK_M - driven
            things = self._block(number) if self._town.motorway else self._block(number) + self._lights(number, time_s)
            yield from (thing._replace(z=thing.z + begin) for thing in things if -14 < thing.z + begin < FAR_M)

    def _lights(self, number: int, time_s: float) -> tuple[Thing, ...]:
        since = (time_s + _LIGHT_S * self._luck(91, number)[0]) % _LIGHT_S
        light = shapes.sign("red" if since < 10 else "green" if since < 22 else "amber")
        places = ((1.0, 4.8, -0.8), (4.9, 2.8, -0.8), (-8.3, 2.8, CROSSING_M + 0.2))
        return tuple(Thing(light, *place, _LIGHT) for place in places)

    def _built(self, number: int) -> tuple[Thing, ...]:
        rng = np.random.default_rng((self._seed, 93, number + _OFFSET))
        return tuple(_motorway(rng) if self._town.motorway else self._street(rng))

    def _street(self, rng: np.random.Generator) -> Iterator[Thing]:
        night = self._town.night
        for side, curb in zip((-1, 1), CURBS_M, strict=True):
            yield from _houses(rng, side, curb + 3.2 * side, night)
            for place in np.arange(CROSSING_M + 6, BLOCK_M - 4, 13.0) + rng.uniform(-2, 2):
                if rng.random() < 0.55:
                    yield _green(rng, curb + side * 1.7, float(place), rng.uniform(5, 7))
            for place in (CROSSING_M + 12, CROSSING_M + 54):
                yield Thing(shapes.pole(6.6, -1.8 * side, lamp=True, night=night), curb + side * 0.5, 0, place)
            for place in np.arange(CROSSING_M + 8, BLOCK_M - 14, 6.2):
                if rng.random() < 0.3:
                    kind = "van" if rng.random() < 0.15 else "car"
                    yield self._vehicle(kind, curb - side * 1.15, float(place), rng.random(), away=side > 0)
            for place in (CROSSING_M + 5, CROSSING_M + 40):
                if rng.random() < 0.6:
                    kind = str(rng.choice([name for name in SIGNS if name != "panel"]))
                    yield from _sign(kind, curb + side * 0.45, 2.4, place + rng.uniform(0, 6))
        yield Thing(shapes.pole(5.6, -4.2), 5.2, 0, -0.6)
        yield Thing(shapes.pole(5.6, 0.4), CURBS_M[0] - 0.9, 0, CROSSING_M + 0.4)


def _houses(rng: np.random.Generator, side: int, x: float, night: bool) -> Iterator[Thing]:
    begin = CROSSING_M + 2.0
    while begin < BLOCK_M - 8:
        width = min(float(rng.choice((8, 10, 12, 14))), math.floor(BLOCK_M - begin))
        look = (
            int(rng.integers(2, 6)),
            side,
            int(rng.integers(4)),
            COLOURS["walls"][int(rng.integers(len(COLOURS["walls"])))],
        )
        if rng.random() > 0.14:
            yield Thing(shapes.house(width, *look, night), x, 0, begin, depth_m=width)
        else:
            yield _green(rng, x + side * rng.uniform(1, 4), begin + width / 2)
        begin += width


def _motorway(rng: np.random.Generator) -> Iterator[Thing]:
    left, right = MOTORWAY_M
    for edge in (right + 0.9, left - 0.9, -6.9):
        yield from (Thing(shapes.rail(), edge, 0, float(z), depth_m=12.0) for z in np.arange(0, BLOCK_M, 12.0))
    for side, edge in ((1, right + 5), (-1, left - 5)):
        yield from (_green(rng, edge + side * rng.uniform(0, 24), float(z)) for z in rng.uniform(0, BLOCK_M, size=7))
    if rng.random() < 0.75:
        yield from _sign("panel", right + 3.0, 4.6, float(rng.uniform(10, 80)))
    if rng.random() < 0.6:
        yield from _sign("limit", right + 1.5, 2.4, float(rng.uniform(5, 90)))


def _sign(kind: str, x: float, y: float, z: float) -> Iterator[Thing]:
    yield Thing(shapes.pole(y), x, 0, z)
    yield Thing(shapes.sign(kind), x, y, z - 0.1, _SIGN)


def _green(rng: np.random.Generator, x: float, z: float, height_m: float | None = None) -> Thing:
    """A tree, or a bush where no height is asked for and luck says so."""
    height = float(rng.choice((1.4, 5.0, 6.0))) if height_m is None else round(height_m)
    leaf: Colour = (66, 112, 54) if rng.random() < 0.5 else (78, 124, 58)
    return Thing(shapes.tree(height, leaf), x, 0, z)


def _pick(shares: Mapping[str, float], luck: float) -> str:
    """Return the key in whose part of [0, 1) ``luck`` lies."""
    return list(shares)[min(int(np.searchsorted(np.cumsum(list(shares.values())), luck, "right")), len(shares) - 1)]
