from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Inputs
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.serving.memory_watch import MemoryWatch
from replayfleet.edge_client.serving.probation.comparison import MIN_ANSWERS, MIN_TIMED, WINDOW, Compared, Comparisons
from replayfleet.edge_client.serving.probation.guard import Answered, Guard
from replayfleet.edge_client.serving.probation.probation import Probation, ProbationRules
from replayfleet.edge_client.serving.slot import Candidate, Model, ModelLost, ModelSlot
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.models.specs import TaskSpec

MB = 1 << 20
TASK = TaskSpec(1, 28, ("cat", "dog", "emu"), generator_width=1)


def says(class_id: int, confidence: float = 0.9) -> Answers:
    return Answers(np.array([class_id]), np.array([confidence], np.float32))


def found(*class_ids: int) -> Answers:
    return Answers(
        np.array(class_ids, np.int64),
        np.full(len(class_ids), 0.9, np.float32),
        np.zeros((len(class_ids), 4), np.float32),
    )


def comparisons(new: Sequence[Answers], before: Sequence[Answers], num: int = MIN_ANSWERS) -> Comparisons:
    made = Comparisons()
    for this, that in itertools.islice(zip(itertools.cycle(new), itertools.cycle(before), strict=False), num):
        made.add(Compared(this, that, 0.001, 0.001))
    return made


SURE = [says(0, 0.85), says(1, 0.95), says(2, 0.9)]


def test_a_model_that_knows_one_class_where_its_predecessor_told_three_apart_has_drifted() -> None:
    one = [says(1, 0.7), says(1, 0.9)]
    assert f"100 % of {MIN_ANSWERS} with class 1" in comparisons(one, SURE).drift()
    assert comparisons(one, SURE, MIN_ANSWERS - 1).drift() == ""
    assert comparisons([*one, says(2)], SURE).drift() == ""


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ([says(0), says(1)] * 5, "it told only two classes apart, like a scene that flickers between them"),
        ([says(0), says(1), says(2)] + [says(1)] * 30, "nearly all it said was that class anyway"),
        ([says(0, 0.4), says(1, 0.5), says(2, 0.6)], "it was not sure, as after a first round"),
        ([says(0), says(3), says(2)], "it never said that class: the new model has just learned it"),
    ],
)
def test_answers_that_continual_learning_explains_are_no_drift(before: list[Answers], why: str) -> None:
    assert comparisons([says(1, 0.7), says(1, 0.9)], before, WINDOW).drift() == "", why


def test_many_boxes_of_few_pictures_are_not_enough() -> None:
    one, three = [found(*[1] * 9)], [found(*[0, 1, 2] * 3)]
    assert comparisons(one, three, MIN_ANSWERS - 1).drift() == ""
    assert "100 % of" in comparisons(one, three).drift()
    assert not comparisons(one, three, MIN_ANSWERS - 1).complete, "more pictures are still compared as they come"
    assert comparisons(one, three).complete


def test_a_model_whose_answer_no_picture_changes_has_drifted_whatever_class_it_names() -> None:
    assert "confidence 0.4000" in comparisons([says(7, 0.4)], [says(0, 0.3), says(0, 0.5)]).drift()
    assert comparisons([says(7, 0.4)], [says(0, 0.40), says(0, 0.44)]).drift() == "", "the scene stands still"
    assert comparisons([says(7, 1.0)], [says(0, 0.3), says(0, 0.5)]).drift() == "", "it is sure of what it sees"


def test_a_detector_that_finds_nothing_or_everything_has_drifted() -> None:
    assert f"finds nothing in {MIN_ANSWERS}" in comparisons([found()], [found(1, 2), found(1)]).drift()
    assert comparisons([found()], [found(), found(1)]).drift() == "", "an empty road"
    assert comparisons([found(), found(2)], [found(1)]).drift() == ""
    assert "finds 60 objects" in comparisons([found(*range(60))], [found(1, 2)]).drift()
    assert comparisons([found(*range(60))], [found(*range(20))]).drift() == "", "a crowd"


def test_a_model_five_times_as_slow_at_the_same_time_is_too_slow() -> None:
    for new_s, before_s, slow in ((0.2, 0.02, True), (0.06, 0.02, False), (0.03, 0.001, False)):
        made = Comparisons()
        for _ in range(MIN_TIMED):
            made.add(Compared(says(0), says(0), new_s, before_s))
        assert bool(made.slowness()) is slow


