"""What is labelled among cameras' pictures becomes round data.

Labelling has a thread of its own, so that a slow teacher never slows serving: then a recording waits between two
pictures, and a live camera's are served and not learned from.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from replayfleet.edge_client.flow import LabelProgress, Samples, Shown
from replayfleet.edge_client.learning.collector import Collector
from replayfleet.edge_client.learning.labels.lessons import Lessons
from replayfleet.edge_client.learning.labels.operators_word import (
    DROPPED,
    IN_A_ROUND,
    REPLACED,
    AnyFeedback,
    Desk,
    TakeBack,
)
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

_UNANSWERED, _UNLEARNED = "num_objects_left_out", "num_boxes_left_out"

MAX_PLACES = 100
"""Whose accuracy a report names: those with most answers."""
MAX_WAITING = 32
"""Pictures that wait for a label; then live cameras' are not learned from, and recordings wait for room."""

MAX_WAITING_BYTES = 64 << 20
"""What those may hold that one more may join: of 3840 x 2160 three wait."""


class CameraSamples:
    """Implements ``SampleSource`` over what cameras showed.

    Args:
        recorded: names of the cameras that are recordings.
        lessons: makes round data of pictures whose content is known.
        desk: where an operator's labels meet recent frames.
        collector: where labelled samples wait for their round.
    """

    def __init__(self, recorded: Collection[str], lessons: Lessons, desk: Desk, collector: Collector) -> None:
        self._recorded = frozenset(recorded)
        self._lessons = lessons
        self._desk = desk
        self._collector = collector
        self._waiting: queue.Queue[Shown] = queue.Queue()
        self._said = weakref.WeakValueDictionary[tuple[str, int, int | None], Samples]()
        self._speaking = threading.Lock()
        self._failing = False
        self.num_unlabelled = 0
        """Pictures that nobody labelled because labelling is slower than they come."""
        self._too_many = {_UNANSWERED: _Excess(), _UNLEARNED: _Excess()}
        threading.Thread(target=self._label, name="labels", daemon=True).start()

    def follow(self, lessons: Lessons) -> None:
        """Label what comes from now on for a task with more classes; what was labelled before stays."""
        self._lessons = lessons

    def has_room(self) -> bool:
        """Whether another picture may come: labelling keeps up."""
        with self._waiting.mutex:
            waiting = self._waiting.queue
            size_bytes = sum(shown.picture.pixels.nbytes for shown in waiting)
            return len(waiting) < MAX_WAITING and size_bytes < MAX_WAITING_BYTES

    def end(self) -> None:
        """Nothing more will come: the next round takes what there is, however little."""
        self._collector.end()

    def watch(self, shown: Shown) -> None:
        """Put a picture in line for its label: each one of a recording, of a live camera what there is time for."""
        answers = None if shown.prediction is None else shown.prediction.answers
        if answers is not None and answers.num_left_out:
            self._left_out(_UNANSWERED, shown, answers.num_left_out)
        if shown.picture.camera in self._recorded or self.has_room():
            self._waiting.put(shown)
        else:
            self.num_unlabelled += 1

    def feedback(self, feedback: AnyFeedback, shown: Shown | None = None) -> TakeBack:
        """Learn what an operator says about a recent frame, in place of what was said and no round has learned.

        Returns how to take it back.

        Args:
            feedback: the word.
            shown: the frame that it is about, where whoever says it holds that; else it is looked for.

        Raises:
            FeedbackRefused: It can't be used; says why.
        """
        if shown is not None:
            self._desk.keep(shown)
        samples, place, about = self._desk.samples(feedback)
        with self._speaking:
            round_index = self._collector.round_index  # before: the very next round may take it
            before = self._said.get(about)
            if before is not None:
                self._collector.take_back(before)
            self._said[about] = samples
            self._collector.add(samples, camera=about[0], place=place)

        def take_back() -> str:
            with self._speaking:
                if self._collector.take_back(samples):
                    return ""
                if self._said.get(about) is not samples:
                    return REPLACED
                return DROPPED if self._collector.round_index == round_index else IN_A_ROUND

        return take_back

    def round_samples(self, round_index: int) -> Samples | None:
        """Return what was labelled since the last round; None while it is too little."""
        return self._collector.round_samples(round_index)

    def used_up(self, round_index: int) -> None:
        """No later round is to get this one's samples."""
        self._collector.used_up(round_index)

    def progress(self) -> LabelProgress:
        """How many labels wait for the next round, and how many it needs."""
        return self._collector.progress()

    def test_samples(self, round_index: int) -> Samples | None:
        return self._collector.held_out()

    def measures(self) -> Mapping[str, float]:
        """Return the served model's accuracy on what was labelled since the last call: all of it, and by busy place.

        Where learning can't keep up, or pictures are too full, it also says how much was left out since the start.
        """
        left_out = {
            name: float(count)
            for name, count in (
                ("num_samples_dropped", self._collector.num_dropped),
                ("num_unlabelled", self.num_unlabelled),
                *((name, excess.num_objects) for name, excess in self._too_many.items()),
            )
            if count
        }
        counts = self._collector.stream_accuracy()
        num_right, num_answered = (sum(column) for column in zip((0, 0), *counts.values(), strict=True))
        if not num_answered:
            return left_out
        places = sorted((place for place in counts if place), key=lambda place: -counts[place][1])[:MAX_PLACES]
        by_place = {f"stream_accuracy/{place}": counts[place][0] / counts[place][1] for place in places}
        accuracy = {"stream_accuracy": num_right / num_answered, "num_stream": float(num_answered)}
        return accuracy | by_place | left_out

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until every picture in line has been labelled; whether that happened in time."""
        deadline = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._waiting.unfinished_tasks

    def _label(self) -> None:
        while True:
            shown = self._waiting.get()
            try:
                self._learn_from(shown)
                self._failing = False
            except Exception:  # root of a thread
                if not self._failing:
                    log.exception("picture not labelled", camera=shown.picture.camera, frame=shown.picture.frame_id)
                self._failing = True
            finally:
                self._waiting.task_done()

    def _learn_from(self, shown: Shown) -> None:
        self._desk.keep(shown)
        lesson = self._lessons.lesson(shown)
        if lesson is not None and lesson.num_left_out:
            self._left_out(_UNLEARNED, shown, lesson.num_left_out)
        if lesson is not None:
            self._collector.add(
                lesson.samples,
                camera=shown.picture.camera,
                place=shown.picture.place,
                num_right=lesson.num_right,
                num_answered=lesson.num_answered,
            )

    def _left_out(self, name: str, shown: Shown, count: int) -> None:
        """Count objects of a picture that is too full; one line for each camera."""
        excess, camera = self._too_many[name], shown.picture.camera
        excess.num_objects += count
        if camera not in excess.cameras:
            excess.cameras.add(camera)
            log.warning("picture is too full", camera=camera, frame=shown.picture.frame_id, **{name: count})


@dataclass(slots=True)
class _Excess:
    """Objects that a limit left out, and the cameras whose pictures were that full."""

    num_objects: int = 0
    cameras: set[str] = field(default_factory=set)
