"""Sky, road and weather: what lies behind the things and what lies over the whole picture. Needs OpenCV.

Axes: H height, W width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.streams.street.towns import BEAM_M, Colour, Town
from replayfleet.federation.streams.street.traffic import (
    BLOCK_M,
    CROSSING_M,
    LEFT_CURB_M,
    MOTORWAY_EDGES_M,
    RIGHT_CURB_M,
)
from replayfleet.federation.streams.street.view import FAR_M, Points, View, whole_pixels

Pixels = NDArray[np.uint8]

_Patch: TypeAlias = tuple[float, float, float, float, Colour]
"""Left, right, near and far edge of a rectangle on the road, and its colour."""

MARGIN = 64
"""Pixels by which the sky is larger than the picture on every side, for the camera turns."""

_WHITE: Colour = (214, 214, 208)
_ROWS = np.geomspace(1.2, FAR_M, 15)
_NUM_STREAKS = 3


class Ground:
    """The road and what is beside it, without anything that stands up.

    Args:
        cv2: the module.
        town: the look.
        size: (width, height) of the picture.
        seed: of clouds, hills and noise.
    """

    def __init__(self, cv2: Any, town: Town, size: tuple[int, int], seed: int) -> None:
        self._cv2 = cv2
        self._town = town
        self._width, self._height = size
        rng = np.random.default_rng((seed, 94))
        self._sky = _sky(cv2, town, size, rng)
        self._noise = rng.integers(0, 2 * town.noise + 1, (self._height + 64, self._width + 64, 1), dtype=np.uint8)
        self._noise = np.ascontiguousarray(np.repeat(self._noise, 3, axis=2))
        self._fading = functools.lru_cache(maxsize=8)(self._faded)
        self._streaks = [_streaks(cv2, size, rng) for _ in range(_NUM_STREAKS)] if town.rain else []

    def begin(self, view: View, driven: float) -> Pixels:
        """Return a new picture with sky and ground."""
        x = round(self._width / 2 - view.centre_x) + MARGIN
        y = round(self._height / 2 - view.horizon_y) + MARGIN
        pixels: Pixels = self._sky[y : y + self._height, x : x + self._width].copy()
        for contour, colour in self._surfaces(view, driven):
            self._cv2.fillPoly(pixels, [contour], colour)
        for colour, contours in _outlines(view, self._patches(driven)):
            self._cv2.fillPoly(pixels, contours, colour)
        self._fade(pixels, view)
        return pixels

    def finish(self, pixels: Pixels, glows: Sequence[tuple[int, int, int, Colour]], index: int) -> Pixels:
        """Return the picture with glows, rain, the lens' softness and the sensor's noise."""
        cv2, town = self._cv2, self._town
        for column, row, radius, colour in glows:
            self._add_glow(pixels, column, row, radius, colour)
        if self._streaks:
            layer, y = self._streaks[index % _NUM_STREAKS], 37 * index % self._height
            cv2.add(pixels, layer[y : y + self._height], dst=pixels)
        cv2.GaussianBlur(pixels, (3, 3), 0.6, dst=pixels)
        y, x = 29 * index % 64, 43 * index % 64
        cv2.add(pixels, self._noise[y : y + self._height, x : x + self._width], dst=pixels)
        cv2.subtract(pixels, (town.noise, town.noise, town.noise, 0), dst=pixels)
        return pixels

    def _surfaces(self, view: View, driven: float) -> Iterator[tuple[NDArray[np.int32], Colour]]:
        """Yield what runs along the road, and the roads across, what lies below first."""
        town = self._town
        if town.motorway:
            right, left = MOTORWAY_EDGES_M
            yield _strip(view, left, -8.6), town.road
            yield _strip(view, -5.6, right), town.road
            for x in (-5.2, 5.4, -9.0, -16.6):
                yield _strip(view, x - 0.09, x + 0.09), _WHITE
            return
        yield _strip(view, LEFT_CURB_M - 3.2, RIGHT_CURB_M + 3.2), town.walk
        yield _strip(view, LEFT_CURB_M - 0.16, RIGHT_CURB_M + 0.16), _shaded(town.walk, 0.74)
        yield _strip(view, LEFT_CURB_M, RIGHT_CURB_M), town.road
        across = [(-60.0, 60.0, begin, begin + CROSSING_M, town.road) for begin in _places(driven, BLOCK_M)]
        for colour, contours in _outlines(view, across):
            for contour in contours:
                yield contour, colour

    def _patches(self, driven: float) -> list[_Patch]:
        """Return what is painted on the road; patches of one colour don't overlap."""
        town = self._town
        found: list[_Patch] = []
        for begin in _places(driven, 17.0):  # repaired asphalt
            found.append((0.4, 1.7, begin + 3, begin + 9, _shaded(town.road, 0.9)))
            found.append((-4.4, -2.6, begin + 9, begin + 13, _shaded(town.road, 1.08)))
        for begin in _places(driven, 9.0):
            if town.motorway:
                found += [(x - 0.08, x + 0.08, begin, begin + 3.6, _WHITE) for x in (-1.8, 1.8, -12.8)]
            elif (begin + driven) % BLOCK_M > CROSSING_M:
                found.append((-1.83, -1.67, begin, begin + 3.6, _WHITE))
        for begin in () if town.motorway else _places(driven, BLOCK_M):
            if begin < 70:  # zebras on both sides of a crossing, and the line to stop at
                stripes = [LEFT_CURB_M + 0.5 + stripe for stripe in range(12)]
                for near in (begin + 0.4, begin + CROSSING_M - 2.8):
                    found += [(x, x + 0.5, near, near + 2.4, _WHITE) for x in stripes]
                found.append((-1.65, RIGHT_CURB_M - 0.1, begin - 1.6, begin - 1.2, _WHITE))
        return found

    def _fade(self, pixels: Pixels, view: View) -> None:
        """Give the ground the light and the haze of its distance."""
        top = max(0, round(view.horizon_y)) + 1
        keep, haze = self._fading(self._height - top, view.focal * view.eye)
        below = pixels[top:]
        self._cv2.multiply(below, keep, dst=below, scale=1 / 128)
        self._cv2.add(below, haze, dst=below)

    def _faded(self, num_rows: int, scale: float) -> tuple[Pixels, Pixels]:
        """Return what to multiply the ground's rows with, 128 being 1, and what to add; row n is ``scale / n`` away."""
        distance = scale / np.arange(0.5, num_rows)
        colour, reach = self._town.haze
        clear = np.exp(-distance / reach)
        light = self._town.ambient + self._town.beam * np.exp(-distance / BEAM_M)
        keep = np.clip(128 * clear * light, 0, 255)
        haze = (1 - clear)[:, None] * np.array(colour)
        shape = (num_rows, self._width, 3)
        return (
            np.ascontiguousarray(np.broadcast_to(keep[:, None, None], shape), dtype=np.uint8),
            np.ascontiguousarray(np.broadcast_to(haze[:, None, :], shape), dtype=np.uint8),
        )

    def _add_glow(self, pixels: Pixels, column: int, row: int, radius: int, colour: Colour) -> None:
        left, top = max(column - radius, 0), max(row - radius, 0)
        right, bottom = min(column + radius, self._width), min(row + radius, self._height)
        if left >= right or top >= bottom:
            return
        sprite = _glow(radius, colour)
        part = sprite[top - row + radius : bottom - row + radius, left - column + radius : right - column + radius]
        pixels[top:bottom, left:right] = self._cv2.add(pixels[top:bottom, left:right], part)


