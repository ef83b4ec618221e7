"""From one picture to its prediction, through the active model slot: counts, ages, the way back from a bad model."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_client.cameras.base import Picture
from edge_client.model_slot import ModelSlot, ServedModel
from edge_client.predictions import Prediction, Shown
from edge_client.views.base import Answers, Inputs, View
from federation.service.logs import EventLogger

log = EventLogger(__name__)

FAILURES_BEFORE_ROLLBACK = 3
"""Pictures in a row that a model may fail on before the previous one takes over."""

_AGES_KEPT = 1000


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """What became of all frames since the start; ``latency_p95_s`` is of the newest thousand answers.

    Every captured frame is answered, dropped or failed: dropped means that it was taken and never looked at, or that no
    model was there to answer.
    """

    num_frames: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    latency_p95_s: float = 0.0

    @property
    def num_captured(self) -> int:
        """All of them."""
        return self.num_frames + self.num_dropped + self.num_failed


class Answerer:
    """Answers single pictures through a slot, counts, and rolls a failing model back.

    Args:
        slot: whose active model answers.
        view: how the task looks at pictures.
        clock: ``time.monotonic``.
    """

    def __init__(self, slot: ModelSlot, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._slot = slot
        self._view = view
        self._clock = clock
        self._ages: collections.deque[float] = collections.deque(maxlen=_AGES_KEPT)
        self._answered = self._failed = self._in_a_row = 0
        self._newest_ids: dict[str, int] = {}
        self._unusable: set[str] = set()  # cameras whose last picture couldn't be looked at: one line for many

    def answer(self, picture: Picture) -> Shown | None:
        """Return the picture with its prediction; None if it can't even be looked at."""
        self._newest_ids[picture.camera] = max(self._newest_ids.get(picture.camera, -1), picture.frame_id)
        try:
            inputs = self._view.inputs(picture)
        except Exception as error:  # of a picture that no model is to blame for
            self._failed += 1
            if picture.camera not in self._unusable:
                log.warning("picture can't be used", camera=picture.camera, frame=picture.frame_id, error=error)
            self._unusable.add(picture.camera)
            return None
        self._unusable.discard(picture.camera)
        served = self._slot.active
        return Shown(picture, inputs, None if served is None else self._predict(served, picture, inputs))

    @property
    def counts(self) -> FrameCounts:
        """The counts so far; safe to read from another thread."""
        ages = sorted(self._ages)
        p95 = ages[min(len(ages) - 1, int(0.95 * len(ages)))] if ages else 0.0
        num_captured = sum(newest + 1 for newest in self._newest_ids.copy().values())
        return FrameCounts(self._answered, max(0, num_captured - self._answered - self._failed), self._failed, p95)

    def _predict(self, served: ServedModel, picture: Picture, inputs: Inputs) -> Prediction | None:
        try:
            outputs = served.model(inputs.images) if len(inputs.images) else None
            answers = Answers.none() if outputs is None else self._view.answers(outputs, inputs)
        except Exception as error:  # runtimes share no exception class
            self._fail(served.version, error)
            return None
        self._in_a_row = 0
        self._answered += 1
        answered_at = self._clock()
        self._ages.append(answered_at - picture.captured_at)
        return Prediction(picture.camera, picture.frame_id, answers, served.version, picture.captured_at, answered_at)

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
