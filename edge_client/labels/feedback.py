"""Labels from an operator: "frame 812 of the front camera shows a cat", within the time the frame is kept."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge_client.predictions import Shown
from edge_client.sources.base import Samples
from federation.errors import ReplayfleetError, nearest

MAX_FRAMES = 2048
MAX_KEPT_BYTES = 128 * 2**20
"""Frames that are kept at most, and their memory, whatever the time says."""


class FeedbackRefused(ReplayfleetError):
    """A label that can't be used; says why."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an operator says.

    Attributes:
        camera: whose frame; empty where the client has one camera.
        frame_id: of the frame.
        class_name: what it shows.
        object_index: which object of the frame, in the order of its answers; None: the whole picture.
    """

    camera: str
    frame_id: int
    class_name: str
    object_index: int | None = None


@runtime_checkable
class TakesFeedback(Protocol):
    """A source whose frames an operator can label."""

    def feedback(self, feedback: Feedback) -> None:
        """Learn from it; raises FeedbackRefused."""


@dataclass(frozen=True, slots=True)
class _Kept:
    images: NDArray[np.float32]
    place: str
    at: float


class FeedbackDesk:
    """Keeps what the model was asked about recent frames, so that a label can still be put to it; safe across threads.

    Args:
        class_names: of the task.
        keep_s: seconds that a frame is kept.
        clock: ``time.monotonic``.
    """

    def __init__(
        self, class_names: tuple[str, ...], keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._class_ids = {name: index for index, name in enumerate(class_names)}
        self._keep_s = keep_s
        self._clock = clock
        self._kept: collections.OrderedDict[tuple[str, int], _Kept] = collections.OrderedDict()
        self._kept_bytes = 0
        self._changing = threading.Lock()

    def keep(self, shown: Shown) -> None:
        """Keep a frame's inputs for a while."""
        picture, now = shown.picture, self._clock()
        with self._changing:
            before = self._kept.pop((picture.camera, picture.frame_id), None)
            self._kept_bytes -= 0 if before is None else before.images.nbytes
            self._kept[picture.camera, picture.frame_id] = _Kept(shown.inputs.images, picture.place, now)
            self._kept_bytes += shown.inputs.images.nbytes
            self._forget(now)

    def samples(self, feedback: Feedback) -> tuple[Samples, str]:
        """Return what the label makes of the frame, and the frame's place. A frame may be labelled once per object.

        Raises:
            FeedbackRefused: The class, the frame or the object is unknown, or the frame isn't kept any more.
        """
        if feedback.class_name not in self._class_ids:
            raise FeedbackRefused(
                f"feedback names unknown class {feedback.class_name!r}{nearest(feedback.class_name, self._class_ids)}"
            )
        with self._changing:
            self._forget(self._clock())
            kept = self._kept.get(self._key(feedback))
        if kept is None:
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id} of camera {feedback.camera!r}: not kept; frames are kept for "
                f"{self._keep_s:g} s (at most {MAX_FRAMES} of them)"
            )
        index = 0 if feedback.object_index is None else feedback.object_index
        if feedback.object_index is None and len(kept.images) != 1:
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id}: it has {len(kept.images)} objects; say which one (object)"
            )
        if not 0 <= index < len(kept.images):
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id}: no object {index}, it has {len(kept.images)}"
            )
        label = np.array([self._class_ids[feedback.class_name]], np.int64)
        return Samples(kept.images[index : index + 1], label), kept.place

    def _key(self, feedback: Feedback) -> tuple[str, int]:
        if feedback.camera:
            return feedback.camera, feedback.frame_id
        cameras = {camera for camera, _ in self._kept}
        return (cameras.pop() if len(cameras) == 1 else "", feedback.frame_id)

    def _forget(self, now: float) -> None:
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            fits = len(self._kept) <= MAX_FRAMES and self._kept_bytes <= MAX_KEPT_BYTES
            if fits and now - oldest.at <= self._keep_s:
                return
            self._kept_bytes -= self._kept.pop(key).images.nbytes
