"""A round's pace with a clock of numbers."""

from __future__ import annotations

import pytest

from replayfleet.devices.budget import Speed, TrainingAllowance, Work
from replayfleet.edge_client.learning.training.job import TrainCourse
from replayfleet.edge_client.learning.training.pacing import DeadlinePace, unit_of
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.pace import ShouldStop, Stage
from replayfleet.models.specs import TaskSpec

MEASURED = Speed(task_step_s=0.1, sub_generator_step_s=0.1, other_s=0.0)


class Rig:
    """A pace whose steps take as long as the test says."""

    def __init__(self, left_s: float | None, speed: Speed = MEASURED) -> None:
        self.now = 100.0
        self.said: list[TrainCourse] = []
        self.pace = DeadlinePace(
            3,
            TrainingAllowance(),
            Work(task_gflop=1.0, sub_generator_gflop=1.0),
            speed,
            None if left_s is None else self.now + left_s,
            clock=lambda: self.now,
            say=self.said.append,
        )

    def run(self, should_stop: ShouldStop, stage: Stage, step_s: float) -> int:
        """Train; returns the steps that it came to."""
        for step in range(1, stage.num_steps + 1):
            self.now += step_s
            if should_stop():
                return step
        return stage.num_steps


def test_a_round_that_fits_is_trained_whole_and_measured() -> None:
    rig = Rig(100.0)
    task, sub_generator = Stage(2, 10), Stage(3, 10)
    assert rig.run(rig.pace.task_model(task, [sub_generator]), task, 0.2) == 20
    should_stop = rig.pace.sub_generator(sub_generator, [])
    assert should_stop is not None
    assert rig.run(should_stop, sub_generator, 0.5) == 30
    rig.now += 3.0
    speed = rig.pace.finish()
    assert (speed.task_step_s, speed.sub_generator_step_s) == pytest.approx((0.2, 0.5))
    assert speed.other_s == pytest.approx(3.0)
    assert rig.said[-1] == TrainCourse(3, 2.0, 2, 1, 1, done=True)
    assert rig.said[-1].text() == "epochs 2 of 2, 1 of 1 sub-generators"
    assert not any(course.is_short for course in rig.said)


def test_a_device_slower_than_it_was_measured_still_ends_in_time() -> None:
    rig = Rig(6.0)
    task, new, drifted = Stage(8, 5), Stage(8, 5), Stage(8, 5, can_wait=True)
    assert rig.run(rig.pace.task_model(task, [new]), task, 0.3) == 10  # 3 of 6 s are the task model's
    assert rig.said[0].text() == "epochs 6 of 8, 1 of 1 sub-generators now"
    should_stop = rig.pace.sub_generator(new, [drifted])
    assert should_stop is not None
    assert rig.run(should_stop, new, 0.3) == 10
    assert rig.pace.sub_generator(drifted, []) is None
    assert rig.now <= 106.0
    rig.pace.finish()
    assert rig.said[-1].text() == "epochs 2 of 8, 1 of 2 sub-generators"
    assert rig.said[-1].lost == 0
    assert rig.said[-1].is_short


def test_new_classes_without_time_are_told_as_lost() -> None:
    rig = Rig(1.04)
    task, new = Stage(1, 5), Stage(10, 4)
    rig.run(rig.pace.task_model(task, [new] * 3), task, 0.1)
    assert rig.said[0].text() == "epochs 0.1 of 1, 2 of 3 sub-generators now, 1 new not learned"
    learned = []
    for num_ahead in (2, 1, 0):
        should_stop = rig.pace.sub_generator(new, [new] * num_ahead)
        learned.append(should_stop is not None and rig.run(should_stop, new, 0.1))
    assert learned == [5, 4, False]
    rig.pace.finish()
    assert rig.said[-1].text() == "epochs 0.2 of 1, 2 of 3 sub-generators, 1 new not learned"


def test_without_time_training_stops_after_a_step_and_says_that_it_is_late() -> None:
    rig = Rig(0.0)
    task = Stage(8, 5)
    assert rig.run(rig.pace.task_model(task, []), task, 0.1) == 1
    rig.pace.finish()
    assert rig.said[-1].text() == "epochs 0.2 of 8, late"


def test_a_drifted_sub_generator_that_fits_is_never_called_short() -> None:
    rig = Rig(100.0)
    task, drifted = Stage(1, 5), Stage(2, 5, can_wait=True)
    rig.run(rig.pace.task_model(task, []), task, 0.1)
    assert rig.pace.sub_generator(drifted, []) is not None
    rig.pace.finish()
    assert [course.is_short for course in rig.said] == [False, False, False]


def test_a_first_round_that_began_with_a_hiccup_still_uses_its_time() -> None:
    rig = Rig(100.0, Speed())
    task, new = Stage(1, 5), Stage(100, 10)
    rig.run(rig.pace.task_model(task, [new] * 2), task, 10.0)  # at that speed not a hundredth of a sub-generator fits
    should_stop = rig.pace.sub_generator(new, [new])
    assert should_stop is not None
    assert rig.run(should_stop, new, 0.01) == 1000
    assert rig.pace.sub_generator(new, []) is not None  # as fast as the one before it
    rig.pace.finish()
    assert rig.said[-1].text() == "epochs 0.2 of 1, 2 of 2 sub-generators"


def test_in_a_first_round_the_task_models_steps_tell_how_long_those_of_sub_generators_take() -> None:
    rig = Rig(100.0, Speed())
    task, new = Stage(1, 10), Stage(100, 10)
    rig.run(rig.pace.task_model(task, [new]), task, 0.01)
    assert rig.pace.sub_generator(new, [new] * 9) is not None  # as dear as the task model's steps: 10 s each
    assert rig.said[-1].lost == 0
    rig = Rig(100.0, Speed())
    rig.run(rig.pace.task_model(task, [new]), task, 0.1)
    rig.pace.sub_generator(new, [new] * 9)
    assert rig.said[-1].lost == 2  # 100 s each, of which a tenth for 8 fits into 89


def test_without_a_deadline_nothing_is_cut() -> None:
    rig = Rig(None)
    task = Stage(8, 5)
    assert rig.run(rig.pace.task_model(task, []), task, 1e6) == 40
    assert rig.pace.sub_generator(Stage(1, 1, can_wait=True), []) is not None


def test_what_everything_else_takes_is_kept_free_until_it_was_spent() -> None:
    rig = Rig(10.0, Speed(0.1, 0.1, other_s=4.0))
    task, drifted = Stage(1, 10), Stage(1, 50, can_wait=True)
    rig.run(rig.pace.task_model(task, []), task, 0.1)
    rig.now += 3.9  # the gate
    assert rig.pace.sub_generator(drifted, []) is not None  # 5 s of 5.1 s, 0.1 s of which are still to come


def test_a_steps_cost_is_counted_for_every_kind_of_method() -> None:
    spec = TaskSpec(1, 28, ("a", "b"), generator_width=2)
    for name in ("pfedgrp", "fedavg"):
        unit = unit_of(METHODS[name](task=spec, batch_size=8), 2)
        assert unit.task_gflop > 0
        assert (unit.sub_generator_gflop > 0) == (name == "pfedgrp")
        assert unit.num_threads == 2
