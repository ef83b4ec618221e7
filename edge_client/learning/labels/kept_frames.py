"""What the model was asked about recent frames, kept for a while so that an operator's word can still be put to it.

Inputs were made of bytes and are kept as bytes, a quarter of their size as floats; whole pictures are large.
Axes: B inputs of one picture, H height, W width, C channels.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused
from replayfleet.federation.errors import nearest
from replayfleet.federation.streams.labelled_images import normalise

MAX_FRAMES = 2048
MAX_KEPT_BYTES = 128 * 2**20
"""Frames that are kept at most, and their memory, whatever the time says."""


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """One of them.

    Attributes:
        camera: whose it is.
        pixels: (B, H, W, C) uint8, what the inputs were made of.
        size: (width, height) of the picture in pixels.
        place: where it was taken.
        at: seconds on the keeper's clock.
    """

    camera: str
    pixels: NDArray[np.uint8]
    size: tuple[int, int]
    place: str
    at: float

    def images(self) -> NDArray[np.float32]:
        """Return the inputs again, (B, C, H, W) float32 in [-1, 1]."""
        return normalise(self.pixels)


class KeptFrames:
    """Recent frames by camera and number; safe across threads.

    Args:
        keep_s: seconds that a frame is kept.
        clock: ``time.monotonic``.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._kept: collections.OrderedDict[tuple[str, int], KeptFrame] = collections.OrderedDict()
        self._kept_bytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, shown: Shown) -> None:
        picture, now = shown.picture, self._clock()
        levels = np.rint((shown.inputs.images + np.float32(1)) * np.float32(127.5))
        pixels = np.ascontiguousarray(levels.clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1))
        with self._changing:
            before = self._kept.pop((picture.camera, picture.frame_id), None)
            self._kept_bytes -= 0 if before is None else before.pixels.nbytes
            self._kept[picture.camera, picture.frame_id] = KeptFrame(
                picture.camera, pixels, picture.size, picture.place, now
            )
            self._kept_bytes += pixels.nbytes
            self._forget(now)

    def find(self, camera: str, frame_id: int) -> KeptFrame:
        """Return a frame; ``camera`` may be empty where all of them are of one.

        Raises:
            FeedbackRefused: It isn't kept, or not any more.
        """
        with self._changing:
            self._forget(self._clock())
            cameras = sorted({name for name, _ in self._kept})
            if not camera and len(cameras) > 1:
                raise FeedbackRefused(f"feedback on frame {frame_id} names no camera, expected {' or '.join(cameras)}")
            camera = camera or "".join(cameras)
            if cameras and camera not in cameras:
                raise FeedbackRefused(
                    f"feedback on frame {frame_id} names camera {camera!r}, of which no frame is kept"
                    f"{nearest(camera, cameras)}"
                )
            kept = self._kept.get((camera, frame_id))
        if kept is None:
            raise FeedbackRefused(
                f"feedback on frame {frame_id} of camera {camera!r}: not kept; frames are kept for "
                f"{self._keep_s:g} s (at most {MAX_FRAMES} of them, and {MAX_KEPT_BYTES // 2**20} MiB)"
            )
        return kept

    def _forget(self, now: float) -> None:
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            fits = len(self._kept) <= MAX_FRAMES and self._kept_bytes <= MAX_KEPT_BYTES
            if fits and now - oldest.at <= self._keep_s:
                return
            self._kept_bytes -= self._kept.pop(key).pixels.nbytes
