"""The frames of a running client: which source's are served, what became of them, and who looks on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from replayfleet.edge_client.flow import PictureSource, Prediction, Shown
from replayfleet.edge_client.frames.answerer import Answerer, FrameCounts
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.serving.probation.guard import Guard, serving_status
from replayfleet.edge_client.serving.probation.probation import ProbationRules
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)


class FrameService:
    """Serves the frames of one source after the other through one slot. Its properties are safe on any thread.

    Args:
        slot: whose active model answers.
        rules: of the probation of new versions.
        watchers: called on the serving thread with every picture and its prediction; must be quick. May grow.
    """

    def __init__(self, slot: ModelSlot, rules: ProbationRules, watchers: list[Callable[[Shown], None]]) -> None:
        self.slot = slot
        self._guard = Guard(slot, rules)
        self._watchers = watchers
        self._loop: InferenceLoop | None = None
        self._source: PictureSource | None = None
        self._newest: Prediction | None = None

    def start(self) -> None:
        """Begin to watch versions on probation and the serving process's memory; frames come with ``follow``."""
        self._guard.start()

    def follow(self, source: PictureSource, watch: Callable[[Shown], None]) -> None:
        """Serve the frames of ``source`` from now on, and tell ``watch`` of them before all others."""
        if source is self._source:
            return
        if self._loop is not None:
            self._loop.stop()
        self._source = source
        answerer = Answerer(self.slot, source.view, on_answer=self._guard.saw)
        self._loop = InferenceLoop(source.cameras, answerer, lambda shown: self._tell(shown, watch))
        self._loop.start()
        log.info("serving", source=source.description)

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        self._guard.stop()

    @property
    def counts(self) -> FrameCounts:
        return FrameCounts() if self._loop is None else self._loop.counts

    @property
    def error(self) -> str:
        """What is wrong with cameras or serving now; empty while everything delivers."""
        return "" if self._loop is None else self._loop.error

    @property
    def turns(self) -> Mapping[str, int]:
        """What capture and inference have done so far, for a watchdog; empty before the first source."""
        return {} if self._loop is None else self._loop.turns

    def measures(self) -> Mapping[str, float]:
        counts = self.counts
        return {"frames": float(counts.num_frames), "latency_p95_s": counts.latency_p95_s}

    def serving(self) -> dict[str, Any]:
        return serving_status(self.slot, self._guard)

    def status(self) -> dict[str, Any]:
        counts, newest = self.counts, self._newest
        return {
            "frames": counts.num_frames,
            "dropped": counts.num_dropped,
            "failed": counts.num_failed,
            "latency_p95_s": round(counts.latency_p95_s, 6),
            "latency_p99_s": round(counts.latency_p99_s, 6),
            "prediction": None if newest is None else _in_short(newest),
        }

    def _tell(self, shown: Shown, watch: Callable[[Shown], None]) -> None:
        if shown.prediction is not None:
            self._newest = shown.prediction
        with contextlib.ExitStack() as each_of_them:  # also those behind one that fails, which the loop logs
            for told in reversed((watch, *self._watchers)):
                each_of_them.callback(told, shown)


def _in_short(prediction: Prediction) -> dict[str, Any]:
    """One class, or how many objects there were; of which camera, by which version."""
    answers = prediction.answers
    said = {"class": int(answers.class_ids[0])} if answers.corners is None else {"objects": len(answers)}
    return {"camera": prediction.camera, **said, "version": prediction.model_version}
