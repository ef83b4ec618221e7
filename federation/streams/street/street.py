"""``Street``: picture number n of a drive through a street that doesn't exist, with exact boxes. Needs OpenCV.

Axes: H height, W width, F faces, V corners.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.streams.annotations import Annotation
from replayfleet.federation.streams.files.picture_files import require_opencv
from replayfleet.federation.streams.street.looks import CLASS_NAMES, TOWNS, Colour, Town
from replayfleet.federation.streams.street.traffic import (
    BLOCK_M,
    CROSSING_M,
    CURBS_M,
    FAR_M,
    MOTORWAY_M,
    Thing,
    Traffic,
)

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]

MIN_SIDE, MAX_SIDE = 64, 1920
MIN_WIDTH, MIN_HEIGHT = 4, 8
"""Smallest box, in pixels."""

MIN_VISIBLE = 0.35
"""Share of an object's pixels that must not lie behind others."""

MIN_INSIDE, MIN_AREA = 0.35, 0.015
"""Of what reaches past the edge: the share of its box that must lie inside, or of the picture that it must cover."""

NEAR_M = 0.7
"""What is nearer than this isn't drawn."""

_EYE_M = 1.55
_BEAM_M = 26.0
"""Distance at which a third is left of what the headlights add."""
_MAX_BOXES = 200
_WHITE: Colour = (214, 214, 208)
_ROWS = np.geomspace(1.2, FAR_M, 15)


