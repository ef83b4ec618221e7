"""The drawn stream as a film that browsers play: one WebM file per camera, written beside serving, never in its way."""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.operator.display.drawing import Legend, drawn
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

MAX_WAITING = 16
"""Pictures that wait to be written; further ones are left out of the film and counted."""

MAX_WAITING_BYTES = 64 << 20
"""What large ones may hold: three of 3840 x 2160; as much again holds those whose rate is measured."""

ROOM_BYTES = 8 << 20
"""A film ends where the disk has less: OpenCV tells nobody that a frame didn't fit."""

_FRAMES_TO_TIME = 8
"""The film's rate is measured over so many pictures, for cameras don't always keep what they promise."""


class Film:
    """One camera's film; not safe across threads.

    Args:
        path: the file.
        rate_hz: frames per second, clipped to 1 to 60.
        size: (width, height) of its frames; others are shrunk to fit, and padded.

    Raises:
        SettingsError: OpenCV can't write there.
    """

    def __init__(self, path: Path, rate_hz: float, size: tuple[int, int]) -> None:
        import cv2

        self.path = path
        self._size = size
        # Of what browsers play, OpenCV's own builds encode VP8 and VP9 alone; VP8 takes a third of the time.
        codec = cv2.VideoWriter.fourcc(*"VP80")
        self._writer: Any = cv2.VideoWriter(str(path), codec, min(60.0, max(1.0, rate_hz)), size)
        if not self._writer.isOpened():
            raise SettingsError(f"film {path} can't be written: no room or permission, or OpenCV has no encoder here")
        self.num_frames = 0

    def write(self, image: NDArray[np.uint8]) -> None:
        """Add a frame (H, W, 3).

        Raises:
            SettingsError: The disk has no room for it; what was written before plays.
        """
        if shutil.disk_usage(self.path.parent).free < ROOM_BYTES:
            raise SettingsError(f"film {self.path} ends after {self.num_frames} frames: the disk is nearly full")
        width, height = self._size
        if image.shape[:2] != (height, width):
            image = _fitted(image, width, height)
        self._writer.write(np.ascontiguousarray(image[:, :, ::-1]))
        self.num_frames += 1

    def close(self) -> None:
        self._writer.release()


class Recorder:
    """Watches predictions and writes them as ``PATH`` (one camera) or ``PATH-<camera>`` (several).

    Earlier films stay, as those of a client that was started again: the next is ``PATH-2``, and so on.

    Args:
        path: ends in ``.webm``.
        legend: camera name -> what its drawings need; asked for every picture.
        cameras: number of cameras.

    Raises:
        SettingsError: The path can't be a film.
    """

    def __init__(self, path: Path, legend: Callable[[str], Legend], *, num_cameras: int = 1) -> None:
        check_film(path)
        self._path = path
        self._legend = legend
        self._several = num_cameras > 1
        self._films: dict[str, Film] = {}
        self._first: dict[str, list[Shown]] = {}
        self._waiting: queue.SimpleQueue[Shown | None] = queue.SimpleQueue()
        self._left_out: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def watch(self, shown: Shown) -> None:
        """Put a picture in line; called on the serving thread."""
        waiting = self._waiting.qsize()
        if waiting >= MAX_WAITING or waiting * shown.picture.pixels.nbytes > MAX_WAITING_BYTES:
            self._left_out[shown.picture.camera] += 1
        else:
            self._waiting.put(shown)

    @property
    def num_left_out(self) -> int:
        return self._left_out.total()

    def close(self) -> None:
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(timeout=30)

    def _run(self) -> None:
        closing = False
        try:
            while (shown := self._waiting.get()) is not None:
                self._take(shown)
            closing = True
            for camera in sorted(self._first):
                self._begin(camera)
        except Exception as error:  # root of a thread: what comes is taken until somebody closes
            if isinstance(error, SettingsError):
                log.error("film stopped", path=self._path, reason=error)
            else:
                log.exception("film stopped", path=self._path)
            while not closing and (shown := self._waiting.get()) is not None:
                self._left_out[shown.picture.camera] += 1
        finally:
            for camera, film in sorted(self._films.items()):
                film.close()
                log.info(
                    "film written",
                    camera=camera,
                    path=film.path,
                    frames=film.num_frames,
                    left_out=self._left_out[camera],
                )

    def _take(self, shown: Shown) -> None:
        camera = shown.picture.camera
        if camera in self._films:
            self._films[camera].write(drawn(shown, self._legend(camera)))
            return
        first = self._first.setdefault(camera, [])
        first.append(shown)
        held = len(first) * shown.picture.pixels.nbytes
        if len(first) >= _FRAMES_TO_TIME or (len(first) > 1 and held > MAX_WAITING_BYTES):
            self._begin(camera)

    def _begin(self, camera: str) -> None:
        first = self._first.pop(camera)
        seconds = first[-1].picture.captured_at - first[0].picture.captured_at
        rate_hz = (len(first) - 1) / seconds if seconds > 0 else 10.0
        images = (drawn(shown, self._legend(camera)) for shown in first)  # one at a time: they are large
        begins = next(images)
        height, width = begins.shape[:2]
        path = self._path.with_stem(f"{self._path.stem}-{camera}") if self._several else self._path
        names = itertools.chain([path], (path.with_stem(f"{path.stem}-{count}") for count in itertools.count(2)))
        free = next(name for name in names if not name.exists())  # earlier films stay
        film = self._films[camera] = Film(free, rate_hz, (width, height))
        for image in itertools.chain([begins], images):
            film.write(image)


def _fitted(image: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return an image (H, W, 3) in the upper left of one of another size, shrunk where it is larger."""
    import cv2

    scale = min(1.0, width / image.shape[1], height / image.shape[0])
    size = max(1, int(image.shape[1] * scale)), max(1, int(image.shape[0] * scale))
    fitted = np.zeros((height, width, 3), np.uint8)
    fitted[: size[1], : size[0]] = cv2.resize(image, size, interpolation=cv2.INTER_AREA) if scale < 1 else image
    return fitted


def check_film(path: Path) -> None:
    """Raise SettingsError unless a film could be written there."""
    if path.suffix.lower() != ".webm":
        raise SettingsError(f"film {path} should end in .webm, which browsers play")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"film {path}: folder {path.absolute().parent} doesn't exist")
    if not os.access(path.absolute().parent, os.W_OK):
        raise SettingsError(f"film {path}: nothing may be written to folder {path.absolute().parent}")
