from __future__ import annotations

import math

import pytest

from replayfleet.aggregator.rounds.machine import Course, Decision, Phase, RoundRules, Rounds
from replayfleet.aggregator.rounds.opening import Opening, Signs
from replayfleet.federation.errors import SettingsError

RULES = RoundRules(num_clients=3, min_clients=2, deadline_s=60, num_rounds=2)


def test_a_round_closes_with_the_last_expected_client():
    rounds = Rounds(RULES, 0)
    for client in ("a", "b"):
        rounds.accept(client)
        assert rounds.decide(1) is Decision.WAIT
    rounds.accept("c")
    assert rounds.decide(1) is Decision.CLOSE_QUORUM
    assert rounds.phase is Phase.AGGREGATING


def test_a_duplicate_does_not_count_twice():
    rounds = Rounds(RULES, 0)
    assert rounds.accept("a")
    assert not rounds.accept("a")
    assert not rounds.accept("a")
    assert rounds.decide(1) is Decision.WAIT


def test_at_its_deadline_a_round_closes_with_those_who_are_there():
    rounds = Rounds(RULES, 0)
    rounds.accept("a")
    rounds.accept("b")
    assert rounds.decide(59.9) is Decision.WAIT
    assert rounds.decide(60) is Decision.CLOSE_DEADLINE
    assert rounds.accepted == ("a", "b")


def test_a_round_with_too_few_uploads_is_extended_not_closed():
    rounds = Rounds(RULES, 0)
    rounds.accept("a")
    assert rounds.decide(60) is Decision.EXTEND
    assert rounds.is_open
    assert rounds.remaining_s(60) == 60
    assert rounds.decide(61) is Decision.WAIT
    rounds.accept("b")
    assert rounds.decide(120) is Decision.CLOSE_DEADLINE


def test_a_round_without_any_upload_is_extended_for_ever():
    rounds = Rounds(RoundRules(num_clients=1, deadline_s=10), 0)
    assert [rounds.decide(t) for t in (10, 20, 30)] == [Decision.EXTEND] * 3


def test_a_closed_round_takes_no_uploads_and_committing_opens_the_next():
    rounds = Rounds(RULES, 0, accepted=("a", "b", "c"))
    rounds.decide(0)
    with pytest.raises(ValueError, match="takes no uploads"):
        rounds.accept("d")
    rounds.committed(5)
    assert (rounds.index, rounds.phase, rounds.accepted) == (1, Phase.OPEN, ())
    assert rounds.remaining_s(5) == 60


def test_the_last_commit_finishes_the_run_also_after_a_restart():
    rounds = Rounds(RULES, 0, index=1, closed=True)
    rounds.committed(1)
    assert rounds.phase is Phase.FINISHED
    assert Rounds(RULES, 0, index=2).phase is Phase.FINISHED
    assert rounds.decide(1e9) is Decision.WAIT


def committed(interval_s: float, at: float) -> Rounds:
    rounds = Rounds(RoundRules(num_clients=1, deadline_s=60, interval_s=interval_s), 0)
    rounds.accept("a")
    rounds.decide(1)
    rounds.committed(at)
    return rounds


def test_a_round_that_is_not_due_rests_and_its_deadline_stands_still():
    rounds = committed(100, at=10)
    assert (rounds.index, rounds.is_open, rounds.is_paused, rounds.rests_s(10)) == (1, True, True, 90)
    assert (rounds.decide(99), rounds.remaining_s(99)) == (Decision.WAIT, 60)
    assert (rounds.decide(103), rounds.decide(104)) == (Decision.BEGIN, Decision.WAIT)
    assert (rounds.is_paused, rounds.rests_s(104), rounds.remaining_s(104)) == (False, 0, 59)
    rounds.accept("a")
    assert rounds.decide(105) is Decision.CLOSE_QUORUM
    rounds.committed(150)
    assert rounds.rests_s(150) == 50  # from when the round was due, not from when somebody looked


def test_a_round_that_took_longer_than_the_interval_is_followed_at_once():
    assert not committed(100, at=130).is_paused
    late = committed(100, at=130)
    late.accept("a")
    late.decide(131)
    late.committed(140)
    assert late.rests_s(140) == 90


