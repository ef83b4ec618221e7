from __future__ import annotations

import pytest

from replayfleet.aggregator.rounds import Decision, Phase, RoundRules, Rounds
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
