from __future__ import annotations

import contextlib
import errno
import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import replayfleet
from replayfleet.edge_client.cameras.held_up import held_up
from replayfleet.edge_client.flow import Answers, Boxes, CameraError, Inputs, Picture, PictureSource, Prediction, Shown
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.frame_service import FrameService
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.frames.views import Crops, WholePicture
from replayfleet.edge_client.serving.probation.failures import STARVED_S, Failures
from replayfleet.edge_client.serving.probation.probation import ProbationRules
from replayfleet.edge_client.serving.slot import Candidate, Model, ModelLost, ModelSlot
from replayfleet.federation.errors import Reason
from replayfleet.models.specs import TaskSpec
from tests.support.waiting import until

TASK = TaskSpec(1, 28, ("cat", "dog"), generator_width=1)
VIEW = WholePicture(TASK)


def picture(frame_id: int, level: int = 0, camera: str = "cam", boxes: Boxes | None = None) -> Picture:
    return Picture(camera, frame_id, np.full((28, 28, 3), level, np.uint8), 12.0, boxes)


def candidate(version: int, model: Model) -> Candidate:
    return Candidate(version, version, TASK.image_shape, lambda: model, lambda _: None)


def _slot(*models: Model) -> ModelSlot:
    slot = ModelSlot()
    for version, model in enumerate(models):
        slot.install(candidate(version, model))
    return slot


def says(*logits: float) -> Model:
    return lambda images: np.tile(np.array(logits, np.float32), (len(images), 1))


def predicted(shown: Shown | None) -> Prediction | None:
    return shown.prediction


class Fails:
    """Right at its probe, wrong afterwards."""

    def __init__(self, result: float | Exception) -> None:
        self.result: float | Exception = 1.0
        self.later = result

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        if isinstance(self.result, Exception):
            raise self.result
        return np.full((len(images), 2), self.result, np.float32)


def test_a_prediction_names_its_camera_frame_version_and_softmax_confidence() -> None:
    answerer = Answerer(_slot(says(0, 0), says(0, np.log(3.0))), VIEW, clock=lambda: 12.5)
    prediction = predicted(answerer.answer(picture(7)))
    assert (prediction.camera, prediction.frame_id, prediction.model_version) == ("cam", 7, 1)
    assert prediction.answers.class_ids.tolist() == [1]
    assert prediction.answers.confidences[0] == pytest.approx(0.75)
    assert prediction.age_s == 0.5


