"""Token buckets, with time as a number."""

from __future__ import annotations

import pytest

from replayfleet.federation.service.quotas import Limiter, TokenBucket


def test_a_burst_passes_and_then_as_much_as_flows_in():
    bucket = TokenBucket(per_s=2, burst=5)
    assert [bucket.take(1, 0) for _ in range(6)] == [True] * 5 + [False]
    assert [bucket.take(1, 1) for _ in range(3)] == [True, True, False]


def test_what_was_not_used_is_kept_up_to_the_burst():
    bucket = TokenBucket(per_s=2, burst=5)
    bucket.take(5, 0)
    assert [bucket.take(1, 1000) for _ in range(6)] == [True] * 5 + [False]


def test_a_refusal_costs_nothing():
    bucket = TokenBucket(per_s=1, burst=4)
    assert not bucket.take(5, 0)
    assert bucket.take(4, 0)


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_no_number_takes_more_than_there_is(cost: float):
    assert not TokenBucket(1, 4).take(cost, 0)


def test_a_clock_that_runs_backwards_fills_nothing_and_takes_nothing():
    bucket = TokenBucket(per_s=1, burst=2)
    assert [bucket.take(1, now) for now in (10, 5, 5)] == [True, True, False]


def test_keys_do_not_share_and_what_was_left_out_is_told_once():
    limiter = Limiter(per_s=1, burst=2, told_every_s=10)
    assert [limiter.admit("a", 0) for _ in range(5)] == [True, True, False, False, False]
    assert limiter.admit("b", 0)
    assert limiter.left_out(9) == []
    assert limiter.left_out(10) == [("a", 3)]
    assert limiter.left_out(20) == []


def test_made_up_keys_take_no_more_room_than_others():
    limiter = Limiter(per_s=1, burst=1, max_keys=10)
    for number in range(1000):
        limiter.admit(number, 0)
        limiter.admit(number, 0)
    assert len(limiter.left_out(100)) <= 10
