"""``video:///path/film.mp4?rate=10``: a film, every frame of it, with boxes where a file beside it has some.

Needs OpenCV, imported on first use. The film is read in this process: it is a file, so no read can hang for ever.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.live.opencv import UNCONVERTED, Complaints, because
from replayfleet.edge_client.cameras.recorded.pace import Pace
from replayfleet.edge_client.cameras.recorded.sidecars import (
    NAMES_FILES,
    Sidecar,
    coco_sidecar,
    frame_number,
    label_files,
    yolo_sidecar,
)
from replayfleet.edge_client.flow import MAX_FRAME_RATE_HZ, Boxes, CameraError, Picture
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import expanded
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.settings import check_settings
from replayfleet.federation.service.words import count_of
from replayfleet.federation.streams.files.picture_files import SUFFIXES, require_opencv

log = EventLogger(__name__)

_MAX_LOST_IN_A_ROW = 500
"""Frames that are tried after one that can't be decoded, before the film counts as broken off."""
_MAX_OVERHEARD = 65_536


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Which film, how fast, and where its boxes are.

    Attributes:
        path: the film.
        rate: frames per second; 0 is the film's own.
        loop: begin again at its end; otherwise the camera ends.
        annotations: a folder of YOLO label files whose names end in frame numbers, or a COCO file whose pictures'
            ``file_name`` do; empty for none.
        names: file with the class names; empty looks for ``labels.txt`` or ``classes.txt`` with the label files and
            above them. A COCO file brings its own.
        first: number that the annotations give to the film's first frame.
    """

    path: Path
    rate: Annotated[float, Meta(ge=0, le=MAX_FRAME_RATE_HZ)] = 0.0
    loop: bool = False
    annotations: str = ""
    names: str = ""
    first: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.annotations and (self.names or self.first):
            raise SettingsError("source: names and first belong to annotations, which aren't given")


class VideoCamera:
    """A film; every frame is delivered, and waits for a slow reader. A frame without an entry has no annotation.

    Raises:
        SettingsError: The film can't be decoded or doesn't say its rate, or its annotations can't be used.
    """

    live = False

    def __init__(self, settings: VideoSettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._settings = settings
        self._clock = clock
        self._rate_hz, self._num_expected = _probe(settings)
        self._sidecar = _sidecar(settings)
        self.class_names = self._sidecar.class_names if self._sidecar else ()
        self._next_id = 0
        self._position = 0
        self._ended = False
        self._reported: set[tuple[str, str]] = set()

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield the film until ``stop`` is set or it ends; iterating anew goes on where it stopped.

        Frames that can't be decoded are left out, one whose boxes can't be read has none, a film that breaks off ends
        there; one line is logged for each. ``frame_id`` counts the frames that can't be decoded too.

        Raises:
            CameraError: The film can't be opened any more.
        """
        pace = Pace(self._rate_hz, self._clock)
        while not (self._ended or stop.is_set()):
            yield from self._one_pass(pace, stop)

    def describe(self) -> str:
        boxes = f"boxes of {count_of(len(self.class_names), 'class')}" if self._sidecar else "no boxes"
        return f"film {self._settings.path}, {self._rate_hz:g} frames/s, {boxes}"

    def _one_pass(self, pace: Pace, stop: threading.Event) -> Iterator[Picture]:
        cv2 = require_opencv()
        capture = cv2.VideoCapture(str(self._settings.path))
        try:
            if not capture.isOpened():
                raise CameraError(f"film {self._settings.path} can't be opened any more")
            for _ in range(self._position):
                capture.grab()
            while pace.wait(stop):
                captured_at = self._clock()
                pixels = self._next_frame(cv2, capture)
                if pixels is None:
                    return
                boxes = self._boxes(self._position, (pixels.shape[1], pixels.shape[0]))
                picture = Picture(self.name, self._next_id, pixels, captured_at, boxes)
                self._position, self._next_id = self._position + 1, self._next_id + 1
                yield picture
        finally:
            capture.release()

    def _next_frame(self, cv2: Any, capture: Any) -> NDArray[np.uint8] | None:
        """Return the next frame that can be decoded, RGB, and count those before it; None at the film's end."""
        for num_lost in range(_MAX_LOST_IN_A_ROW):
            decoded, pixels = capture.read()
            if decoded:
                if num_lost:
                    self._report("film frames skipped", f"{num_lost} from frame {self._position} on can't be decoded")
                self._position, self._next_id = self._position + num_lost, self._next_id + num_lost
                return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)
            if self._position + num_lost + 1 >= self._num_expected:
                break
        if self._position < self._num_expected:
            self._report("film breaks off", f"{self._position} of {self._num_expected} frames can be read")
        self._ended = not self._settings.loop or self._position == 0
        self._position = 0
        return None

    def _boxes(self, position: int, size: tuple[int, int]) -> Boxes | None:
        if self._sidecar is None:
            return None
        try:
            return self._sidecar.boxes(position + self._settings.first, size)
        except SettingsError as error:
            self._report("annotation skipped", error)
            return None

    def _report(self, event: str, reason: object) -> None:
        """Log once what would come up again in every pass."""
        if (event, str(reason)) not in self._reported:
            self._reported.add((event, str(reason)))
            log.warning(event, camera=self.name, file=self._settings.path, reason=reason)