def _sky(cv2: Any, town: Town, size: tuple[int, int], rng: np.random.Generator) -> Pixels:
    """Return a panorama around the horizon, ``MARGIN`` larger than the picture on every side."""
    width, height = size[0] + 2 * MARGIN, size[1] + 2 * MARGIN
    horizon = height // 2
    share = np.linspace(0, 1, horizon)[:, None] ** 1.4
    rows = np.array(town.sky_top) * (1 - share) + np.array(town.sky_low) * share
    above = np.repeat(rows[:, None, :], width, axis=1)
    colour, cover = town.clouds
    noise = sum(
        cv2.resize(rng.random((4 * 2**level, 5 * 2**level)), (width, horizon), interpolation=cv2.INTER_CUBIC) / 2**level
        for level in range(5)
    )
    threshold = np.quantile(noise, 1 - cover)
    cloud = np.clip((noise - threshold) * 2.2, 0, 0.9)[:, :, None] * (1 - 0.5 * share[:, :, None])
    above = above * (1 - cloud) + np.array(colour) * cloud
    if town.night:
        stars = rng.random((horizon, width, 1)) > 0.9992
        above = np.where(stars & (cloud < 0.1), 190, above)
    sky = np.zeros((height, width, 3), np.uint8)
    sky[:horizon] = np.clip(above, 0, 255)
    sky[horizon:] = town.ground
    bumps = np.sin(np.arange(width)[:, None] * rng.uniform(0.004, 0.03, 6) + rng.uniform(0, 6, 6)).sum(axis=1)
    crest = horizon - np.clip(height * (0.022 + 0.006 * bumps), 2, None)
    line = np.stack([np.arange(width), crest], axis=1)
    outline = np.concatenate([line, [(width, horizon), (0, horizon)]]).astype(np.int32)
    cv2.fillPoly(sky, [outline], town.hills)
    return sky


