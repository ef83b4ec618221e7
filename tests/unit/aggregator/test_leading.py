from __future__ import annotations

from typing import Any

import pytest

from replayfleet.aggregator.leading import (
    ANSWER_S,
    LISTEN_S,
    PATIENCE_S,
    SILENT_S,
    Claim,
    Deed,
    Leadership,
)
from replayfleet.federation.wire.protocol.messages import Announcement, FleetSpec

SPEC = FleetSpec("fleet", "fedavg", {}, {}, 0)


def said(instance: str, round_index: int = 0, state: Any = "open", epoch: int = 0) -> Announcement:
    return Announcement(instance, round_index, state, 0.0, SPEC, epoch)


def begun(home: str = "mm", epoch: int = 0, round_index: int = 0, claim: Claim = Claim.ASK) -> Leadership:
    made = Leadership(home, "1", (epoch, round_index), claim)
    assert made.connected(0.0) is Deed.NOTHING
    return made


def test_who_is_alone_with_its_broker_leads_at_once() -> None:
    alone = Leadership("mm", "1", (0, 0), Claim.SOLE)
    assert alone.connected(0.0) is Deed.LEAD
    assert (alone.leads, alone.epoch) == (True, 0)


def test_a_fleet_that_nobody_led_is_led_after_a_moment() -> None:
    first = begun()
    assert first.tick(LISTEN_S - 0.1) is Deed.NOTHING
    assert first.tick(LISTEN_S) is Deed.LEAD
    assert first.epoch == 0


@pytest.mark.parametrize("state", ["open", "aggregating", "offline"])
def test_a_restart_on_the_same_data_dir_leads_at_once_in_the_same_epoch(state: str) -> None:
    again = begun(round_index=5)
    assert again.heard(said("mm-0", 5, state), 0.1) is Deed.LEAD
    assert again.epoch == 0


def test_a_data_dir_that_was_put_back_by_hand_leads_in_another_epoch() -> None:
    behind = begun(round_index=3)
    assert behind.heard(said("mm-0", 5), 0.1) is Deed.LEAD
    assert behind.epoch == 1


def test_a_new_store_in_place_of_a_lost_one_leads_in_another_epoch() -> None:
    fresh = begun("new")
    assert fresh.heard(said("old-0", 7, "offline", epoch=2), 0.1) is Deed.LEAD
    assert fresh.epoch == 3


def test_a_restored_store_leads_at_once_whoever_else_does() -> None:
    restored = begun("new", epoch=1, round_index=3)
    assert restored.heard(said("old-0", 7), 0.1) is Deed.LEAD
    assert restored.epoch == 1


def test_a_second_aggregator_asks_and_stands_by_when_the_first_answers() -> None:
    second, first = begun("zz", round_index=3), begun()
    first.tick(LISTEN_S)
    assert second.heard(said(first.instance, 4), 0.1) is Deed.ASK
    assert first.heard(said(second.instance, 0, "standby"), 0.2) is Deed.ANSWER
    assert second.tick(0.3) is Deed.NOTHING
    assert second.heard(said(first.instance, 4), 0.4) is Deed.STAND_BY
    assert "standing by" in second.notice
    assert not second.yields_to_a_copy
    assert second.tick(SILENT_S) is Deed.NOTHING
    assert second.heard(said(first.instance, 5), SILENT_S) is Deed.NOTHING
    assert second.tick(2 * SILENT_S - 0.1) is Deed.NOTHING
    assert second.tick(2 * SILENT_S) is Deed.LEAD, "the first one fell silent"
    assert (second.epoch, second.notice) == (1, "")


@pytest.mark.parametrize(("round_index", "answer_s"), [(3, ANSWER_S), (0, SILENT_S)])
def test_nobody_answers_for_a_leader_that_was_killed_a_moment_ago(round_index: int, answer_s: float) -> None:
    second = begun("zz", round_index=round_index)
    assert second.heard(said("mm-1", 4), 0.5) is Deed.ASK
    assert second.tick(0.5 + answer_s - 0.1) is Deed.NOTHING
    assert second.tick(0.5 + answer_s) is Deed.LEAD
    assert second.epoch == 1


