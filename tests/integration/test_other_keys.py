"""Announcements of a running fleet's name that other keys signed: a rotation elsewhere, or another fleet."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from support.tiny_fleet import TinyFleet

from replayfleet.aggregator.coordinator import announcement
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.members.enrolment import Terms, opened
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.store import DATABASE
from replayfleet.aggregator.trust.release import Releases, rotate_key
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.topics import topic_of


def announces(fleet: TinyFleet, keys: Path, state: str = "open") -> None:
    """Another aggregator, with these keys, says that it leads this fleet; the broker retains it."""
    releases, topic = Releases(keys), topic_of("tiny-fleet", "round")
    ours = announcement(fleet.service._parts, fleet.rounds, fleet.now)
    word = msgspec.structs.replace(ours, instance="other-0", roots=releases.roots, state=state)
    session = fleet.broker.session("other", on_message=lambda *_: None, will=None)
    session.start()
    session.publish(topic, releases.signer.seal(topic, encode(word)), retain=True)


def others_noted(fleet: TinyFleet) -> int:
    return sum(event["event"] == "other aggregator" for event in read_journal(fleet.tmp_path / "aggregator"))


def test_one_whose_keys_were_rotated_elsewhere_goes_and_says_what_to_do(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    shutil.copytree(fleet.keys, tmp_path / "rotated")
    for _ in range(2):
        rotate_key(tmp_path / "rotated", new_root_key=True)
    announces(fleet, tmp_path / "rotated")
    with pytest.raises(SettingsError, match=r"keys of fleet 'tiny-fleet' were rotated \(root 3\).*restore --replace"):
        fleet.run(for_s=5)
    fleet.close()


def test_strangers_keys_are_noted_and_end_no_fleet(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    Releases(tmp_path / "stranger")
    rotate_key(tmp_path / "stranger")
    announces(fleet, tmp_path / "stranger")
    fleet.run(until=lambda: fleet.rounds.index == 2)
    assert others_noted(fleet) == 1
    fleet.kill_aggregator()
    fleet.claim = Claim.ASK
    fleet.new_service()
    fleet.run(until=lambda: fleet.rounds.index == 3)
    fleet.close()


@pytest.mark.parametrize(
    ("claim", "state"),
    [(Claim.ASK, "open"), (Claim.ASK, "offline"), (Claim.ASK, "finished"), (Claim.TAKE_OVER, "open")],
)
def test_one_that_begins_goes_if_another_fleet_has_its_name(tmp_path: Path, claim: Claim, state: str) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.kill_aggregator()
    fleet.claim = claim
    fleet.new_service()
    announces(fleet, tmp_path / "stranger", state)
    if (claim, state) == (Claim.ASK, "open"):
        with pytest.raises(SettingsError, match="is announced at this broker already; choose another --fleet"):
            fleet.run(for_s=5)
    else:
        fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.close()


def test_a_stranger_stops_no_fleet_whose_members_are_enrolled_and_have_not_come_yet(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", ("cam-1",), num_rounds=None)
    fleet.store.pin("cam-9", bytes(32))
    fleet.kill_aggregator()
    fleet.claim = Claim.ASK
    fleet.new_service()
    announces(fleet, tmp_path / "stranger")
    fleet.run(until=lambda: others_noted(fleet) == 1, for_s=5)
    fleet.run(until=lambda: fleet.service.coordinator.leads, for_s=5)
    fleet.close()


def test_a_fleet_whose_keys_are_gone_is_given_others_on_purpose_alone(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    fleet.keys.rename(tmp_path / "lost")
    fleet.keys.mkdir()  # as the session's own key does
    with pytest.raises(SettingsError, match=r"holds no root,.*Put the folder back"):
        fleet.new_service()
    assert not list(fleet.keys.iterdir())
    fleet.keys.rmdir()
    (tmp_path / "lost").rename(fleet.keys)
    fleet.new_service()
    fleet.run(until=lambda: fleet.rounds.index == 2)
    fleet.kill_aggregator()
    shutil.rmtree(fleet.keys)
    fleet.claim = Claim.TAKE_OVER
    fleet.new_service()
    fleet.close()


def test_a_fleet_of_before_there_were_keys_and_names_of_stores_is_taken_up_on_purpose(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    fleet.kill_aggregator()
    shutil.rmtree(fleet.keys)
    with contextlib.closing(sqlite3.connect(fleet.tmp_path / "aggregator" / DATABASE)) as database, database:
        database.execute("DELETE FROM facts WHERE name = 'home'")
    with pytest.raises(SettingsError, match="or this fleet was begun by a version that signed nothing"):
        fleet.new_service()
    fleet.claim = Claim.TAKE_OVER
    fleet.new_service()
    fleet.run(until=lambda: fleet.service.coordinator.leads, for_s=5)
    named = fleet.store.home()
    fleet.kill_aggregator()
    fleet.new_service()
    assert fleet.store.home() == named != ""
    fleet.close()


def test_a_fleet_begins_where_the_operator_alone_was_enrolled(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.kill_aggregator()
    shutil.rmtree(fleet.keys)
    shutil.rmtree(fleet.tmp_path / "aggregator")
    with opened(fleet.tmp_path / "aggregator", "tiny-fleet", new=True) as registry:
        registry.enrol("operator", Terms())
    fleet.new_service()
    fleet.close()


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_run_ends_after_the_rounds_that_it_has_and_not_after_fewer(tmp_path: Path, wanted: int) -> None:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 2)
    fleet.kill_aggregator()
    fleet.rules = dataclasses.replace(fleet.rules, num_rounds=wanted)
    if wanted == 1:
        with pytest.raises(SettingsError, match=r"has 2 rounds behind it.*--rounds 3 for one more"):
            fleet.new_service()
    else:
        fleet.new_service()
        fleet.run()
        assert fleet.rounds.index == 2
        fleet.close()