def _streaks(cv2: Any, size: tuple[int, int], rng: np.random.Generator) -> Pixels:
    """Return falling rain twice as high as a picture, to be added to it."""
    width, height = size[0], 2 * size[1]
    layer = np.zeros((height, width, 3), np.uint8)
    for _ in range(width * height // 1600):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        length, bright = int(rng.integers(6, 20)), int(rng.integers(14, 46))
        cv2.line(layer, (x, y), (x - length // 6, y + length), (bright, bright, bright), 1)
    return layer


@functools.lru_cache(maxsize=256)
def _glow(radius: int, colour: Colour) -> Pixels:
    steps = (np.arange(2 * radius) - radius + 0.5) / radius
    fall = np.clip(1 - np.hypot(*np.meshgrid(steps, steps)), 0, 1) ** 2.5
    return np.asarray(0.55 * fall[:, :, None] * np.array(colour), dtype=np.uint8)


def _places(driven: float, period: float) -> Iterator[float]:
    """Yield distances ahead of what comes up every ``period`` metres, the farthest first."""
    first = -(driven % period) - period
    for count in range(math.ceil((FAR_M - first) / period), -1, -1):
        yield first + count * period


def _strip(view: View, left: float, right: float) -> NDArray[np.int32]:
    """Return the outline of ground between two lines along the road, as far as can be seen."""
    points: Points = np.zeros((2 * len(_ROWS), 3))
    points[: len(_ROWS), 0], points[len(_ROWS) :, 0] = left, right
    points[: len(_ROWS), 2], points[len(_ROWS) :, 2] = _ROWS, _ROWS[::-1]
    return whole_pixels(view.project(points))


def _outlines(view: View, patches: Sequence[_Patch]) -> list[tuple[Colour, list[NDArray[np.int32]]]]:
    """Return the outlines of short patches by colour, colours in the order of their first patch."""
    nearest = float(_ROWS[0])
    ahead = [patch for patch in patches if patch[3] > nearest and patch[2] < FAR_M]
    if not ahead:
        return []
    points = np.array(
        [
            [(left, 0, max(near, nearest)), (right, 0, max(near, nearest)), (right, 0, far), (left, 0, far)]
            for left, right, near, far, _ in ahead
        ]
    )
    corners = whole_pixels(view.project(points.reshape(-1, 3))).reshape(-1, 4, 2)
    found: dict[Colour, list[NDArray[np.int32]]] = {}
    for patch, outline in zip(ahead, corners, strict=True):
        found.setdefault(patch[4], []).append(outline)
    return list(found.items())


def _shaded(colour: Colour, shade: float) -> Colour:
    red, green, blue = (min(255, int(value * shade)) for value in colour)
    return red, green, blue
