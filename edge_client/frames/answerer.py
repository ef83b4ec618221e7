"""From one picture to its prediction, through the active model slot: counts, ages, the way back from a bad model."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass

from replayfleet.edge_client.flow import Answers, Inputs, Picture, Prediction, Shown, View
from replayfleet.edge_client.serving.probation.failures import Failures
from replayfleet.edge_client.serving.probation.guard import Answered
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.federation.errors import told
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

_AGES_KEPT = 1000
_ASKED_AT_MOST = 4
_TOLD_AFTER = 10
"""Pictures in a row that can't be looked at: then it is the camera, and not a picture."""


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """What became of all frames since the start; latencies are of the newest thousand answers.

    Every captured frame is answered, dropped or failed: dropped means that it was taken and never looked at, or that no
    model was there to answer.
    """

    num_frames: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    latency_p95_s: float = 0.0
    latency_p99_s: float = 0.0

    @property
    def num_captured(self) -> int:
        return self.num_frames + self.num_dropped + self.num_failed


class Answerer:
    """Answers single pictures through a slot, counts, and rolls a failing model back.

    Args:
        slot: whose active model answers.
        view: how the task looks at pictures.
        on_answer: called with every picture that the model was asked about; must be quick.
    """

    def __init__(
        self,
        slot: ModelSlot,
        view: View,
        clock: Callable[[], float] = time.monotonic,
        on_answer: Callable[[Answered], None] = lambda _: None,
    ) -> None:
        self._slot = slot
        self._view = view
        self._clock = clock
        self._on_answer = on_answer
        self._failures = Failures(slot, clock)
        self._ages: collections.deque[float] = collections.deque(maxlen=_AGES_KEPT)
        self._answered = self._failed = 0
        self._newest_ids: dict[str, int] = {}
        self._unusable: dict[str, tuple[int, str]] = {}  # camera -> pictures in a row that can't be looked at, and why

    def answer(self, picture: Picture) -> Shown | None:
        """Return the picture with its prediction; None if it can't even be looked at."""
        self._newest_ids[picture.camera] = max(self._newest_ids.get(picture.camera, -1), picture.frame_id)
        try:
            inputs = self._view.inputs(picture)
        except Exception as error:  # of a picture that no model is to blame for
            self._failed += 1
            before, _ = self._unusable.get(picture.camera, (0, ""))
            if not before:
                log.warning("picture can't be used", camera=picture.camera, frame=picture.frame_id, error=error)
            self._unusable[picture.camera] = before + 1, told(error)
            return None
        self._unusable.pop(picture.camera, None)
        return Shown(picture, inputs, self._predict(picture, inputs))

    def problem(self, camera: str) -> str:
        """Why a camera's newest pictures can't even be looked at; empty if they can. Safe from another thread."""
        in_a_row, why = self._unusable.get(camera, (0, ""))
        return f"its last {in_a_row} pictures can't be used: {why}" if in_a_row >= _TOLD_AFTER else ""

    @property
    def counts(self) -> FrameCounts:
        """The counts so far; safe to read from another thread."""
        ages = sorted(self._ages)
        p95, p99 = (ages[min(len(ages) - 1, int(share * len(ages)))] if ages else 0.0 for share in (0.95, 0.99))
        num_captured = sum(newest + 1 for newest in self._newest_ids.copy().values())
        return FrameCounts(self._answered, max(0, num_captured - self._answered - self._failed), self._failed, p95, p99)

    def _predict(self, picture: Picture, inputs: Inputs) -> Prediction | None:
        """Ask the active model, and if it fails whoever takes over; a picture's answers all come from one version."""
        served = self._slot.active
        if served is None:
            return None
        for _ in range(_ASKED_AT_MOST):
            outputs = None
            began = time.perf_counter()
            try:
                outputs = served.model(inputs.images) if len(inputs.images) else None
                answers = Answers.none() if outputs is None else self._view.answers(outputs, inputs)
            except Exception as error:  # runtimes share no exception class
                served = self._failures.next_after(served, error, outputs)
                if served is None:
                    break
                continue
            if outputs is not None:
                self._failures.answered(served)
                self._on_answer(Answered(served, self._view, inputs, answers, time.perf_counter() - began))
            self._answered += 1
            taken_at, now = picture.captured_at, self._clock()
            self._ages.append(now - taken_at)
            return Prediction(picture.camera, picture.frame_id, answers, served.version, taken_at, now)
        self._failed += 1
        return None
