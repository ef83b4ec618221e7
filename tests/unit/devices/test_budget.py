"""What fits into a round's time: numbers alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfleet.devices.budget import (
    MIN_SHARE,
    Plan,
    Speed,
    TrainingAllowance,
    Work,
    plan,
    smaller_batch,
    upload_reserve_s,
)

BOARD = TrainingAllowance(core_gflops=2.0)
MEASURED = Speed(task_step_s=0.1, sub_generator_step_s=0.05, other_s=1.0)


def planned(left_s: float | None, work: Work, speed: Speed = MEASURED) -> Plan:
    return plan(BOARD, left_s, speed, work)


def test_without_a_deadline_everything_has_its_full_length() -> None:
    assert planned(None, Work(task_steps=5, new=(9,), drifted=(7, 7))) == Plan(
        math.inf, 1.0, (math.inf,), (math.inf, math.inf)
    )


def test_a_round_that_fits_is_not_shortened_and_slack_is_shared() -> None:
    found = planned(21.0, Work(task_steps=50, new=(100,)))  # 5 s and 5 s of 20 s
    assert found.task_share == 1.0
    assert found.task_s == pytest.approx(10.0)
    assert found.new_s == pytest.approx((10.0,))
    assert found.in_time


def test_what_cannot_wait_shares_the_time_in_proportion() -> None:
    found = planned(4.0, Work(task_steps=50, new=(100, 40), drifted=(10,)))  # 5 + 5 + 2 s into 3 s
    assert found.task_share == pytest.approx(0.25)
    assert (found.task_s, *found.new_s) == pytest.approx((1.25, 1.25, 0.5))
    assert found.drifted_s == (0.0,)
    assert found.num_now == 2


def test_without_any_time_nothing_but_a_first_step_is_left() -> None:
    for left_s in (0.0, 0.5, 1.0):
        found = planned(left_s, Work(task_steps=50, new=(100,), drifted=(100,)))
        assert found == Plan(0.0, 0.0, (0.0,), (0.0,), in_time=False)


def test_a_hundred_new_classes_of_which_few_fit_get_a_tenth_of_their_length_each() -> None:
    found = planned(6.5, Work(task_steps=50, new=(200,) * 100))  # 0.1 of 5 s + n * 0.1 of 10 s <= 5.5 s: n = 5
    assert found.num_now == 5
    assert found.new_s[5:] == (0.0,) * 95
    assert found.new_s[0] == pytest.approx(MIN_SHARE * 10.0)
    assert found.task_s + sum(found.new_s) == pytest.approx(5.5)


def test_the_first_new_class_has_all_time_that_nothing_else_would_use() -> None:
    found = planned(1.5, Work(new=(200, 200), drifted=(20,)))  # 0.5 s, half of a tenth of 10 s
    assert found.new_s == pytest.approx((0.5, 0.0))
    assert found.drifted_s == (0.0,)
    assert planned(1.04, Work(new=(200,))).new_s == (0.0,)  # less than a step
    assert planned(1.5, Work(task_steps=50, new=(200,))).new_s == (0.0,)  # the task model uses it


def test_drifted_sub_generators_are_trained_whole_and_worst_first_in_time_that_is_left_over() -> None:
    found = planned(6.0, Work(new=(40,), drifted=(20, 30, 10)))  # 2 s are due; 1 s, 1.5 s and 0.5 s may follow
    assert found.num_now == 4
    assert found.drifted_s == pytest.approx((1.0, 1.5, 0.5))
    assert planned(5.0, Work(new=(40,), drifted=(20, 30, 10))).drifted_s == (2.0, 0.0, 0.0)  # with the slack


def test_a_device_that_never_has_time_for_a_whole_one_trains_the_worst_in_part() -> None:
    found = planned(3.0, Work(drifted=(100, 60)))  # 2 s for one of 5 s
    assert found.drifted_s == pytest.approx((2.0, 0.0))
    assert planned(1.4, Work(drifted=(100, 60))).drifted_s == (0.0, 0.0)  # less than a tenth isn't worth a start


def test_a_speed_that_was_never_measured_is_guessed_from_the_board() -> None:
    work = Work(task_steps=10, new=(10,), task_gflop=4.0, sub_generator_gflop=1.0, num_threads=2)
    found = plan(BOARD, 10.0, Speed(), work)  # 1 s and 0.25 s a step; a tenth of the time for all else
    assert found.task_share == pytest.approx(9.0 / 12.5)
    assert (found.task_s, *found.new_s) == pytest.approx((9.0 * 10 / 12.5, 9.0 * 2.5 / 12.5))
    assert plan(BOARD, 10.0, Speed(), replace(work, task_gflop=0.0, sub_generator_gflop=0.0)).task_share == 1.0


def test_a_training_of_no_steps_still_has_its_turn() -> None:
    assert planned(5.0, Work(new=(0,))).num_now == 1
    assert planned(5.0, Work(drifted=(0,))).num_now == 1


@given(
    left_s=st.floats(0, 1e4, allow_subnormal=False),
    task_steps=st.integers(0, 10_000),
    new=st.lists(st.integers(1, 10_000), max_size=20),
    drifted=st.lists(st.integers(1, 10_000), max_size=20),
)
def test_a_plan_never_spends_more_than_there_is(
    left_s: float, task_steps: int, new: list[int], drifted: list[int]
) -> None:
    found = planned(left_s, Work(task_steps, tuple(new), tuple(drifted)))
    spent = found.task_s + sum(found.new_s)
    assert spent <= max(0.0, left_s - 1.0) * (1 + 1e-9)
    assert sum(found.drifted_s) <= max(0.0, left_s - 1.0) * (1 + 1e-9)
    assert 0 <= found.task_share <= 1
    assert len(found.new_s) == len(new)
    if any(found.drifted_s):
        assert found.task_share == 1.0


def test_speeds_are_the_mean_of_what_was_known_and_what_was_measured() -> None:
    assert Speed(1.0, None, 3.0).mixed_with(Speed(2.0, 5.0, None)) == Speed(1.5, 5.0, 3.0)


def test_batches_are_halved_down_to_eight() -> None:
    assert [smaller_batch(size) for size in (64, 17, 16, 15, 1)] == [32, 8, 8, None, None]


def test_time_is_kept_for_the_upload_but_never_more_than_half() -> None:
    assert upload_reserve_s(100.0, None) == pytest.approx(10.0)
    assert upload_reserve_s(100.0, 4.0) == pytest.approx(8.5)
    assert upload_reserve_s(10.0, 40.0) == pytest.approx(5.0)


def test_an_allowance_refuses_what_cannot_be_and_gives_at_least_one_thread() -> None:
    assert [TrainingAllowance(core_share=0.5).threads(cores) for cores in (1, 2, 3, 12)] == [1, 1, 1, 6]
    for wrong in (
        {"core_share": 0.0},
        {"core_share": math.nan},
        {"memory_bytes": 0},
        {"core_gflops": 0.0},
        {"max_temperature_c": -1.0},
        {"max_power_w": math.inf},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TrainingAllowance(**wrong)