@dataclass(frozen=True, slots=True)
class View:
    """The camera at one moment: a pinhole at the picture's middle.

    Attributes:
        size: (width, height) of the picture.
        x: where it stands in its lane.
        bend: how far the road curves to the right, 1/m: a point at distance z moves by ``bend * z ** 2``.
    """

    size: tuple[int, int]
    x: float = 0.0
    bend: float = 0.0

    def project(self, points: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return columns and rows (..., 2) of points (..., 3); what lies behind ``NEAR_M`` is moved there."""
        x, y, z = np.moveaxis(points, -1, 0)
        z = np.maximum(z, NEAR_M)
        focal = self.size[0] / 2
        columns = focal + focal * ((x - self.x) / z + self.bend * z)
        rows = self.size[1] / 2 + focal * (_EYE_M - y) / z
        pixels = np.floor(np.stack([columns, rows], axis=-1))
        return np.asarray(np.clip(pixels, -30_000, 30_000), np.int32)  # OpenCV can't count beyond 32,767


class Street:
    """A drive through one town.

    A picture is a function of the arguments and of its moment, on one machine to the bit: pictures can be drawn in any
    order, and two streets with equal arguments are equal.

    Args:
        town: key of ``TOWNS``.
        seed: of houses, traffic, signs and weather; not negative.
        width: of the picture, ``MIN_SIDE`` to ``MAX_SIDE`` pixels.
        height: likewise.

    Raises:
        SettingsError: Unknown town (names the nearest), a size or seed out of range, or OpenCV isn't installed.
    """

    class_names = CLASS_NAMES

    def __init__(self, town: str = "sunny", *, seed: int = 0, width: int = 640, height: int = 380) -> None:
        if town not in TOWNS:
            raise SettingsError(f"synthetic street: unknown town {town!r}{nearest(town, TOWNS)}")
        for name, side in (("width", width), ("height", height)):
            if not MIN_SIDE <= side <= MAX_SIDE:
                raise SettingsError(f"synthetic street: {name} is {side}, expected {MIN_SIDE} to {MAX_SIDE} pixels")
        if seed < 0:
            raise SettingsError(f"synthetic street: seed is {seed}, expected 0 or more")
        self._cv2 = require_opencv()
        self._size = (width, height)
        self._town = TOWNS[town]
        self._traffic = Traffic(self._town, seed)
        rng = np.random.default_rng((seed, 94))
        self._backdrop = _backdrop(self._cv2, self._town, self._size, rng)
        # The ground has the light and the haze of its distance: 128 times what to multiply it with, and what to add.
        rows = np.arange(0.5, height - height // 2)
        clear, light = _air(self._town, width / 2 * _EYE_M / rows)
        self._keep = np.repeat(np.clip(128 * clear * light, 0, 255)[:, None], 4 * width, 1).astype(np.uint8)
        haze = ((1 - clear)[:, None] * (*self._town.haze[0], 0))[:, None]
        self._haze = np.repeat(haze, width, axis=1).astype(np.uint8)
        noise = rng.integers(0, 2 * self._town.noise + 1, (height + 64, width + 64, 1), dtype=np.uint8)
        self._noise = np.repeat(noise, 3, axis=2)
        self._streaks = np.zeros((2 * height, width, 3), np.uint8)
        for _ in range(width * height // 800 if self._town.rain else 0):
            x, y, length, bright = rng.integers((0, 0, 6, 14), (width, 2 * height, 20, 46)).tolist()
            self._cv2.line(self._streaks, (x, y), (x - length // 6, y + length), (bright, bright, bright))

    def draw(self, time_s: float) -> tuple[Pixels, Annotation]:
        """Return what the camera sees ``time_s`` seconds into the drive.

        Returns:
            The picture (H, W, 3) uint8, RGB, and the boxes of what can be seen in it: whole objects within the picture,
            without those that are tiny or mostly hidden.
        """
        cv2, town = self._cv2, self._town
        bend = 0.0007 * math.sin(0.13 * time_s) * (0.6 if town.motorway else 1.0)
        view = View(self._size, 0.22 * math.sin(0.31 * time_s), bend)
        canvas = self._backdrop.copy()
        for outline, colour in _ground(town, view, self._traffic.driven(time_s)):
            cv2.fillPoly(canvas, [outline], colour)
        below = canvas[self._size[1] // 2 :]
        cv2.multiply(below, self._keep.reshape(below.shape), dst=below, scale=1 / 128)
        cv2.add(below, self._haze, dst=below)
        annotation = paint(cv2, canvas, view, town, self._traffic.things(time_s))
        return self._finished(cv2.cvtColor(canvas, cv2.COLOR_RGBA2RGB), round(1000 * time_s)), annotation

    def _finished(self, pixels: Pixels, index: int) -> Pixels:
        """Add what lies over a picture: the lamps' glow, rain, the lens' softness and the sensor's noise."""
        cv2, town, (width, height) = self._cv2, self._town, self._size
        if town.night:
            small = cv2.resize(pixels, (width // 4, height // 4), interpolation=cv2.INTER_AREA)
            glow = cv2.GaussianBlur(cv2.subtract(small, (130, 130, 130, 0)), (0, 0), width / 160)
            cv2.add(pixels, cv2.resize(glow, (width, height)), dst=pixels)
        if town.rain:
            top = 37 * index % height
            cv2.add(pixels, self._streaks[top : top + height], dst=pixels)
        cv2.GaussianBlur(pixels, (3, 3), 0.6, dst=pixels)
        y, x = 29 * index % 64, 43 * index % 64
        cv2.add(pixels, self._noise[y : y + height, x : x + width], dst=pixels)
        cv2.subtract(pixels, (town.noise, town.noise, town.noise, 0), dst=pixels)
        return pixels


def paint(cv2: Any, canvas: Pixels, view: View, town: Town, things: Sequence[Thing]) -> Annotation:
    """Paint things in the order given, the farthest first, and return the boxes of those that can be seen.

    A box bounds the whole thing within the picture, also what lies behind others. The canvas has a fourth channel, in
    which everything leaves its mark beside its colour: an annotated thing its number, anything else 0.

    Args:
        cv2: the module.
        canvas: (H, W, 4) uint8, painted over; its fourth channel is 0.
        view: the camera.
        town: light and weather.
        things: to be painted.
    """
    if not things:
        return Annotation(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    counts = [len(thing.shape.colours) for thing in things]
    corners = np.concatenate([thing.shape.corners for thing in things])
    corners += np.repeat([(thing.x, thing.y, thing.z) for thing in things], counts, axis=0)[:, None]
    outlines = view.project(corners)  # (F, V, 2)
    (u, v), (next_u, next_v) = (
        np.moveaxis(points.astype(float), 2, 0) for points in (outlines, np.roll(outlines, -1, 1))
    )
    area = (u * next_v - next_u * v).sum(axis=1) / 2  # positive: its outside faces the camera
    area = np.where(np.concatenate([thing.shape.flat for thing in things]), abs(area), area)
    clear, light = _air(town, np.maximum(corners[:, :, 2].mean(axis=1), NEAR_M)[:, None])
    light = np.where(np.concatenate([thing.shape.shining for thing in things])[:, None], 1.0, light)
    colours = clear * light * np.concatenate([thing.shape.colours for thing in things]) + (1 - clear) * town.haze[0]
    seen = (area > 1) & (corners[:, :, 2].max(axis=1) > NEAR_M)
    seen &= ((outlines.max(axis=1) >= 0) & (outlines.min(axis=1) < view.size)).all(axis=1)
    rgb: list[list[int]] = np.minimum(colours, 255).astype(int).tolist()
    marked: list[tuple[int, Box, int]] = []
    first = 0
    for thing, count in zip(things, counts, strict=True):
        drawn = first + np.flatnonzero(seen[first : first + count])
        first += count
        mark = len(marked) + 1 if thing.class_id >= 0 and len(drawn) and len(marked) < _MAX_BOXES else 0
        for face in drawn.tolist():
            cv2.fillPoly(canvas, [outlines[face]], (*rgb[face], mark))
        if mark:
            marked.append((thing.class_id, *_extent(canvas[:, :, 3], mark, outlines[drawn])))
    boxes, class_ids = [], []
    for mark, (class_id, (left, top, right, bottom), num_pixels) in enumerate(marked, start=1):
        visible = np.count_nonzero(canvas[top:bottom, left:right, 3] == mark)
        if visible >= MIN_VISIBLE * num_pixels and right - left >= MIN_WIDTH and bottom - top >= MIN_HEIGHT:
            boxes.append((left, top, right, bottom))
            class_ids.append(class_id)
    return Annotation(np.array(boxes, np.float32).reshape(-1, 4), np.array(class_ids, np.int64))


def _extent(marks: Pixels, mark: int, outlines: NDArray[np.int32]) -> tuple[Box, int]:
    """Return the box of what has just been painted, empty of a sliver at the edge, and the number of its pixels."""
    low, high = outlines.min(axis=(0, 1)), outlines.max(axis=(0, 1)) + 1
    left, top = np.maximum(low, 0).tolist()
    covered = marks[top : high[1], left : high[0]] == mark
    rows, columns = np.flatnonzero(covered.any(axis=1)), np.flatnonzero(covered.any(axis=0))
    if not len(rows):
        return (0, 0, 0, 0), 0
    box = left + int(columns[0]), top + int(rows[0]), left + int(columns[-1]) + 1, top + int(rows[-1]) + 1
    whole = float(np.prod(high - low, dtype=float))
    if (box[2] - box[0]) * (box[3] - box[1]) < min(MIN_INSIDE * whole, MIN_AREA * marks.size):
        return (0, 0, 0, 0), 0
    return box, int(np.count_nonzero(covered))


def _air(town: Town, distance: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what share of its own colour a thing keeps at a distance, and how bright it is there."""
    return np.exp(-distance / town.haze[1]), town.ambient + town.beam * np.exp(-distance / _BEAM_M)


def _ground(town: Town, view: View, driven: float) -> Iterator[tuple[NDArray[np.int32], Colour]]:
    """Yield outlines and colours of what lies on the ground, what lies below first."""

    def patch(left: float, right: float, near: float, length: float) -> NDArray[np.int32]:
        rows = _ROWS if math.isinf(length) else np.array((near, near + length))
        return view.project(np.array([(left, 0.0, z) for z in rows] + [(right, 0.0, z) for z in rows[::-1]]))

    def places(period: float) -> list[float]:
        return np.arange(-(driven % period), FAR_M, period)[::-1].tolist()  # type: ignore[no-any-return]

    left, right = MOTORWAY_M if town.motorway else CURBS_M
    if town.motorway:
        yield patch(left, -8.6, 0, math.inf), town.road
        yield patch(-5.6, right, 0, math.inf), town.road
        yield from ((patch(x - 0.09, x + 0.09, 0, math.inf), _WHITE) for x in (-16.6, -9.0, -5.2, 5.4))
        yield from ((patch(x, x + 0.16, z, 3.6), _WHITE) for x in (-12.9, -1.9, 1.7) for z in places(9.0))
        return
    red, green, blue = town.ground
    yield patch(left - 0.16, right + 0.16, 0, math.inf), (3 * red // 4, 3 * green // 4, 3 * blue // 4)
    yield patch(left, right, 0, math.inf), town.road
    yield from ((patch(-1.83, -1.67, z, 3.6), _WHITE) for z in places(9.0))
    for begin in places(BLOCK_M):  # a crossing with its zebras, and the line to stop at
        yield patch(-60, 60, begin, CROSSING_M), town.road
        zebras = (
            (left + 0.5 + stripe, near) for near in (begin + CROSSING_M - 2.8, begin + 0.4) for stripe in range(12)
        )
        yield from ((patch(x, x + 0.5, near, 2.4), _WHITE) for x, near in zebras)
        yield patch(-1.65, right - 0.1, begin - 1.6, 0.4), _WHITE


def _backdrop(cv2: Any, town: Town, size: tuple[int, int], rng: np.random.Generator) -> Pixels:
    """Return sky, hills and bare ground (H, W, 4)."""
    width, height = size
    horizon = height // 2
    share = np.linspace(0, 1, horizon)[:, None, None] ** 1.4
    sky = np.array(town.sky[0]) * (1 - share) + np.array(town.sky[1]) * share
    noise = sum(
        cv2.resize(rng.random((4 * 2**level, 5 * 2**level)), (width, horizon), interpolation=cv2.INTER_CUBIC) / 2**level
        for level in range(4)
    )
    colour, cover = town.clouds
    cloud = np.clip((noise / noise.max() + cover - 0.85) * 3, 0, 1)[:, :, None] * (1 - 0.7 * share)
    canvas = np.zeros((height, width, 4), np.uint8)
    canvas[:horizon, :, :3] = sky * (1 - cloud) + np.array(colour) * cloud
    canvas[horizon:, :, :3] = town.ground
    x = np.linspace(0, 9, 60)
    hills = horizon - height * (0.018 + 0.012 * np.sin(x + rng.uniform(0, 6)) + 0.006 * np.sin(3.1 * x))
    outline = np.stack([np.linspace(0, width, 60), hills], axis=1)
    hill = np.array(town.haze[0]) * 0.8 + np.array((40, 60, 30)) * 0.2 * town.ambient
    cv2.fillPoly(
        canvas, [np.concatenate([outline, [(width, horizon), (0, horizon)]]).astype(np.int32)], (*hill.tolist(), 0)
    )
    return canvas
