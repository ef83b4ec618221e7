from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_client.inference import Answerer, InferenceLoop, Prediction
from edge_client.model_slot import Candidate, Model, ModelSlot
from edge_client.sources.base import Frame

IMAGE = np.zeros((1, 2, 2), np.float32)


def candidate(version: int, model: Model) -> Candidate:
    return Candidate(version, version, IMAGE.shape, lambda: model, lambda _: None)


def _slot(*models: Model) -> ModelSlot:
    slot = ModelSlot()
    for version, model in enumerate(models):
        slot.install(candidate(version, model))
    return slot


def answers(*logits: float) -> Model:
    return lambda images: np.tile(np.array(logits, np.float32), (len(images), 1))


class Fails:
    """Right at its probe, wrong afterwards."""

    def __init__(self, result: float | Exception) -> None:
        self.result: float | Exception = 1.0
        self.later = result

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        if isinstance(self.result, Exception):
            raise self.result
        return np.full((len(images), 2), self.result, np.float32)


def test_a_prediction_names_its_frame_version_and_softmax_confidence() -> None:
    answerer = Answerer(_slot(answers(0, 0), answers(0, np.log(3.0))), clock=lambda: 12.5)
    prediction = answerer.answer(Frame(7, IMAGE, 12.0))
    assert prediction is not None
    assert prediction.confidence == pytest.approx(0.75)
    assert prediction == Prediction(7, 1, prediction.confidence, 1, 12.0, 12.5)
    assert prediction.latency_s == 0.5


def test_without_a_model_frames_are_dropped_and_counted() -> None:
    answerer = Answerer(ModelSlot())
    assert answerer.answer(Frame(0, IMAGE, 0.0)) is None
    assert (answerer.counts.num_frames, answerer.counts.num_dropped) == (0, 1)


def test_skipped_frames_are_counted_as_dropped_and_latency_is_the_95th_percentile() -> None:
    clock = iter(range(1, 1000))
    answerer = Answerer(_slot(answers(1, 0)), clock=lambda: float(next(clock)))
    for frame_id in range(0, 40, 2):
        answerer.answer(Frame(frame_id, IMAGE, 0.0))
    counts = answerer.counts
    assert (counts.num_frames, counts.num_dropped, counts.num_failed) == (20, 19, 0)
    assert counts.latency_p95_s == 20.0


@pytest.mark.parametrize("later", [float("nan"), RuntimeError("gpu gone")])
def test_a_model_that_fails_three_frames_in_a_row_is_rolled_back(later: float | Exception) -> None:
    failing = Fails(later)
    slot = _slot(answers(1, 0), failing)
    answerer = Answerer(slot)
    failing.result = later
    assert [answerer.answer(Frame(index, IMAGE, 0.0)) for index in range(3)] == [None, None, None]
    after = answerer.answer(Frame(3, IMAGE, 0.0))
    assert after is not None
    assert after.model_version == 0
    assert answerer.counts.num_failed == 3
    assert slot.num_rollbacks == 1


def test_two_failures_are_forgiven() -> None:
    failing = Fails(float("nan"))
    slot = _slot(answers(1, 0), failing)
    answerer = Answerer(slot)
    for index in range(9):
        failing.result = 1.0 if index % 3 == 2 else float("nan")
        answerer.answer(Frame(index, IMAGE, 0.0))
    assert slot.active is not None
    assert slot.active.version == 1


class ScriptedSource:
    """Yields what a test puts in."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Frame] = queue.Queue()

    def frames(self, stop: threading.Event) -> Iterator[Frame]:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                yield self.queue.get(timeout=0.05)


def test_the_loop_answers_only_the_newest_frame_after_a_slow_one() -> None:
    busy, free, taken = threading.Event(), threading.Event(), threading.Event()

    def slow(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if images[0, 0, 0, 0] == 1.0:
            busy.set()
            assert free.wait(10)
        return np.zeros((len(images), 2), np.float32)

    class Source(ScriptedSource):
        def frames(self, stop: threading.Event) -> Iterator[Frame]:
            for frame in super().frames(stop):
                yield frame
                if frame.frame_id == 3:
                    taken.set()

    source, done = Source(), queue.Queue[Prediction]()
    loop = InferenceLoop(source, Answerer(_slot(slow)), done.put)  # type: ignore[arg-type]
    loop.start()
    source.queue.put(Frame(0, IMAGE + 1, 0.0))
    assert busy.wait(10)
    for frame_id in (1, 2, 3):
        source.queue.put(Frame(frame_id, IMAGE, 0.0))
    assert taken.wait(10)
    free.set()
    assert [done.get(timeout=10).frame_id for _ in range(2)] == [0, 3]
    loop.stop()
    assert loop.counts.num_dropped == 2


def test_every_answer_under_swaps_comes_from_exactly_one_version() -> None:
    slot = _slot(answers(0, 1))
    source, done = ScriptedSource(), queue.Queue[Prediction]()
    loop = InferenceLoop(source, Answerer(slot), done.put)  # type: ignore[arg-type]
    loop.start()
    for version in range(1, 200):
        class_id = version % 2
        model = answers(1, 0) if class_id == 0 else answers(0, 1)
        source.queue.put(Frame(version, IMAGE, 0.0))
        slot.install(candidate(version, model))
    source.queue.put(Frame(200, IMAGE, 0.0))
    seen = [done.get(timeout=10)]
    while seen[-1].frame_id != 200:
        seen.append(done.get(timeout=10))
    loop.stop()
    assert all(p.class_id == (p.model_version % 2 if p.model_version else 1) for p in seen)
    assert [p.model_version for p in seen] == sorted(p.model_version for p in seen)


def test_a_source_that_breaks_is_reported_not_hidden() -> None:
    class Broken:
        def frames(self, stop: threading.Event) -> Iterator[Frame]:
            raise OSError("camera unplugged")
            yield

    loop = InferenceLoop(Broken(), Answerer(ModelSlot()))  # type: ignore[arg-type]
    loop.start()
    loop._threads[0].join(10)
    loop.stop()
    assert loop.error == "OSError: camera unplugged"
