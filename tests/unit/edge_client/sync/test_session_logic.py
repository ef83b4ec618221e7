from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from replayfleet.edge_client.sync.session_logic import Pending, Place, Situation, Step, next_step
from replayfleet.federation.wire.protocol.messages import Announcement, FleetSpec, client_mark

SPEC = FleetSpec("fleet", "fedavg", {}, {}, 0)


def word(
    round_index: int,
    state: Literal["open", "aggregating", "finished", "offline"] = "open",
    instance: str = "e1",
    epoch: int = 0,
) -> Announcement:
    return Announcement(instance, round_index, state, 0.0, SPEC, epoch)


def at(round_index: int, epoch: int = 0) -> Place:
    return Place(epoch, round_index)


READY = Situation(announcement=word(3), held=at(3), trained=at(2))


def test_a_round_is_trained_when_it_is_open_and_its_manifest_is_held() -> None:
    assert next_step(READY) is Step.TRAIN
    assert next_step(replace(READY, held=at(2))) is Step.WAIT_DOWNLOAD
    assert next_step(replace(READY, held=None)) is Step.WAIT_DOWNLOAD
    assert next_step(replace(READY, held=at(2), coming=at(3))) is Step.TRAIN, "its swap goes on beside"
    over = replace(READY, announcement=word(3, "finished"), held=at(2), coming=at(3))
    assert next_step(over) is Step.WAIT_LAST, "a run ends once its last model serves"
    assert next_step(replace(READY, announcement=word(3, "aggregating"))) is Step.WAIT_ROUND
    assert next_step(replace(READY, has_data=False)) is Step.WAIT_DATA


def test_whom_rounds_pass_by_waits_for_models_without_a_break_so_that_it_can_say_for_how_long() -> None:
    waits = replace(READY, held=None, waited=True)
    for announcement in (word(3), word(3, "aggregating"), word(4), word(4, "aggregating")):
        assert next_step(replace(waits, announcement=announcement)) is Step.WAIT_DOWNLOAD
    aggregating = replace(waits, announcement=word(3, "aggregating"))
    assert next_step(replace(aggregating, coming=at(3))) is Step.WAIT_ROUND, "they came all the same"
    assert next_step(replace(aggregating, waited=False)) is Step.WAIT_ROUND, "it begins while a round is aggregated"


def test_nothing_starts_without_an_aggregator_but_training_goes_on() -> None:
    for announcement in (None, word(3, "offline")):
        assert next_step(replace(READY, announcement=announcement)) is Step.WAIT_AGGREGATOR
        assert next_step(replace(READY, announcement=announcement, training_round=3)) is Step.TRAINING


def test_a_round_is_trained_once() -> None:
    assert next_step(replace(READY, training_round=3)) is Step.TRAINING
    assert next_step(replace(READY, trained=at(3))) is Step.WAIT_ROUND
    assert next_step(replace(READY, abandoned=at(3))) is Step.WAIT_ROUND


def test_a_round_whose_download_was_rolled_back_is_left_and_ends_a_run_too() -> None:
    back = replace(READY, held=at(2), sent_away=at(3))
    assert next_step(back) is Step.WAIT_ROUND
    assert next_step(replace(back, announcement=word(3, "finished"))) is Step.FINISHED
    assert next_step(replace(back, announcement=word(4))) is Step.WAIT_DOWNLOAD
    assert next_step(replace(back, held=at(3))) is Step.TRAIN, "another download for the same round came"


def test_a_disk_that_takes_nothing_holds_up_training_and_uploads_and_nothing_else() -> None:
    full = replace(READY, has_disk=False)
    assert next_step(full) is Step.WAIT_DISK
    assert next_step(replace(full, trained=at(3), pending=Pending(at(3)))) is Step.WAIT_DISK
    assert next_step(replace(full, trained=at(3), pending=Pending(at(3), offered_to="e1"))) is Step.WAIT_VERDICT
    assert next_step(replace(full, held=at(2))) is Step.WAIT_DOWNLOAD
    assert next_step(replace(full, training_round=3)) is Step.TRAINING
    assert next_step(replace(full, announcement=word(2, "finished"))) is Step.FINISHED


def test_an_upload_is_offered_once_to_each_instance_until_it_counts() -> None:
    trained = replace(READY, trained=at(3), pending=Pending(at(3)))
    assert next_step(trained) is Step.OFFER
    offered = replace(trained, pending=Pending(at(3), offered_to="e1"))
    assert next_step(offered) is Step.WAIT_VERDICT
    assert next_step(replace(offered, announcement=word(3, instance="e2"))) is Step.OFFER
    assert next_step(replace(offered, announcement=word(3, "aggregating"))) is Step.WAIT_VERDICT
    counted = replace(trained, pending=Pending(at(3), counts=True))
    for announcement in (word(3), word(3, instance="e2"), word(3, "aggregating")):
        assert next_step(replace(counted, announcement=announcement)) is Step.WAIT_ROUND
    assert next_step(replace(counted, announcement=word(4))) is Step.LET_GO


