"""Frames to predictions, the whole time: while the client trains, and while a model is swapped.

A capture thread keeps only the newest frame, a serving thread answers it; nothing queues, and what was skipped is
counted. Axes: C channels, H height, W width, K classes.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.model_slot import ModelSlot
from edge_client.sources.base import Frame, Source
from federation.service.logs import EventLogger

log = EventLogger(__name__)

FAILURES_BEFORE_ROLLBACK = 3
"""Frames in a row that a model may fail on before the previous one takes over."""

_LATENCIES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Prediction:
    """One frame's answer.

    Attributes:
        frame_id: of the frame.
        class_id: index into the task's class names.
        confidence: softmax of the winning logit.
        model_version: the one version that answered.
        captured_at: ``time.monotonic`` seconds of the frame.
        answered_at: ``time.monotonic`` seconds of the answer.
    """

    frame_id: int
    class_id: int
    confidence: float
    model_version: int
    captured_at: float
    answered_at: float

    @property
    def latency_s(self) -> float:
        """From capture to answer."""
        return self.answered_at - self.captured_at


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """What became of all frames since the start; ``latency_p95_s`` is of the newest thousand answers."""

    num_frames: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    latency_p95_s: float = 0.0


class Answerer:
    """Answers single frames through a slot, counts, and rolls a failing model back."""

    def __init__(self, slot: ModelSlot, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot = slot
        self._clock = clock
        self._latencies: collections.deque[float] = collections.deque(maxlen=_LATENCIES_KEPT)
        self._answered = self._failed = self._in_a_row = 0
        self._newest_id = -1

    def answer(self, frame: Frame) -> Prediction | None:
        """Return the prediction; None while no model is served, or if the model failed on this frame."""
        self._newest_id = max(self._newest_id, frame.frame_id)
        served = self._slot.active
        if served is None:
            return None
        try:
            logits = served.model(frame.image[None])[0].astype(np.float64)
            if not np.isfinite(logits).all():
                raise ValueError("logits are not finite")
        except Exception as error:  # runtimes share no exception class
            self._fail(served.version, error)
            return None
        self._in_a_row = 0
        self._answered += 1
        class_id, confidence = _winner(logits)
        answered_at = self._clock()
        self._latencies.append(answered_at - frame.captured_at)
        return Prediction(frame.frame_id, class_id, confidence, served.version, frame.captured_at, answered_at)

    @property
    def counts(self) -> FrameCounts:
        """The counts so far; safe to read from another thread."""
        latencies = sorted(self._latencies)
        p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))] if latencies else 0.0
        num_dropped = max(0, self._newest_id + 1 - self._answered - self._failed)
        return FrameCounts(self._answered, num_dropped, self._failed, p95)

    def _fail(self, version: int, error: Exception) -> None:
        self._failed += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            log.warning("frame failed", version=version, error=error)
        if self._in_a_row < FAILURES_BEFORE_ROLLBACK:
            return
        now_serving = self._slot.roll_back(version)
        if now_serving is not None:
            self._in_a_row = 0
            log.error("model rolled back", failed_version=version, version=now_serving.version)


class InferenceLoop:
    """The two threads around an ``Answerer``.

    Args:
        source: whose frames are served.
        answerer: what answers them.
        on_prediction: called on the serving thread with every prediction; must be quick.
    """

    def __init__(
        self, source: Source, answerer: Answerer, on_prediction: Callable[[Prediction], None] = lambda _: None
    ) -> None:
        self._source = source
        self._answerer = answerer
        self._on_prediction = on_prediction
        self._stop = threading.Event()
        self._newest: Frame | None = None
        self._arrived = threading.Condition()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("capture", self._capture), ("inference", self._serve))
        ]
        self.error = ""
        """Why the loop died, for the health endpoint; empty while it lives."""

    def start(self) -> None:
        """Begin to serve; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads. Idempotent."""
        self._stop.set()
        with self._arrived:
            self._arrived.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5)

    @property
    def counts(self) -> FrameCounts:
        """What became of all frames."""
        return self._answerer.counts

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # root of a thread
            self.error = f"{type(error).__name__}: {error}"
            log.exception("serving stopped")

    def _capture(self) -> None:
        for frame in self._source.frames(self._stop):
            with self._arrived:
                self._newest = frame  # the newest wins
                self._arrived.notify()

    def _serve(self) -> None:
        while not self._stop.is_set():
            with self._arrived:
                if self._newest is None:
                    self._arrived.wait(timeout=1.0)
                frame, self._newest = self._newest, None
            if frame is not None:
                prediction = self._answerer.answer(frame)
                if prediction is not None:
                    self._on_prediction(prediction)


def _winner(logits: NDArray[np.float64]) -> tuple[int, float]:
    """Return (class id, softmax probability) of the largest of (K,) logits."""
    class_id = int(np.argmax(logits))
    return class_id, float(1.0 / np.exp(logits - logits[class_id]).sum())