@contextlib.contextmanager
def overheard() -> Iterator[Complaints]:
    """Take over standard error meanwhile, and yield what tells afterwards what was written there, and still is."""
    said: list[str] = []
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        kept = os.open(os.devnull, os.O_WRONLY)
    reading = os.memfd_create("overheard")
    os.dup2(reading, 2)
    try:
        yield lambda: "".join(said)
    finally:
        os.dup2(kept, 2)
        heard = os.pread(reading, _MAX_OVERHEARD, 0)
        said.append(heard.decode(errors="replace"))
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(kept, heard)  # other threads log there, too
        os.close(kept)
        os.close(reading)


def _probe(settings: VideoSettings) -> tuple[float, int]:
    """Return the rate to play at and how many frames the film claims to have, 0 if it doesn't say."""
    path = settings.path
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is no file" if path.exists() else "doesn't exist"
        raise SettingsError(f"film {str(path)!r} {problem}; expected video:///path/film.mp4")
    if not os.access(path, os.R_OK):
        raise SettingsError(f"film {str(path)!r} can't be read: permission denied")
    cv2 = require_opencv()
    with overheard() as complaints:
        capture = cv2.VideoCapture(str(path))
        decoded = capture.isOpened() and capture.read()[0]
    try:
        if not decoded or UNCONVERTED.search(complaints()):
            why = f"{because(complaints())}: damaged, or of a kind that this OpenCV doesn't read"
            raise SettingsError(f"film {path} can't be decoded{why}")
        own_rate_hz, num_frames = (float(capture.get(p)) for p in (cv2.CAP_PROP_FPS, cv2.CAP_PROP_FRAME_COUNT))
    finally:
        capture.release()
    if settings.rate == 0 and not (math.isfinite(own_rate_hz) and 0 < own_rate_hz <= MAX_FRAME_RATE_HZ):
        raise SettingsError(f"film {path} says {own_rate_hz:g} frames/s; expected a rate, give rate=10 for example")
    return settings.rate or own_rate_hz, int(num_frames) if math.isfinite(num_frames) and num_frames > 0 else 0


def _sidecar(settings: VideoSettings) -> Sidecar[int] | None:
    if not settings.annotations:
        return None
    place = expanded(settings.annotations)
    names = expanded(settings.names) if settings.names else None
    if not place.is_dir():
        return coco_sidecar(place, names, lambda file_name: _entry_number(place, file_name))
    files: dict[int, Path] = {}
    for stem, file in label_files(place).items():
        number = frame_number(stem)
        if number is None:
            raise SettingsError(
                f"label file {file} has no frame number at the end of its name; expected frame_000012.txt"
            )
        if number in files:
            raise SettingsError(f"label files {files[number].name} and {file.name} in {place} are of one frame")
        files[number] = file
    if not files:
        raise SettingsError(f"{place} holds no label files; expected frame_000012.txt and {' or '.join(NAMES_FILES)}")
    return yolo_sidecar(files, names, (place, place.parent))


def _entry_number(path: Path, file_name: str) -> int:
    stem, dot, suffix = file_name.rpartition(".")
    number = frame_number(stem if dot and f".{suffix.lower()}" in SUFFIXES else file_name)
    if number is None or (dot and f".{suffix.lower()}" not in SUFFIXES):
        raise SettingsError(
            f"{path}: picture {file_name!r} has no frame number; expected for example 'frame_000012.png'"
        )
    return number
