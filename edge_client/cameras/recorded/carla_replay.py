"""``carla-replay://DIR?town=Town01&rate=10``: recorded driving, town after town, with its boxes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from replayfleet.edge_client.cameras.recorded.stills import StillsPlayer
from replayfleet.edge_client.flow import Boxes, Picture, Rate
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
        """The towns asked for; empty for all."""
        if self.town:
            return (self.town,)
        return tuple(town.strip() for town in self.towns.split(",")) if self.towns else ()


class CarlaReplayCamera:
    """A drive that somebody recorded; every frame is delivered, and waits for a slow reader.

    Args:
        settings: the drive.
        name: of the camera within its client.
        clock: ``time.monotonic``.

    Raises:
        SettingsError: The recording lacks something, or has no such town or fewer frames than ``start``.
    """

    live = False

    def __init__(self, settings: CarlaReplaySettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._settings = settings
        self._driving = Driving(settings.path)
        self.class_names = self._driving.class_names
        self._frames = self._driving.frames(settings.order)
        self.files = tuple(frame.image for frame in self._frames)
        if settings.start >= len(self._frames):
            raise SettingsError(
                f"source: start is {settings.start}, expected less than the {len(self._frames)} frames of this drive"
            )
        self._player = StillsPlayer(
            name, self, rate_hz=settings.rate, loop=settings.loop, start=settings.start, clock=clock
        )

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield the drive until ``stop`` is set or it ends; iterating anew goes on where it stopped."""
        for picture in self._player.pictures(stop):
            yield dataclasses.replace(picture, place=self.town_of(picture.frame_id))

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        """Return the boxes of the drive's frame ``index``; raises SettingsError if its label file is damaged."""
        annotation = self._driving.annotation(self._frames[index], size)
        return Boxes(annotation.corners, annotation.class_ids)

    def town_of(self, frame_id: int) -> str:
        """Return the town in which a picture of this camera was taken."""
        return self._frames[(self._settings.start + frame_id) % len(self._frames)].town

    def describe(self) -> str:
        """One line for logs."""
        towns = ", ".join(self._settings.order or self._driving.towns)
        return (
            f"recorded driving {self._settings.path}, {towns}, {len(self._frames)} frames at {self._settings.rate:g}/s"
        )