@pytest.mark.parametrize(
    ("times_s", "slow"),
    [
        ([0.1] * 5, True),
        ([0.1] * 4, False),
        ([0.6] * 2, False),
        ([0.1] * 9 + [0.02], False),
        ([0.3, 0.2, 0.056], True),
        ([0.3, 0.2, 0.054], False),
    ],
)
def test_a_model_that_is_too_slow_for_every_picture_is_so_after_half_a_second(times_s: list[float], slow: bool) -> None:
    made = Comparisons()
    for new_s in times_s:
        made.add(Compared(says(0), says(0), new_s, 0.001))
    assert bool(made.slowness()) is slow


def test_probation_is_passed_after_its_time_and_its_pictures_or_after_long_enough() -> None:
    rules = ProbationRules(duration_s=30, num_answered=100, at_most_s=600)
    probation = Probation(7, 1000.0, rules)
    probation.answered(99)
    assert not probation.passed(1599.0)
    assert probation.passed(1600.0)
    probation.answered(1)
    assert probation.passed(1030.0)
    assert not probation.passed(1029.0)


def test_a_camera_of_one_picture_a_second_confirms_a_version_within_a_round_of_a_minute() -> None:
    probation = Probation(7, 0.0, ProbationRules())
    probation.answered(33)
    assert probation.passed(30.0)


def test_the_golden_vector_is_looked_at_once_in_a_while() -> None:
    probation = Probation(1, 100.0, ProbationRules(check_every_s=5.0))
    assert [probation.checks(now) for now in (104.9, 105.0, 105.1, 109.9, 110.0)] == [False, True, False, False, True]


def test_pictures_are_compared_often_until_enough_are_known_and_then_seldom() -> None:
    probation = Probation(7, 0.0, ProbationRules(compare_every_s=0.01, compare_later_s=0.5))
    assert not probation.compares(0.005)
    now = 0.0
    for _ in range(WINDOW):
        now += 0.0101
        assert probation.compares(now)
        probation.compared(Compared(says(0), says(0), 0.001, 0.001), now)
    assert not probation.compares(now + 0.4)
    assert probation.compares(now + 0.5)


class Changing:
    """A model whose answers a test changes after its probe."""

    def __init__(self, *logits: float) -> None:
        self.logits: tuple[float, ...] | Exception = logits

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        if isinstance(self.logits, Exception):
            raise self.logits
        return np.tile(np.array(self.logits, np.float32), (len(images), 1))


def check(model: Model) -> None:
    if model(np.zeros((2, 1, 28, 28), np.float32))[0, 0] != 1:
        raise ArtefactRejected(Reason.PROBE_MISMATCH, "off")


def watched(*models: Model, **rules: float) -> tuple[ModelSlot, Guard]:
    slot = ModelSlot()
    for version, model in enumerate(models):
        slot.install(Candidate(version, version, TASK.image_shape, lambda model=model: model, check))  # type: ignore[misc]
    return slot, Guard(slot, ProbationRules(**rules), clock=lambda: 0.0)  # type: ignore[arg-type]


def follow(slot: ModelSlot, version: int) -> None:
    slot.install(Candidate(version, version, TASK.image_shape, lambda: Changing(1, 0, 0), check))


def sample(slot: ModelSlot) -> Answered:
    assert slot.active is not None
    view = WholePicture(TASK)
    inputs = Inputs(np.zeros((1, 1, 28, 28), np.float32))
    return Answered(slot.active, view, inputs, view.answers(slot.active.model(inputs.images), inputs), 0.001)


def test_a_guard_confirms_a_model_that_showed_nothing_bad() -> None:
    slot, guard = watched(Changing(1, 0, 0), Changing(1, 0, 0), duration_s=10.0, num_answered=3)
    guard.tick(100.0)
    for _ in range(3):
        guard.saw(sample(slot))
    guard.tick(105.0)
    assert slot.on_probation is not None
    guard.tick(111.0)
    assert slot.on_probation is None
    assert slot.num_rollbacks == 0


def test_each_version_is_watched_for_its_own_time_and_by_its_own_answers() -> None:
    slot, guard = watched(Changing(1, 0, 0), Changing(1, 0, 0), duration_s=10.0, num_answered=3)
    guard.tick(100.0)
    before = sample(slot)
    for _ in range(3):
        guard.saw(before)
    follow(slot, 2)
    guard.tick(109.0)  # what the version before it answered
    guard.tick(120.0)
    assert slot.on_probation is not None, "nothing asked this one"
    for _ in range(2):
        guard.saw(sample(slot))
    follow(slot, 3)
    guard.saw(before)
    for _ in range(2):
        guard.saw(sample(slot))
    guard.tick(121.0)
    guard.tick(140.0)
    assert slot.on_probation is not None, "two answers are its own"
    guard.saw(sample(slot))
    follow(slot, 4)
    for _ in range(3):
        guard.saw(sample(slot))
    guard.tick(141.0)
    guard.tick(150.0)
    assert slot.on_probation is not None, "it has served for nine seconds"
    guard.tick(151.0)
    assert slot.on_probation is None


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ((9.0, 0.0, 0.0), Reason.PROBE_MISMATCH),
        (ModelLost("SIGSEGV"), Reason.CRASHED),
        (ModelLost("silent", hung=True), Reason.HUNG),
        (RuntimeError("gpu gone"), Reason.FAILING),
    ],
)
def test_a_guard_asks_for_the_golden_vector_again_and_rolls_back(
    later: tuple[float, ...] | Exception, reason: Reason
) -> None:
    turning = Changing(1, 0, 0)
    slot, guard = watched(Changing(1, 0, 0), turning, check_every_s=5.0)
    guard.tick(100.0)
    turning.logits = later
    guard.tick(104.0)
    assert slot.num_rollbacks == 0
    guard.tick(105.0)
    assert slot.last_rollback.reason is reason


