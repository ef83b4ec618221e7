"""Stored pictures played like a film: one every ``1 / rate`` seconds, none left out, damaged ones named once.

What recorded driving and folders of pictures share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replayfleet.edge_client.cameras.recorded.pace import Pace
from replayfleet.edge_client.flow import Boxes, CameraError, Picture
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.streams.files.picture_files import read_picture

log = EventLogger(__name__)


class StillsCamera:
    """Plays stills from a first one on; asked again, it goes on where it stopped.

    ``frame_id`` counts the stills that came up, damaged ones included, so that ``(start + frame_id) % len(files)`` is
    the still. Every one is delivered, and waits for a slow reader.

    Args:
        name: of the camera.
        files: at least one.
        rate_hz: stills per second.
        loop: begin again after the last.
        start: index of the first still of the first pass.
    """

    live = False

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        *,
        rate_hz: float,
        loop: bool,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.files = tuple(files)
        self._rate_hz = rate_hz
        self._loop = loop
        self._start = start
        self._clock = clock
        self._next_id = 0
        self._reported: set[Path] = set()

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        """Return what is to be seen in still ``index`` of (width, height) pixels; None where nobody wrote it down.

        Raises:
            SettingsError: It is written down, but damaged.
        """
        raise NotImplementedError

    def place(self, index: int) -> str:
        return ""

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set or, without ``loop``, after the last; a slow reader holds the film up.

        A picture that can't be read is left out, one whose boxes can't be read has none. One line is logged for each
        file.

        Raises:
            CameraError: As many pictures in a row as there are can't be read.
        """
        pace = Pace(self._rate_hz, self._clock)
        num_lost = 0
        while (self._loop or self._start + self._next_id < len(self.files)) and pace.wait(stop):
            frame_id, captured_at = self._next_id, self._clock()
            self._next_id += 1
            index = (self._start + frame_id) % len(self.files)
            try:
                pixels = read_picture(self.files[index])
            except SettingsError as error:
                self._report("picture skipped", self.files[index], error)
                num_lost += 1
                if num_lost == len(self.files):
                    raise CameraError(f"none of {num_lost} pictures in {self.files[0].parent} can be read") from error
                continue
            num_lost = 0
            try:
                boxes = self.boxes(index, (pixels.shape[1], pixels.shape[0]))
            except SettingsError as error:
                self._report("annotation skipped", self.files[index], error)
                boxes = None
            yield Picture(self.name, frame_id, pixels, captured_at, boxes, self.place(index))

    def _report(self, event: str, file: Path, error: SettingsError) -> None:
        if file not in self._reported:
            self._reported.add(file)
            log.warning(event, camera=self.name, reason=error)