def test_an_operator_may_pause_a_round_that_is_not_due():
    rounds = committed(100, at=10)
    rounds.steer(Course.PAUSED, 20)
    assert (rounds.is_paused, rounds.rests_s(20)) == (True, 0)
    assert rounds.decide(100) is Decision.BEGIN
    assert rounds.is_paused
    rounds.steer(Course.RUNNING, 200)
    assert (rounds.is_paused, rounds.remaining_s(200)) == (False, 60)
    again = committed(100, at=10)
    again.steer(Course.PAUSED, 20)
    again.steer(Course.RUNNING, 30)
    assert (again.is_paused, again.rests_s(30), again.remaining_s(30)) == (True, 70, 60)


def test_the_last_round_rests_for_nobody():
    rounds = Rounds(RoundRules(num_clients=1, num_rounds=1, interval_s=100), 0, accepted=["a"])
    rounds.decide(1)
    rounds.committed(2)
    assert (rounds.phase, rounds.rests_s(2), rounds.decide(200)) == (Phase.FINISHED, 0, Decision.WAIT)


def test_a_round_that_an_operator_opens_waits_for_ever_and_its_deadline_with_it():
    rounds = Rounds(RoundRules(num_clients=1, deadline_s=60, opening=Opening()), 0)
    assert (rounds.is_open, rounds.is_paused, rounds.rests_s(0)) == (True, True, math.inf)
    assert (rounds.decide(1e9), rounds.awaits(1e9)) == (Decision.WAIT, "when an operator opens it")
    rounds.open(1000)
    assert (rounds.is_paused, rounds.remaining_s(1010), rounds.awaits(1010)) == (False, 50, "")
    with pytest.raises(ValueError, match="doesn't wait"):
        rounds.open(1010)
    rounds.accept("a")
    rounds.decide(1011)
    rounds.committed(1012)
    assert (rounds.index, rounds.rests) == (1, True)


def test_the_signs_that_let_a_round_begin_do_not_let_the_next_one():
    rounds = Rounds(RoundRules(num_clients=1, opening=Opening(num_samples=10)), 0)
    rounds.signs = Signs(num_samples=9)
    assert rounds.decide(1) is Decision.WAIT
    rounds.signs = Signs(num_samples=10)
    assert [rounds.decide(2), rounds.decide(2)] == [Decision.BEGIN, Decision.WAIT]
    rounds.accept("a")
    assert rounds.decide(3) is Decision.CLOSE_QUORUM
    rounds.committed(4)
    assert rounds.decide(5) is Decision.WAIT


def test_an_interval_counts_from_when_a_round_was_opened_and_both_are_waited_for():
    rounds = Rounds(RoundRules(num_clients=1, interval_s=100, opening=Opening(num_samples=1)), 0)
    rounds.open(500)
    rounds.accept("a")
    rounds.decide(501)
    rounds.committed(502)
    assert rounds.awaits(502).startswith("when 1 more labelled sample waits")
    rounds.signs = Signs(num_samples=5)
    assert (rounds.rests_s(502), rounds.awaits(502)) == (98, "in 98 s"), "the interval is all that it waits for"
    assert rounds.rests_s(700) == 1, "due and not begun, as on a full disk: no operator paused it"
    assert [rounds.decide(now) for now in (599, 600)] == [Decision.WAIT, Decision.BEGIN]


def test_a_round_that_began_before_a_restart_does_not_wait_again():
    rules = RoundRules(num_clients=1, opening=Opening())
    assert not Rounds(rules, 0, begun=True).rests
    assert not Rounds(rules, 0, closed=True).rests


def test_an_open_round_can_not_be_committed():
    with pytest.raises(ValueError, match="can't be committed"):
        Rounds(RULES, 0).committed(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_clients": 0},
        {"min_clients": 0},
        {"min_clients": 4},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"num_rounds": 0},
    ],
)
def test_impossible_rules_are_refused(wrong: dict[str, float]):
    with pytest.raises(SettingsError):
        RoundRules(**{"num_clients": 3, **wrong})
