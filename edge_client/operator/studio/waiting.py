"""Which frames wait for a label: unlabelled ones, the least certain first, for a while and never on a disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np

from replayfleet.edge_client.flow import Shown

MAX_FRAMES = 240
MAX_BYTES = 64 * 2**20
"""Of all pictures that wait; of those that don't fit, the most certain go."""
APART_S = 0.5
"""Between two frozen frames of a camera: neighbours look alike."""
NOTHING_FOUND = 0.5
"""How sure a detector counts that found nothing: behind what it hardly believes, before what it believes."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One frozen frame, and the object in it that the model is least sure of.

    Attributes:
        shown: the picture and what the model said.
        index: of the object among what the picture asks.
        confidence: of its answer, 0 to 1; 0 while no model is served, ``NOTHING_FOUND`` of a detector without answers.
        at: seconds on the caller's clock.
    """

    shown: Shown
    index: int
    confidence: float
    at: float

    @property
    def key(self) -> Key:
        """Camera and number of the frame."""
        return self.shown.picture.camera, self.shown.picture.frame_id

    @property
    def size_bytes(self) -> int:
        """Memory of its picture and inputs."""
        return self.shown.picture.pixels.nbytes + self.shown.inputs.images.nbytes


class WaitingFrames:
    """Bounded in time, number and bytes; safe across threads.

    Args:
        keep_s: seconds that a frame waits, no longer than it can be labelled.
    """

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self._frames: dict[Key, Waiting] = {}
        self._num_bytes = 0
        self._frozen_at: dict[str, float] = {}
        self._changing = threading.Lock()

    def offer(self, shown: Shown, now: float) -> None:
        """Freeze a frame, unless it asks nothing, brings its annotation, or its camera gave one just before."""
        if not len(shown.inputs.images) or shown.picture.boxes is not None:
            return
        confidences = np.zeros(1) if shown.prediction is None else shown.prediction.answers.confidences
        if not len(confidences):
            confidences = np.array([NOTHING_FOUND])  # of a detector; whoever classifies answers all that is asked
        camera = shown.picture.camera
        with self._changing:
            if now - self._frozen_at.get(camera, float("-inf")) < APART_S:
                return
            self._frozen_at[camera] = now
            index = int(confidences.argmin())
            self._add(Waiting(shown, index, float(confidences[index]), now))
            self._forget(now)

    def unsure_first(self, now: float) -> list[Waiting]:
        """Return all that wait, the least certain first."""
        with self._changing:
            self._forget(now)
            return sorted(self._frames.values(), key=lambda one: (one.confidence, one.at))

    def find(self, key: Key, now: float) -> Waiting | None:
        """Return a frame; None if it doesn't wait, or not any more."""
        with self._changing:
            self._forget(now)
            return self._frames.get(key)

    def remove(self, key: Key) -> None:
        """It is labelled, or nobody wants to label it. Idempotent."""
        with self._changing:
            self._drop(key)

    def put_back(self, frame: Waiting, now: float) -> None:
        """Its label was taken back; it waits again, before all others, for what is left of its time."""
        with self._changing:
            self._add(replace(frame, confidence=-1.0))
            self._forget(now)

    def _add(self, frame: Waiting) -> None:
        self._drop(frame.key)
        self._frames[frame.key] = frame
        self._num_bytes += frame.size_bytes

    def _drop(self, key: Key) -> None:
        frame = self._frames.pop(key, None)
        self._num_bytes -= 0 if frame is None else frame.size_bytes

    def _forget(self, now: float) -> None:
        for key in [key for key, frame in self._frames.items() if now - frame.at > self.keep_s]:
            self._drop(key)
        while len(self._frames) > MAX_FRAMES or self._num_bytes > MAX_BYTES:
            self._drop(max(self._frames.values(), key=lambda one: one.confidence).key)