def test_a_guard_that_finds_no_process_for_the_golden_vector_rolls_nothing_back() -> None:
    turning = Changing(1, 0, 0)
    slot, guard = watched(Changing(1, 0, 0), turning, check_every_s=5.0)
    guard.tick(100.0)
    turning.logits = OSError("no memory is left")
    guard.tick(105.0)
    assert (slot.num_rollbacks, slot.on_probation.version) == (0, 1)
    guard.tick(100.0 + ProbationRules().at_most_s)
    assert slot.on_probation is not None, "nothing says that it can serve"
    turning.logits = (1, 0, 0)
    guard.tick(105.0 + ProbationRules().at_most_s)
    assert slot.on_probation is None


def test_a_guard_compares_the_same_picture_with_the_predecessor() -> None:
    slot, guard = watched(Changing(1, 2, 0), Changing(1, 0, 0))
    guard.tick(0.0)
    assert slot.previous is not None
    asked: list[int] = []
    before = slot.previous.model

    def asks(images: NDArray[np.float32]) -> NDArray[np.float32]:
        asked.append(len(images))
        level = 2 + 3 * (len(asked) % 2)
        return np.array([[0, level, 0]], np.float32)

    object.__setattr__(slot.previous, "model", asks)
    for turn in range(1, MIN_ANSWERS + 1):
        guard.saw(sample(slot))
        guard.tick(turn * 0.02)
    assert len(asked) == MIN_ANSWERS
    assert slot.last_rollback is not None, "its answer never changes, that of its predecessor does"
    assert slot.last_rollback.reason is Reason.DRIFTED
    assert before is not None


def test_a_predecessor_that_fails_is_nothing_against_the_new_model(caplog: pytest.LogCaptureFixture) -> None:
    fails = Changing(1, 0, 0)
    slot, guard = watched(fails, Changing(1, 0, 0))
    fails.logits = RuntimeError("gone")
    for turn in range(2 * MIN_ANSWERS):
        guard.saw(sample(slot))
        guard.tick(turn * 0.02)
    assert slot.num_rollbacks == 0
    assert slot.on_probation is not None
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["not compared"], "one line for many pictures"


def test_growth_counts_from_what_a_process_needs_once_it_has_settled() -> None:
    watch = MemoryWatch(limit_bytes=10 * MB, settles_s=2.0)
    assert watch.excess(7, 40 * MB, 0.0) is None
    assert watch.excess(7, 60 * MB, 2.0) is None, "the baseline"
    assert watch.excess(7, 70 * MB, 3.0) is None
    assert watch.excess(7, 71 * MB, 4.0) == 11 * MB
    assert watch.excess(8, 90 * MB, 5.0) is None, "a fresh process has a baseline of its own"
    assert watch.excess(None, None, 6.0) is None


def test_a_model_that_grows_again_soon_gets_more_room() -> None:
    watch = MemoryWatch(limit_bytes=10 * MB, settles_s=0.0)
    now = 0.0
    needed: list[int] = []
    for pid in range(7):
        watch.excess(pid, 0, now)
        needed.append(next(mb for mb in itertools.count(1) if watch.excess(pid, mb * MB, now) is not None))
        now += 60.0
    assert needed == [11, 11, 21, 41, 81, 161, 161]
    watch.excess(9, 0, now + 3600)
    watch.excess(9, 200 * MB, now + 3600)
    watch.excess(10, 0, now + 3700)
    assert watch.excess(10, 11 * MB, now + 3700) == 11 * MB, "that was long ago"


def test_memory_is_looked_at_once_in_a_while() -> None:
    watch = MemoryWatch(look_every_s=1.0)
    assert [watch.due(now) for now in (0.0, 0.5, 1.0, 1.9, 2.0)] == [True, False, True, False, True]
