"""Stored pictures played like a film: one every ``1 / rate`` seconds, none left out, damaged ones named once.

What recorded driving and folders of pictures share. Axes: H height, W width.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.recorded.pace import Pace
from replayfleet.edge_client.flow import Boxes, CameraError, Picture
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.streams.files.picture_files import read_picture

log = EventLogger(__name__)


class Stills(Protocol):
    """Pictures in files, in a fixed order."""

    files: tuple[Path, ...]

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        """Return what is to be seen in picture ``index`` of (width, height) pixels; None where nobody wrote it down.

        Raises:
            SettingsError: It is written down, but damaged.
        """


class StillsPlayer:
    """Plays stills from a first one on; asked again, it goes on where it stopped.

    ``frame_id`` counts the stills that came up, damaged ones included, so that ``(start + frame_id) % len(files)`` is
    the still.

    Args:
        name: of the camera.
        stills: at least one.
        rate_hz: stills per second.
        loop: begin again after the last.
        start: index of the first still of the first pass.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        name: str,
        stills: Stills,
        *,
        rate_hz: float,
        loop: bool,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._stills = stills
        self._rate_hz = rate_hz
        self._loop = loop
        self._start = start
        self._clock = clock
        self._next_id = 0
        self._reported: set[Path] = set()

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set or, without ``loop``, after the last; a slow reader holds the film up.

        A picture that can't be read is left out, one whose boxes can't be read has none. One line is logged for each
        file.

        Raises:
            CameraError: As many pictures in a row as there are can't be read.
        """
        pace = Pace(self._rate_hz, self._clock)
        num_lost = 0
        while (self._loop or self._start + self._next_id < len(self._stills.files)) and pace.wait(stop):
            frame_id = self._next_id
            self._next_id += 1
            captured_at = self._clock()
            pixels = self._pixels(self._index(frame_id))
            if pixels is not None:
                num_lost = 0
                boxes = self._boxes(self._index(frame_id), (pixels.shape[1], pixels.shape[0]))
                yield Picture(self._name, frame_id, pixels, captured_at, boxes)
                continue
            num_lost += 1
            if num_lost == len(self._stills.files):
                raise CameraError(f"none of {num_lost} pictures in {self._stills.files[0].parent} can be read")

    def _index(self, frame_id: int) -> int:
        return (self._start + frame_id) % len(self._stills.files)

    def _pixels(self, index: int) -> NDArray[np.uint8] | None:
        try:
            return read_picture(self._stills.files[index])
        except SettingsError as error:
            self._report("picture skipped", self._stills.files[index], error)
            return None

    def _boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        try:
            return self._stills.boxes(index, size)
        except SettingsError as error:
            self._report("annotation skipped", self._stills.files[index], error)
            return None

    def _report(self, event: str, file: Path, error: SettingsError) -> None:
        if file not in self._reported:
            self._reported.add(file)
            log.warning(event, camera=self._name, reason=error)