def test_every_object_of_a_picture_gets_an_answer_of_its_own() -> None:
    corners = np.array([[0, 0, 10, 10], [5, 5, 28, 28], [40, 40, 50, 50]], np.float32)
    boxes = Boxes(corners, np.zeros(3, np.int64))

    def brightness(images: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.stack([-images.mean(axis=(1, 2, 3)), images.mean(axis=(1, 2, 3))], axis=1)

    prediction = predicted(Answerer(_slot(brightness), Crops(TASK)).answer(picture(0, 255, boxes=boxes)))
    assert prediction.answers.corners.tolist() == corners[:2].tolist()  # the third lies outside
    assert prediction.answers.class_ids.tolist() == [1, 1]


def test_a_picture_with_nothing_in_it_is_answered_with_nothing() -> None:
    def never(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if images.any():
            raise AssertionError("asked")
        return np.zeros((len(images), 2), np.float32)

    answerer = Answerer(_slot(never), Crops(TASK))
    prediction = predicted(answerer.answer(picture(0, 255, boxes=Boxes.none())))
    assert len(prediction.answers) == 0
    assert answerer.counts.num_frames == 1


def test_without_a_model_frames_are_dropped_and_counted_and_still_shown() -> None:
    answerer = Answerer(ModelSlot(), VIEW)
    assert predicted(answerer.answer(picture(0))) is None
    assert (answerer.counts.num_frames, answerer.counts.num_dropped) == (0, 1)


def test_skipped_frames_are_counted_per_camera_and_latency_is_the_95th_percentile() -> None:
    clock = iter(range(13, 1000))
    answerer = Answerer(_slot(says(1, 0)), VIEW, clock=lambda: float(next(clock)))
    for frame_id in range(0, 40, 2):
        answerer.answer(picture(frame_id))
    answerer.answer(picture(4, camera="other"))
    counts = answerer.counts
    assert (counts.num_frames, counts.num_dropped, counts.num_failed) == (21, 23, 0)
    assert counts.num_captured == 39 + 5
    assert counts.latency_p95_s == 20.0


def test_a_picture_that_cannot_be_looked_at_is_no_failure_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    class Blind(WholePicture):
        def inputs(self, picture: Picture) -> object:  # type: ignore[override]
            raise ValueError("blind")

    slot = _slot(says(1, 0), says(0, 1))
    answerer = Answerer(slot, Blind(TASK))  # type: ignore[arg-type]
    assert [answerer.answer(picture(index)) for index in range(5)] == [None] * 5
    assert (answerer.counts.num_failed, slot.num_rollbacks) == (5, 0)
    assert caplog.messages == ["picture can't be used"]


def test_a_camera_whose_pictures_cannot_be_looked_at_one_after_another_is_told() -> None:
    class OftenBlind(WholePicture):
        def inputs(self, picture: Picture) -> Inputs:
            if picture.frame_id < 10:
                raise ValueError("blind")
            return super().inputs(picture)

    answerer = Answerer(_slot(says(1, 0)), OftenBlind(TASK))
    loop = InferenceLoop([ScriptedCamera(name="other"), ScriptedCamera()], answerer)
    for frame_id in range(9):
        answerer.answer(picture(frame_id))
    assert not loop.error, "a few are a hiccup"
    answerer.answer(picture(9))
    assert loop.error == "cam: its last 10 pictures can't be used: ValueError: blind"
    answerer.answer(picture(10))
    assert not loop.error


def _answered_by(answerer: Answerer, num_frames: int) -> list[int | None]:
    shown = [predicted(answerer.answer(picture(index))) for index in range(num_frames)]
    return [None if prediction is None else prediction.model_version for prediction in shown]


@pytest.mark.parametrize("later", [float("nan"), RuntimeError("gpu gone")])
def test_a_confirmed_model_that_fails_three_frames_in_a_row_is_rolled_back(later: float | Exception) -> None:
    failing = Fails(later)
    slot = _slot(says(1, 0), failing)
    slot.confirm(1)
    answerer = Answerer(slot, VIEW)
    failing.result = later
    assert _answered_by(answerer, 4) == [None, None, 0, 0], "the third one is answered after all"
    assert answerer.counts.num_failed == 2
    assert slot.last_rollback.reason is Reason.FAILING


def test_two_failures_of_a_confirmed_model_are_forgiven() -> None:
    failing = Fails(float("nan"))
    slot = _slot(says(1, 0), failing)
    slot.confirm(1)
    answerer = Answerer(slot, VIEW)
    for index in range(9):
        failing.result = 1.0 if index % 3 == 2 else float("nan")
        answerer.answer(picture(index))
    assert slot.active.version == 1


def test_on_probation_one_answer_that_is_not_finite_is_too_many_and_costs_no_frame() -> None:
    failing = Fails(float("nan"))
    slot = _slot(says(1, 0), failing)
    answerer = Answerer(slot, VIEW)
    assert _answered_by(answerer, 2) == [1, 1]
    failing.result = float("inf")
    assert _answered_by(answerer, 2) == [0, 0]
    assert answerer.counts.num_failed == 0
    assert slot.last_rollback.reason is Reason.NOT_FINITE


def test_on_probation_three_failures_in_all_are_too_many() -> None:
    failing = Fails(RuntimeError("odd picture"))
    slot = _slot(says(1, 0), failing)
    answerer = Answerer(slot, VIEW)
    seen: list[int | None] = []
    for result in (RuntimeError("odd"), 1.0, RuntimeError("odd"), 1.0, RuntimeError("odd"), 1.0):
        failing.result = result
        seen += _answered_by(answerer, 1)
    assert seen == [None, 1, None, 1, 0, 0]


def test_a_model_whose_process_is_lost_on_probation_is_gone_with_that_frame() -> None:
    for lost, reason in ((ModelLost("SIGSEGV"), Reason.CRASHED), (ModelLost("silent", hung=True), Reason.HUNG)):
        failing = Fails(lost)
        slot = _slot(says(1, 0), failing)
        failing.result = lost
        answerer = Answerer(slot, VIEW)
        assert _answered_by(answerer, 1) == [0]
        assert answerer.counts.num_failed == 0
        assert slot.last_rollback.reason is reason


class DiesOften:
    """Loses its process at every second call, like one that starts again at the next."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        self.calls += 1
        if self.calls % 2 == 0:
            raise ModelLost("SIGKILL")
        return np.tile(np.array([1, 0], np.float32), (len(images), 1))


def test_a_confirmed_model_whose_process_died_is_asked_again_and_at_the_third_death_rolled_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slot = _slot(says(0, 1), DiesOften())
    slot.confirm(1)
    answerer = Answerer(slot, VIEW)
    assert _answered_by(answerer, 6) == [1, 1, 0, 0, 0, 0], "two deaths cost nothing"
    assert answerer.counts.num_failed == 0
    assert caplog.messages == ["model rolled back"], "no frame failed, so no line says so"


def test_deaths_of_a_model_count_against_none_that_comes_after_it() -> None:
    slot = _slot(says(0, 1), DiesOften())
    slot.confirm(1)
    answerer = Answerer(slot, VIEW)
    assert _answered_by(answerer, 2) == [1, 1], "it died twice"
    slot.install(candidate(2, DiesOften()))
    slot.confirm(2)
    assert _answered_by(answerer, 3) == [2, 2, 1], "and so may the next"


@pytest.mark.parametrize("confirmed", [True, False])
def test_no_model_is_to_blame_for_frames_while_no_process_is_to_be_had(confirmed: bool) -> None:
    failing = Fails(0.0)
    slot = _slot(says(1, 0), failing)
    if confirmed:
        slot.confirm(1)
    answerer = Answerer(slot, VIEW)
    failing.result = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    assert _answered_by(answerer, 5) == [None if confirmed else 0] * 5, "the one before it has its process yet"
    assert answerer.counts.num_failed == (5 if confirmed else 0)
    failing.result = RuntimeError("the first failure that is its own")
    assert _answered_by(answerer, 1) == [None]
    failing.result = 0.0
    assert _answered_by(answerer, 1) == [1]


def test_a_model_on_probation_that_never_finds_memory_where_the_one_before_does_is_rolled_back() -> None:
    before, fails, now = Fails(0.0), Fails(0.0), [0.0]
    slot = _slot(before, says(1, 0), fails)
    answerer = Answerer(slot, VIEW, clock=lambda: now[0])

    def answers_at(at: float) -> list[int | None]:
        now[0] = at
        return _answered_by(answerer, 1)

    fails.result = OSError(errno.ENOMEM, "none is left for 12 MB")
    assert answers_at(0.0) == [0]
    fails.result = 0.0
    assert answers_at(STARVED_S) == [2], "it passed"
    fails.result = before.result = OSError(errno.ENOMEM, "none is left for 12 MB")
    assert answers_at(STARVED_S + 1) == [None]
    assert answers_at(2 * STARVED_S + 1) == [None], "the other finds none either"
    assert slot.num_rollbacks == 0
    before.result = 0.0
    assert answers_at(2 * STARVED_S + 2) == [0]
    assert slot.last_rollback.reason is Reason.FAILING
    assert "no memory" in slot.last_rollback.detail
    assert slot.active.version == 0


def test_a_model_is_starved_for_its_own_time_alone() -> None:
    models, now = [Fails(0.0), Fails(0.0), Fails(0.0)], [0.0]
    slot = _slot(*models[:2])
    answerer = Answerer(slot, VIEW, clock=lambda: now[0])
    models[1].result = OSError(errno.ENOMEM, "none is left for 12 MB")
    assert _answered_by(answerer, 1) == [0]
    slot.install(candidate(2, models[2]))
    models[2].result = models[1].result
    now[0] = STARVED_S
    assert _answered_by(answerer, 1) == [0]
    assert slot.num_rollbacks == 0


def test_a_model_that_came_in_the_middle_of_a_frame_isnt_starved_for_the_one_before_it() -> None:
    now = [0.0]
    slot = _slot(says(0, 1), says(1, 0))
    failures, before = Failures(slot, lambda: now[0]), slot.previous
    assert failures.next_after(slot.active, OSError(errno.ENOMEM, "none is left for 12 MB"), None) is before
    slot.install(candidate(2, says(1, 0)))
    now[0] = STARVED_S
    failures.answered(before)
    assert slot.num_rollbacks == 0


def test_a_first_model_that_keeps_dying_fails_its_frames_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def dies(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if images.any():
            raise ModelLost("SIGKILL")
        return np.zeros((len(images), 2), np.float32)

    slot = _slot(dies)
    answerer = Answerer(slot, VIEW)
    assert [predicted(answerer.answer(picture(index, 255))) for index in range(5)] == [None] * 5
    assert answerer.counts.num_failed == 5
    assert caplog.messages == ["frame failed"], "one line for all in a row"
    assert _answered_by(answerer, 1) == [None]
    assert slot.active is not None


def test_a_frame_whose_model_is_swapped_away_beneath_it_is_answered_by_the_next() -> None:
    slot = ModelSlot()

    def replaced(images: NDArray[np.float32]) -> NDArray[np.float32]:
        if not images.any():
            return np.zeros((len(images), 2), np.float32)
        slot.install(candidate(1, says(0, 1)))
        raise ModelLost("its process was let go")

    slot.install(candidate(0, replaced))
    shown = predicted(Answerer(slot, VIEW).answer(picture(0, 255)))
    assert shown.model_version == 1
    assert slot.num_rollbacks == 0


class ScriptedCamera:
    """Yields what a test puts in; an exception is raised, None ends it."""

    class_names: tuple[str, ...] = ()

    def __init__(self, name: str = "cam", *, live: bool = True) -> None:
        self.name = name
        self.live = live
        self.queue: queue.Queue[Picture | BaseException | None] = queue.Queue()
        self.handed_on: list[int] = []

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                item = self.queue.get(timeout=0.05)
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
                self.handed_on.append(item.frame_id)

    def describe(self) -> str:
        return "scripted"


class SlowOnBright:
    """Keeps the serving thread busy with a bright picture until it is let go."""

    def __init__(self) -> None:
        self.busy, self.free = threading.Event(), threading.Event()

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        if images[0, 0, 0, 0] == 1.0:
            self.busy.set()
            assert self.free.wait(60)
        return np.zeros((len(images), 2), np.float32)


def test_the_loop_answers_only_the_newest_frame_after_a_slow_one() -> None:
    slow, camera, done = SlowOnBright(), ScriptedCamera(), queue.Queue[Shown]()
    loop = InferenceLoop([camera], Answerer(_slot(slow), VIEW), done.put)
    loop.start()
    camera.queue.put(picture(0, 255))
    assert slow.busy.wait(60)
    for frame_id in (1, 2, 3):
        camera.queue.put(picture(frame_id))
    until(lambda: camera.handed_on == [0, 1, 2, 3])
    slow.free.set()
    assert [done.get(timeout=60).picture.frame_id for _ in range(2)] == [0, 3]
    loop.stop()
    assert loop.counts.num_dropped == 2


def test_of_a_recording_every_frame_is_answered_and_its_end_is_known() -> None:
    slow, camera, done = SlowOnBright(), ScriptedCamera(live=False), queue.Queue[Shown]()
    loop = InferenceLoop([camera], Answerer(_slot(slow), VIEW), done.put)
    loop.start()
    camera.queue.put(picture(0, 255))
    for frame_id in range(1, 20):
        camera.queue.put(picture(frame_id))
    camera.queue.put(None)
    assert slow.busy.wait(60)
    time.sleep(0.1)
    assert len(camera.handed_on) <= 2  # the recording waits for its reader
    assert not loop.ended
    slow.free.set()
    assert [done.get(timeout=60).picture.frame_id for _ in range(20)] == list(range(20))
    until(lambda: loop.ended)
    loop.stop()
    assert loop.counts.num_dropped == 0


def test_a_camera_that_hangs_in_its_own_code_is_told_and_one_that_waits_is_not() -> None:
    """A package's camera that never came back was healthy and silent."""
    blocked, entered, now = threading.Event(), threading.Event(), [100.0]

    class Hangs(ScriptedCamera):
        def pictures(self, stop: threading.Event) -> Iterator[Picture]:
            entered.set()
            blocked.wait()
            yield from super().pictures(stop)

    waits, hangs = ScriptedCamera("waits"), Hangs("hangs")
    loop = InferenceLoop([waits, hangs], Answerer(_slot(says(1, 0)), VIEW), clock=lambda: now[0])
    loop.start()
    try:
        assert entered.wait(60)
        looked = loop.turns["capture waits"]
        assert loop.error == ""
        while loop.turns["capture waits"] == looked:
            time.sleep(0.01)
        now[0] += 31
        assert loop.error == "hangs: hangs for 31 s: it neither gives a picture nor ends"
        blocked.set()
        while loop.error:
            time.sleep(0.01)
    finally:
        blocked.set()
        loop.stop()


@pytest.mark.parametrize(
    "error",
    [MemoryError(), cv2.error("alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate 6220800 bytes")],
    ids=["numpy", "opencv"],
)
def test_a_camera_that_finds_no_memory_for_a_picture_is_asked_for_the_next(error: Exception) -> None:
    camera, done = ScriptedCamera("front"), queue.Queue[Shown]()
    loop = InferenceLoop([camera], Answerer(_slot(says(1, 0)), VIEW), done.put)
    loop.start()
    try:
        camera.queue.put(error)
        camera.queue.put(picture(3, camera="front"))
        assert done.get(timeout=60).picture.camera == "front"
        assert loop.error == ""
    finally:
        loop.stop()


def test_cameras_take_turns_and_one_that_is_lost_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cameras = [ScriptedCamera("front"), ScriptedCamera("rear")]
    done = queue.Queue[Shown]()
    loop = InferenceLoop(cameras, Answerer(_slot(says(1, 0)), VIEW), done.put)
    loop.start()
    for frame_id in range(3):
        cameras[0].queue.put(replayfleet.CameraError("unplugged"))
        cameras[1].queue.put(picture(frame_id, camera="rear"))
        assert done.get(timeout=60).picture.camera == "rear"
    until(lambda: cameras[0].queue.empty())
    assert "front: unplugged" in loop.error
    cameras[0].queue.put(picture(9, camera="front"))
    assert done.get(timeout=60).picture.camera == "front"
    assert loop.error == ""
    loop.stop()
    assert sum("camera lost" in message for message in caplog.messages) == 1
    assert sum("camera is back" in message for message in caplog.messages) == 1


def test_a_live_camera_whose_pictures_end_is_lost_and_no_recording_that_is_over() -> None:
    """A package's camera that returned where its device gave nothing was done for good, and nobody was told."""
    camera, done, ended = ScriptedCamera(), queue.Queue[Shown](), list[bool]()
    held = held_up([camera], lambda: True, lambda: ended.append(True))
    loop = InferenceLoop(held, Answerer(_slot(says(1, 0)), VIEW), done.put)
    loop.start()
    camera.queue.put(None)
    until(lambda: bool(loop.error))
    assert loop.error == "cam: its pictures ended, and those of a live camera go on"
    assert not loop.ended
    assert not ended
    camera.queue.put(picture(0))
    assert done.get(timeout=60).picture.frame_id == 0
    assert loop.error == ""
    loop.stop()


def test_a_camera_that_comes_back_may_count_from_0_and_no_two_pictures_have_one_number() -> None:
    camera, done = ScriptedCamera(), queue.Queue[Shown]()
    loop = InferenceLoop([camera], Answerer(_slot(says(1, 0)), VIEW), done.put)
    loop.start()
    seen = []
    for given in (picture(0), picture(5), CameraError("unplugged"), picture(0), picture(2), CameraError(), picture(40)):
        camera.queue.put(given)
        if isinstance(given, Picture):
            seen.append(done.get(timeout=60).picture.frame_id)
    assert seen == [0, 5, 6, 8, 40]
    camera.queue.put(picture(40))
    until(lambda: "frame_id is 40 after 40, expected to rise" in loop.error)
    loop.stop()


def test_whoever_watches_may_fail_and_serving_goes_on() -> None:
    camera, seen = ScriptedCamera(), queue.Queue[int]()

    def watcher(shown: Shown) -> None:
        seen.put(shown.picture.frame_id)
        raise OSError("disk full")

    loop = InferenceLoop([camera], Answerer(_slot(says(1, 0)), VIEW), watcher)
    loop.start()
    for frame_id in range(3):
        camera.queue.put(picture(frame_id))
        assert seen.get(timeout=60) == frame_id
    loop.stop()
    assert loop.error == ""


def test_a_watcher_that_fails_hides_the_picture_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    camera, seen = ScriptedCamera(), queue.Queue[str]()

    def fails(shown: Shown) -> None:
        seen.put("source")
        raise OSError("disk full")

    frames = FrameService(_slot(says(1, 0)), ProbationRules(), [lambda _: seen.put("desk"), lambda _: seen.put("film")])
    frames.follow(PictureSource((camera,), VIEW, "scripted"), fails)
    for frame_id in range(2):
        camera.queue.put(picture(frame_id))
        assert [seen.get(timeout=60) for _ in range(3)] == ["source", "desk", "film"]
    frames.stop()
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["picture not handed on"], "one line for many"


def test_every_answer_under_swaps_comes_from_exactly_one_version() -> None:
    slot = _slot(says(0, 1))
    camera, done = ScriptedCamera(), queue.Queue[Shown]()
    loop = InferenceLoop([camera], Answerer(slot, VIEW), done.put)
    loop.start()
    for version in range(1, 200):
        model = says(1, 0) if version % 2 == 0 else says(0, 1)
        camera.queue.put(picture(version))
        slot.install(candidate(version, model))
    camera.queue.put(picture(200))
    seen: list[Prediction] = []
    while not seen or seen[-1].frame_id != 200:
        prediction = predicted(done.get(timeout=60))
        assert prediction is not None
        seen.append(prediction)
    loop.stop()
    assert all(p.answers.class_ids[0] == (p.model_version % 2 if p.model_version else 1) for p in seen)
    assert [p.model_version for p in seen] == sorted(p.model_version for p in seen)


def test_a_camera_that_breaks_is_reported_not_hidden() -> None:
    camera = ScriptedCamera()
    camera.queue.put(OSError("driver bug"))
    loop = InferenceLoop([camera], Answerer(ModelSlot(), VIEW))
    loop.start()
    until(lambda: bool(loop.error))
    loop.stop()
    assert loop.error == "cam: OSError: driver bug"


class Unspeakable(Exception):
    def __str__(self) -> str:
        return str(1 // 0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("picture", "TypeError: it gave 'picture', expected a Picture"),
        (picture(0, camera="other"), "ValueError: its picture is of camera 'other', not of 'cam'"),
        (replace(picture(0), captured_at=math.nan), "ValueError: captured_at is nan"),
        (replace(picture(0), captured_at=-1e300), "ValueError: captured_at is -1e+300"),
        (replace(picture(0), captured_at=time.time()), "expected seconds of time.monotonic()"),
        (replace(picture(0), frame_id=np.int64(3)), " (int64) and place '', expected int and str"),
        (replace(picture(0), place=5), "and place 5, expected int and str"),
        (replace(picture(0), place="x" * 256), "ValueError: place has 256 characters, expected at most 255"),
        (replace(picture(0), place="gate\udce4"), "UnicodeEncodeError: 'utf-8' codec can't encode character '\\udce4'"),
        (replace(picture(0), frame_id=2**63), "expected to rise, below 2**63"),
        (SystemExit(3), "SystemExit: 3"),
        (Unspeakable(), "Unspeakable: its text can't be made: ZeroDivisionError"),
    ],
)
def test_a_camera_of_others_that_gives_nonsense_is_done_and_the_others_are_served(given: Any, problem: str) -> None:
    bad, good, seen = ScriptedCamera(), ScriptedCamera("good"), list[Shown]()
    loop = InferenceLoop([bad, good], Answerer(_slot(says(0.0, 1.0)), VIEW), seen.append)
    loop.start()
    bad.queue.put(given)
    until(lambda: bool(loop.error))
    good.queue.put(picture(1, camera="good"))
    until(lambda: len(seen) == 1)
    loop.stop()
    assert problem in loop.error
    assert loop.error.startswith("cam: ")


def test_answers_that_are_not_one_finite_row_per_input_are_refused() -> None:
    inputs = VIEW.inputs(picture(0))
    for outputs in (np.zeros((2, 2)), np.zeros(2), np.array([[np.inf, 0.0]])):
        with pytest.raises(ValueError, match="logits"):
            VIEW.answers(outputs.astype(np.float32), inputs)
    assert len(Answers.none()) == 0


def test_pictures_with_boxes_and_labelled_images_can_be_compared_with_what_looks_like_them() -> None:
    def taken(shade: int) -> Picture:
        boxes = Boxes(np.array([[0, 0, 1, 1], [0, 0, 2, 2]], np.float32), np.array([0, 1]))
        return Picture("a", 1, np.full((2, 2, 3), shade, np.uint8), 0.0, boxes)

    assert (taken(0) == taken(0), taken(0) == taken(1), taken(0) == "a") == (True, False, False)
    assert [taken(1), taken(0)].index(taken(0)) == 1
    images = [
        replayfleet.LabelledImages(np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 1]), ("a", "b")) for _ in range(2)
    ]
    assert images[0] != images[1], "most may not have been read yet"
