"""``carla-replay://DIR?town=Town01&rate=10``: recorded driving, town after town, with its boxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from replayfleet.edge_client.cameras.recorded.stills import StillsCamera
from replayfleet.edge_client.flow import Boxes, Rate
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import check_settings
from replayfleet.federation.streams.driving.recording import Driving


@dataclass(frozen=True, slots=True)
class CarlaReplaySettings:
    """What to drive through, and how fast.

    Attributes:
        path: folder with ``images/``, ``labels/`` and ``labels.txt`` (``federation.streams.driving.recording``).
        town: one town; all towns by name where neither ``town`` nor ``towns`` is given.
        towns: several in the order of the drive, joined by commas.
        rate: frames per second.
        loop: begin again after the last town; otherwise the camera ends.
        start: frames to leave out at the beginning of the first pass.
    """

    path: Path
    town: str = ""
    towns: str = ""
    rate: Rate = 10.0
    loop: bool = False
    start: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.town and self.towns:
            raise SettingsError("source: both town and towns are given; expected one of them")
        if self.towns and not all(self.order):
            raise SettingsError(f"source: towns is {self.towns!r}, expected names joined by commas: Town01,Town03")

    @property
    def order(self) -> tuple[str, ...]:
        if self.town:
            return (self.town,)
        return tuple(town.strip() for town in self.towns.split(",")) if self.towns else ()


class CarlaReplayCamera(StillsCamera):
    """A drive that somebody recorded.

    Raises:
        SettingsError: The recording lacks something, or has no such town or fewer frames than ``start``.
    """

    def __init__(self, settings: CarlaReplaySettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._driving = Driving(settings.path)
        self.class_names = self._driving.class_names
        self._frames = self._driving.frames(settings.order)
        if settings.start >= len(self._frames):
            raise SettingsError(
                f"source: start is {settings.start}, expected less than the {len(self._frames)} frames of this drive"
            )
        files = [frame.image for frame in self._frames]
        super().__init__(name, files, rate_hz=settings.rate, loop=settings.loop, start=settings.start, clock=clock)

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        annotation = self._driving.annotation(self._frames[index], size)
        return Boxes(annotation.corners, annotation.class_ids)

    def place(self, index: int) -> str:
        return self._frames[index].town

    def describe(self) -> str:
        towns = ", ".join(self._settings.order or self._driving.towns)
        return (
            f"recorded driving {self._settings.path}, {towns}, {len(self._frames)} frames at {self._settings.rate:g}/s"
        )
