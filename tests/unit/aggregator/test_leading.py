from __future__ import annotations

from typing import Any

import pytest

from replayfleet.aggregator.leading import (
    ANSWER_S,
    BEHIND_S,
    GONE_S,
    LISTEN_S,
    MOST_BEHIND_S,
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
def test_a_restart_on_the_same_data_dir_leads_without_asking_in_the_same_epoch(state: str) -> None:
    again = begun(round_index=5)
    again.heard(said("mm-0", 5, state), 0.1)
    assert again.tick(LISTEN_S) is Deed.LEAD
    assert again.epoch == 0


def test_a_data_dir_that_was_put_back_by_hand_leads_in_another_epoch() -> None:
    behind = begun(round_index=3)
    behind.heard(said("mm-0", 5), 0.1)
    assert behind.tick(LISTEN_S) is Deed.LEAD
    assert behind.epoch == 1


def test_a_new_store_in_place_of_a_lost_one_leads_in_another_epoch_if_nobody_answers() -> None:
    fresh = begun("new")
    fresh.heard(said("old-0", 7, "offline", epoch=2), 0.1)
    assert fresh.tick(LISTEN_S) is Deed.ASK
    assert fresh.tick(LISTEN_S + GONE_S - 0.1) is Deed.NOTHING
    assert fresh.tick(LISTEN_S + GONE_S) is Deed.LEAD
    assert fresh.epoch == 3


@pytest.mark.parametrize("answers", [True, False])
def test_a_restored_store_leads_whoever_else_does(answers: bool) -> None:
    restored = begun("new", epoch=1, round_index=3)
    restored.heard(said("old-0", 7), 0.1)
    assert restored.tick(LISTEN_S) is Deed.ASK
    assert (restored.heard(said("old-0", 7), 1.1) if answers else restored.tick(LISTEN_S + ANSWER_S)) is Deed.LEAD
    assert restored.epoch == 1


def test_a_second_aggregator_asks_and_stands_by_when_the_first_answers() -> None:
    second, first = begun("zz", round_index=3), begun()
    first.tick(LISTEN_S)
    assert second.heard(said(first.instance, 4), 0.1) is Deed.NOTHING
    assert second.tick(LISTEN_S) is Deed.ASK
    assert first.heard(said(second.instance, 0, "standby"), 1.2) is Deed.ANSWER
    assert second.tick(1.3) is Deed.NOTHING
    assert second.heard(said(first.instance, 4), 1.4) is Deed.STAND_BY
    assert "standing by" in second.notice
    assert not second.yields_to_a_copy
    assert second.tick(GONE_S) is Deed.NOTHING
    assert second.heard(said(first.instance, 5), GONE_S) is Deed.NOTHING
    late = 2 * GONE_S + 2 * BEHIND_S  # it is two rounds behind
    assert second.tick(late - 0.1) is Deed.NOTHING
    assert second.tick(late) is Deed.LEAD, "the first one fell silent"
    assert (second.epoch, second.notice) == (1, "")


def test_what_a_broker_kept_for_a_spare_is_old_and_decides_nothing() -> None:
    """A spare that was started again heard its leader's goodbye of long ago first, and led beside it."""
    for round_index, claim_epoch in ((0, 0), (40, 5)):
        spare = begun("spare", epoch=claim_epoch, round_index=round_index)
        for word in (said("old-0", 30, epoch=4), said("old-0", 35, "offline", epoch=4), said("old-1", 41, epoch=6)):
            assert spare.heard(word, 0.1) is Deed.NOTHING
        assert spare.tick(LISTEN_S) is Deed.ASK
        assert spare.heard(said("old-1", 41, epoch=6), 1.1) is Deed.STAND_BY


def test_who_is_cut_off_from_the_broker_hears_nobody_and_takes_nothing_over() -> None:
    spare = standing_by(4, 7)
    for now in (10.0, 50.0, 90.0):
        spare.cut_off(now)
        assert spare.tick(now) is Deed.NOTHING
    spare.connected(91.0)
    assert spare.tick(91.0 + GONE_S - 5) is Deed.NOTHING
    asks = begun("new")
    asks.heard(said("first-0", 7), 0.1)
    assert asks.tick(LISTEN_S) is Deed.ASK
    asks.cut_off(1.5)
    assert asks.tick(99.0) is Deed.NOTHING
    asks.connected(100.0)
    assert asks.tick(100.0 + LISTEN_S) is Deed.ASK, "whoever answered wasn't heard"


@pytest.mark.parametrize(("round_index", "answer_s"), [(4, ANSWER_S), (3, GONE_S), (0, GONE_S)])
def test_nobody_answers_for_a_leader_that_was_killed_a_moment_ago(round_index: int, answer_s: float) -> None:
    second = begun("zz", round_index=round_index)
    second.heard(said("mm-1", 4), 0.5)
    assert second.tick(LISTEN_S) is Deed.ASK
    assert second.heard(said("mm-1", 4, "offline"), 1.5) is Deed.NOTHING
    assert second.tick(LISTEN_S + answer_s - 0.1) is Deed.NOTHING
    assert second.tick(LISTEN_S + answer_s) is Deed.LEAD
    assert second.epoch == 1


def test_a_will_says_the_round_of_a_start_and_who_crashed_has_the_time_of_a_restart_to_come_back() -> None:
    """Its process may have done a hundred rounds since; the spare's store is of before them."""
    spares = [begun("spare", round_index=4) for _ in range(2)]
    for spare in spares:
        spare.heard(said("first-0", 2, "offline"), 0.5)
        assert spare.tick(LISTEN_S) is Deed.ASK
        assert spare.tick(LISTEN_S + GONE_S - 0.1) is Deed.NOTHING
    assert spares[0].heard(said("first-1", 102), LISTEN_S + GONE_S - 0.1) is Deed.STAND_BY
    assert spares[1].tick(LISTEN_S + GONE_S) is Deed.LEAD


def standing_by(round_index: int, led: int) -> Leadership:
    spare = begun("spare", round_index=round_index)
    spare.heard(said("first-0", led), 0.1)
    assert spare.tick(LISTEN_S) is Deed.ASK
    assert spare.heard(said("first-0", led), 1.1) is Deed.STAND_BY
    return spare


def test_a_leader_that_says_goodbye_has_the_time_of_a_restart_to_come_back() -> None:
    second = standing_by(4, 4)
    second.heard(said("first-0", 4), 10.0)
    second.heard(said("first-0", 4, "offline"), 11.0)
    assert second.tick(10.0 + GONE_S - 0.1) is Deed.NOTHING
    second.heard(said("first-2", 4), 35.0)
    second.heard(said("first-2", 4, "offline"), 36.0)
    assert second.tick(35.0 + GONE_S - 0.1) is Deed.NOTHING
    assert second.tick(35.0 + GONE_S) is Deed.LEAD


@pytest.mark.parametrize("state", ["open", "offline"])
def test_a_spare_without_a_round_never_throws_away_what_the_fleet_learned(state: str) -> None:
    spare = standing_by(0, 7)
    spare.heard(said("first-0", 0, state), 1.3)  # a last will says the round of its process's start
    assert spare.tick(10 * GONE_S) is Deed.NOTHING
    assert "holds no round of it and won't take over, but with --take-over" in spare.notice


def test_a_spare_says_how_far_it_is_behind_and_the_furthest_takes_over() -> None:
    spare, further = standing_by(3, 7), standing_by(6, 7)
    assert "from round 3: its store is 4 behind" in spare.notice
    at = 1.1 + GONE_S + BEHIND_S
    assert (spare.tick(at), further.tick(at)) == (Deed.NOTHING, Deed.LEAD)
    spare.heard(said("further-1", 6, epoch=1), at)
    assert spare.tick(at + GONE_S) is Deed.NOTHING
    assert spare.tick(at + GONE_S + MOST_BEHIND_S) is Deed.LEAD


def test_who_led_before_another_took_over_is_as_far_behind_as_its_store() -> None:
    """It took over at once, as if it had the rounds that it never saw."""
    former, fresh = begun("first", round_index=3), begun("fresh")
    for led, at in ((former, 5), (fresh, 0)):
        assert led.tick(LISTEN_S) is Deed.LEAD
        assert led.heard(said("second-0", at, epoch=1), 2.0, at) is Deed.STAND_BY
        assert "behind" not in led.notice
        led.heard(said("second-0", 45, epoch=1), 10.0)
    assert "its store is 40 behind" in former.notice
    assert former.tick(10.0 + GONE_S + 40 * BEHIND_S - 0.1) is Deed.NOTHING
    assert former.tick(10.0 + GONE_S + 40 * BEHIND_S) is Deed.LEAD
    assert fresh.tick(10 * GONE_S) is Deed.NOTHING, "it holds no round"


def test_who_cant_make_its_epoch_durable_knows_which_round_its_store_reached() -> None:
    """It stood by as one that holds no round, and never led again."""
    leader = begun("first")
    leader.tick(LISTEN_S)
    assert leader.heard(said("second-0", 5), 2.0, 300) is Deed.LEAD
    assert leader.stand_back(300)
    assert "holds no round" not in leader.notice
    assert leader.tick(2.0 + GONE_S) is Deed.LEAD


def test_the_will_of_a_process_before_this_one_doesnt_say_who_leads() -> None:
    """After a power cut a spare heard its own last, and led at once with the older store."""
    spare = begun("spare", round_index=4)
    for word in (said("first-0", 9), said("first-0", 0, "offline"), said("spare-0", 4, "offline")):
        spare.heard(word, 0.1)
    assert spare.tick(LISTEN_S) is Deed.ASK
    assert spare.tick(LISTEN_S + GONE_S - 0.1) is Deed.NOTHING, "the one that led may begin later"
    late = standing_by(4, 4)
    late.heard(said("spare-0", 4, "offline"), 5.0)
    assert not late.yields_to_a_copy, "which would end it"


def test_a_spare_doesnt_open_a_finished_run_again() -> None:
    """The one that led ends with its run, and the fleet began again at the spare's round."""
    late, listens, has_all = begun("late", round_index=3), standing_by(3, 7), standing_by(10, 10)
    late.heard(said("first-0", 10, "finished"), 0.1)
    late.tick(LISTEN_S)
    for spare in (listens, has_all):
        spare.heard(said("first-0", 10, "finished"), 20.0)
        spare.heard(said("first-0", 0, "offline"), 21.0)
    assert late.tick(LISTEN_S + GONE_S) is Deed.STAND_BY
    assert [spare.tick(10 * GONE_S) for spare in (late, listens, has_all)] == [Deed.NOTHING, Deed.NOTHING, Deed.LEAD]
    assert "opens the finished run again with --take-over alone" in late.notice
    listens.heard(said("first-2", 10, "open"), 400.0)
    assert listens.tick(400.0 + GONE_S + 7 * BEHIND_S) is Deed.LEAD, "it went on with more rounds"


def test_a_spare_of_a_fleet_that_hasnt_closed_a_round_takes_over() -> None:
    assert standing_by(0, 0).tick(1.1 + GONE_S) is Deed.LEAD


def test_of_two_that_lead_the_lower_epoch_steps_back_and_the_other_says_its_word_again() -> None:
    low, high = begun("mm"), begun("aa", epoch=1)
    for each in (low, high):
        each.tick(LISTEN_S)
    assert high.heard(said(low.instance, 9), 2.0) is Deed.ANSWER
    assert low.heard(said(high.instance, 3, epoch=1), 2.0) is Deed.STAND_BY
    assert not low.leads


@pytest.mark.parametrize(("ours", "theirs", "wins"), [(9, 6, "mm"), (6, 9, "zz"), (6, 6, "zz")])
def test_of_two_that_took_over_at_once_the_one_that_is_further_leads_in_an_epoch_that_the_other_never_used(
    ours: int, theirs: int, wins: str
) -> None:
    """Devices held what both had signed as the same version, and took nothing from either."""
    first, second = begun("mm"), begun("zz")
    for each in (first, second):
        each.tick(LISTEN_S)
    deeds = {
        "mm": first.heard(said(second.instance, theirs), 2.0, ours),
        "zz": second.heard(said(first.instance, ours), 2.0, theirs),
    }
    assert deeds == {name: Deed.LEAD if name == wins else Deed.STAND_BY for name in deeds}
    assert {first.epoch, second.epoch} == {0, 1}
    assert (first if wins == "mm" else second).epoch == 1


def test_the_will_of_a_leader_says_the_epoch_of_its_start_and_who_takes_over_leads_above_that_which_it_led_in() -> None:
    spare = begun("spare", epoch=2, round_index=10)
    spare.heard(said("first-0", 10, epoch=3), 0.1)
    spare.tick(LISTEN_S)
    spare.heard(said("first-0", 10, epoch=3), 1.2)
    assert not spare.leads
    spare.heard(said("first-0", 0, "offline", epoch=1), 2.0)
    assert spare.tick(1.2 + GONE_S) is Deed.LEAD
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
    insisting.heard(said("mm-1", 4, epoch=6), 0.1)
    assert insisting.tick(LISTEN_S) is Deed.LEAD
    assert insisting.epoch == 7