def test_an_upload_whose_round_is_over_is_dropped_and_the_open_round_is_trained() -> None:
    missed = replace(READY, announcement=word(5), held=at(5), trained=at(3), pending=Pending(at(3), offered_to="e1"))
    assert next_step(missed) is Step.LET_GO
    assert next_step(replace(missed, pending=None)) is Step.TRAIN


def test_an_upload_that_may_count_late_is_offered_in_the_round_that_is_open_before_anything_is_trained() -> None:
    late = replace(READY, announcement=word(4), held=at(4), trained=at(3), pending=Pending(at(5)))
    assert next_step(late) is Step.OFFER
    assert next_step(replace(late, held=at(3))) is Step.OFFER, "it needs no download"
    assert next_step(replace(late, held=at(3), coming=at(4))) is Step.OFFER, "nor its swap"
    assert next_step(replace(late, held=at(2), coming=at(3))) is Step.WAIT_DOWNLOAD, "that is what it was trained from"
    counted = replace(late, pending=Pending(at(4), counts=True))
    assert next_step(counted) is Step.WAIT_ROUND, "a client counts once in a round"
    assert next_step(replace(counted, announcement=word(5))) is Step.LET_GO
    assert next_step(replace(late, announcement=word(6))) is Step.LET_GO


def test_training_that_outlasts_its_round_is_finished_before_the_open_one_begins() -> None:
    late = replace(READY, announcement=word(5), held=at(5), trained=at(2), training_round=3)
    assert next_step(late) is Step.TRAINING


@pytest.mark.parametrize("trained", [-1, 0, 4])
def test_a_client_that_missed_rounds_goes_on_with_the_open_one(trained: int) -> None:
    assert next_step(Situation(word(5), held=at(5), trained=at(trained))) is Step.TRAIN


def test_the_run_ends_when_the_last_download_is_served() -> None:
    over = replace(READY, announcement=word(6, "finished"), held=at(5), trained=at(5))
    assert next_step(over) is Step.WAIT_LAST
    assert next_step(replace(over, held=at(6))) is Step.FINISHED
    assert next_step(replace(over, held=at(6), pending=Pending(at(5)))) is Step.LET_GO
    assert next_step(replace(over, held=at(6), training_round=5)) is Step.FINISHED


def test_a_client_that_is_ahead_of_a_restored_aggregator_trains_its_open_round_again() -> None:
    ahead = Situation(word(3, epoch=1), held=at(50), trained=at(50), pending=Pending(at(50), offered_to="e1"))
    assert next_step(ahead) is Step.LET_GO
    back = replace(ahead, pending=None)
    assert next_step(back) is Step.WAIT_DOWNLOAD
    assert next_step(replace(back, held=at(3, 1))) is Step.TRAIN
    assert next_step(replace(back, held=at(3, 1), trained=at(3, 1))) is Step.WAIT_ROUND
    assert next_step(replace(back, held=at(3), trained=at(2))) is Step.WAIT_DOWNLOAD, "that is the lost store's round 3"


def test_a_client_whose_download_alone_carries_a_new_epoch_trains_the_open_round() -> None:
    """The store was put back by hand: only the download that this client got says so."""
    ahead = Situation(word(3), held=at(5), trained=at(5))
    assert next_step(ahead) is Step.WAIT_DOWNLOAD
    assert next_step(replace(ahead, held=at(3, 1))) is Step.TRAIN
    assert next_step(replace(ahead, held=at(3))) is Step.WAIT_DOWNLOAD, "a newer one has to come"


@pytest.mark.parametrize("marked", ["excluded", "shut_out"])
def test_who_is_excluded_or_shut_out_begins_nothing_and_offers_nothing(marked: str) -> None:
    left_out = msgspec.structs.replace(word(3), **{marked: client_mark("cam-1")})
    shut = Situation(left_out, held=at(3), trained=at(2), client_id="cam-1")
    assert next_step(shut) is Step.EXCLUDED
    assert next_step(replace(shut, pending=Pending(at(3)))) is Step.EXCLUDED
    assert next_step(replace(shut, pending=Pending(at(2)))) is Step.LET_GO
    assert next_step(replace(shut, training_round=3)) is Step.TRAINING, "what is in work ends by itself"
    assert next_step(replace(shut, client_id="cam-2")) is Step.TRAIN


def test_while_the_fleet_is_paused_nobody_begins_and_what_is_trained_is_uploaded() -> None:
    paused = replace(READY, announcement=msgspec.structs.replace(word(3), paused=True))
    assert next_step(paused) is Step.PAUSED
    resting = msgspec.structs.replace(word(3), paused=True, rests_s=40.0)
    assert next_step(replace(READY, announcement=resting)) is Step.WAIT_ROUND, "no operator paused it"
    assert next_step(replace(paused, held=at(2))) is Step.WAIT_DOWNLOAD
    assert next_step(replace(paused, trained=at(3), pending=Pending(at(3)))) is Step.OFFER


def test_a_device_that_only_serves_takes_downloads_and_begins_nothing() -> None:
    serves = replace(READY, trains=False)
    assert next_step(serves) is Step.SERVE_ONLY
    assert next_step(replace(serves, held=at(2))) is Step.WAIT_DOWNLOAD
