"""``synthetic://street?town=night&rate=10``: a drive through a procedural street, for machines that have no camera.

Needs OpenCV, imported on first use.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from replayfleet.edge_client.cameras.recorded.pace import ticks
from replayfleet.edge_client.flow import Boxes, Picture, Rate
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import check_settings
from replayfleet.federation.streams.street.street import Street

DEFAULT_TOWN = "sunny"


@dataclass(frozen=True, slots=True)
class SyntheticSettings:
    """Which street, and how fast.

    Attributes:
        rate: pictures per second.
        seed: of houses, traffic, signs and weather; equal seeds give equal pictures.
        width: of the picture in pixels.
        height: likewise.
        town: ``sunny``, which is the default, ``night``, ``rain`` or ``highway``.
        towns: several, joined by commas, that follow one another round and round.
        stay: seconds in each of several towns.
    """

    rate: Rate = 10.0
    seed: int = 0
    width: int = 640
    height: int = 380
    town: str = ""
    towns: str = ""
    stay: float = 60.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.town and self.towns:
            raise SettingsError("source: both town and towns are given; expected one of them")
        if not all(self.order):
            raise SettingsError(f"source: towns is {self.towns!r}, expected names joined by commas: sunny,night")
        if not (math.isfinite(self.stay) and self.stay * self.rate >= 1):
            raise SettingsError(f"source: stay is {self.stay} s, expected one picture or more in every town")

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(town.strip() for town in (self.towns or self.town or DEFAULT_TOWN).split(","))


class SyntheticCamera:
    """Shows the street as a live camera would: it doesn't wait for a slow reader.

    Picture n is a function of the settings and of n, so that equal settings show the same drive.

    Raises:
        SettingsError: An unknown town, a size or seed out of range, or OpenCV isn't installed.
    """

    live = True
    class_names = Street.class_names

    def __init__(self, settings: SyntheticSettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._settings = settings
        self._clock = clock
        self._next_id = 0
        self._street = functools.lru_cache(maxsize=1)(self._built)
        for town in set(settings.order):
            self._built(town)

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        for frame_id, captured_at in ticks(self._settings.rate, stop, self._clock, self._next_id):
            town = self.town_of(frame_id)
            pixels, seen = self._street(town).draw(frame_id / self._settings.rate)
            self._next_id = frame_id + 1
            yield Picture(self.name, frame_id, pixels, captured_at, Boxes(seen.corners, seen.class_ids), town)

    def town_of(self, frame_id: int) -> str:
        """Return the town in which a picture of this camera was taken."""
        order = self._settings.order
        return order[int(frame_id / self._settings.rate / self._settings.stay) % len(order)]

    def describe(self) -> str:
        own = self._settings
        towns = ", ".join(own.order) + (f" for {own.stay:g} s each" if len(own.order) > 1 else "")
        return f"synthetic street, {towns}, {own.width}x{own.height} at {own.rate:g}/s, seed {own.seed}"

    def _built(self, town: str) -> Street:
        own = self._settings
        return Street(town, seed=own.seed, width=own.width, height=own.height)