def test_a_leader_that_says_goodbye_has_a_moment_to_come_back() -> None:
    second = begun("zz", round_index=3)
    for _ in range(2):
        second.heard(said("mm-1", 4), 0.5)
    second.heard(said("mm-1", 4, "offline"), 10.0)
    assert second.tick(10.0 + PATIENCE_S - 0.1) is Deed.NOTHING
    second.heard(said("mm-2", 4), 12.0)
    assert second.tick(10.0 + PATIENCE_S) is Deed.NOTHING
    second.heard(said("mm-2", 4, "offline"), 20.0)
    assert second.tick(20.0 + PATIENCE_S) is Deed.LEAD


def standing_by(round_index: int, led: int) -> Leadership:
    spare = begun("spare", round_index=round_index)
    for now in (0.1, 0.2):
        spare.heard(said("first-0", led), now)
    assert spare.stands_by
    return spare


@pytest.mark.parametrize("state", ["open", "offline"])
def test_a_spare_without_a_round_never_throws_away_what_the_fleet_learned(state: str) -> None:
    spare = standing_by(0, 7)
    spare.heard(said("first-0", 0, state), 0.3)  # a last will says the round of its process's start
    assert spare.tick(SILENT_S + PATIENCE_S + 1) is Deed.NOTHING
    assert "holds no round of it and won't take over, but with --take-over" in spare.notice


def test_a_spare_says_how_far_it_is_behind() -> None:
    spare = standing_by(3, 7)
    assert "from round 3: its store is 4 behind" in spare.notice
    assert spare.tick(SILENT_S + 1) is Deed.LEAD
    spare.heard(said("first-0", 9, epoch=2), SILENT_S + 2)
    assert spare.stands_by
    assert "behind" not in spare.notice  # nobody looked into its store since


def test_a_spare_of_a_fleet_that_hasnt_closed_a_round_takes_over() -> None:
    assert standing_by(0, 0).tick(SILENT_S + 1) is Deed.LEAD


def test_of_two_that_lead_the_lower_epoch_steps_back_and_the_other_says_its_word_again() -> None:
    low, high = begun("mm"), begun("aa", epoch=1)
    for each in (low, high):
        each.tick(LISTEN_S)
    assert high.heard(said(low.instance, 9), 2.0) is Deed.ANSWER
    assert low.heard(said(high.instance, 3, epoch=1), 2.0) is Deed.STAND_BY
    assert not low.leads
    equal = begun("aa")
    equal.tick(LISTEN_S)
    assert equal.heard(said("mm-1"), 2.0) is Deed.STAND_BY, "one of two, the same one for both"


def test_the_will_of_a_leader_says_the_epoch_of_its_start_and_who_takes_over_leads_above_that_which_it_led_in() -> None:
    spare = begun("spare", epoch=2, round_index=9)
    spare.heard(said("first-0", 10, epoch=3), 0.1)
    spare.heard(said("first-0", 10, epoch=3), 0.2)
    assert not spare.leads
    spare.heard(said("first-0", 0, "offline", epoch=1), 1.0)
    assert spare.tick(1.0 + PATIENCE_S) is Deed.LEAD
    assert spare.epoch == 4


def test_a_late_will_is_answered() -> None:
    leader = begun("mm")
    leader.tick(LISTEN_S)
    assert leader.heard(said("mm-0", 3, "offline"), 2.0) is Deed.ANSWER
    assert leader.heard(said(leader.instance, 3), 2.0) is Deed.NOTHING, "its own word, echoed"


def test_a_copy_of_the_data_dir_is_told_from_another_store() -> None:
    leader = begun("mm")
    leader.tick(LISTEN_S)
    assert leader.heard(said("mm-9", 3), 2.0) is Deed.STAND_BY
    assert leader.yields_to_a_copy


def test_take_over_leads_above_whoever_leads() -> None:
    insisting = begun("zz", claim=Claim.TAKE_OVER)
    assert insisting.heard(said("mm-1", 4, epoch=6), 0.1) is Deed.LEAD
    assert insisting.epoch == 7
