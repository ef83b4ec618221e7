"""What operators tell an aggregator: planned, done, durable, in the journal; and what the fleet makes of it."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.tiny_fleet import Crash, TinyFleet

from replayfleet.aggregator.control.look import facts_of
from replayfleet.aggregator.control.plans import target_of
from replayfleet.aggregator.control.verbs import (
    CloseRound,
    Drain,
    Exclude,
    ExtendRound,
    OpenRound,
    Pause,
    Readmit,
    Resume,
    RollBack,
    Verb,
    VerbRefused,
    decode_verb,
    name_of,
    parse_version,
)
from replayfleet.aggregator.control.view import MemberView
from replayfleet.aggregator.control.waits import fleet_waits
from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.operator import journal
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.operator.status import read_status
from replayfleet.aggregator.records.deeds import Deed
from replayfleet.aggregator.records.versions import Kept
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.rounds.opening import Opening
from replayfleet.aggregator.steps import Step
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.service.waits import Why
from replayfleet.federation.wire.protocol.messages import Manifest, Presence

FIVE = tuple(f"cam-{number}" for number in range(1, 6))


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TinyFleet]:
    made = TinyFleet(tmp_path, FIVE, num_rounds=4)
    yield made
    made.close()


def do(fleet: TinyFleet, verb: Verb) -> str:
    return fleet.service.coordinator.control.do(verb, "ana", fleet.now).text


def member(fleet: TinyFleet, client: str) -> MemberView:
    return next(found for found in fleet.service.coordinator.control.look(fleet.now).members if found.client == client)


def events(fleet: TinyFleet, kind: str) -> list[dict]:
    return [event for event in read_journal(fleet.tmp_path / "aggregator") if event["event"] == kind]


def holds(fleet: TinyFleet, client: str, round_index: int) -> bool:
    manifest = fleet.clients[client].manifest
    return manifest is not None and manifest.round == round_index


def waits_for_the_fifth(fleet: TinyFleet, round_index: int = 0) -> None:
    """Four uploads are there, and the fifth never comes."""
    fleet.clients["cam-5"].dies_in = round_index
    fleet.run(until=lambda: fleet.rounds.index == round_index and len(fleet.rounds.accepted) == 4)


def test_one_of_five_is_excluded_while_a_round_waits_for_it_and_readmitted(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet, round_index=1)
    assert (member(fleet, "cam-5").is_awaited, member(fleet, "cam-4").is_awaited) == (True, False)
    assert member(fleet, "cam-5").wait.reason == "upload"
    before = fleet.now
    assert "closes with 4 uploads, and has 4" in do(fleet, Exclude("cam-5", "it only sends noise"))
    fleet.run(until=lambda: len(events(fleet, "round closed")) == 2)
    assert fleet.now - before < 1, "this round closes with what is there"
    fleet.run(until=lambda: len(events(fleet, "round closed")) == 3)
    assert fleet.now - before < 2, "and the next with its last upload"
    fleet.run(until=lambda: fleet.rounds.index == 3)
    assert {event["by"] for event in events(fleet, "round closed")} == {"quorum"}
    assert [event["uploads"] for event in events(fleet, "round closed")] == [5, 4, 4]
    assert fleet.clients["cam-5"].announcement.excludes("cam-5")
    assert not fleet.clients["cam-5"].announcement.excludes("cam-4")
    fleet.clients["cam-5"].dies_in = 9
    do(fleet, Readmit("cam-5"))
    fleet.run()
    assert [event["uploads"] for event in events(fleet, "round closed")] == [5, 4, 4, 5]
    assert [(event["who"], event["verb"], event["client"]) for event in events(fleet, "operator")] == [
        ("ana", "exclude", "cam-5"),
        ("ana", "readmit", "cam-5"),
    ]


def test_who_is_excluded_is_so_after_restarts_and_is_refused_with_a_reason(fleet: TinyFleet) -> None:
    for client in ("cam-4", "cam-5"):
        fleet.clients[client].dies_in = 0
    fleet.run(until=lambda: len(fleet.rounds.accepted) == 3)
    do(fleet, Exclude("cam-5"))
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.clients["cam-5"].dies_in = 9
    fleet.run(until=lambda: fleet.clients["cam-5"].verdicts != [])
    assert fleet.clients["cam-5"].verdicts[-1].reason == "excluded"
    fleet.clients["cam-4"].dies_in = 9
    fleet.run()
    assert [set(fleet.store.uploads(index)) for index in range(4)] == [{*FIVE[:4]}] * 4
    assert len(events(fleet, "operator")) == 1


def test_an_upload_of_the_open_round_goes_with_its_client(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet)
    assert "upload of round 0 is taken out" in do(fleet, Exclude("cam-1", "stolen"))
    assert fleet.rounds.accepted == ("cam-2", "cam-3", "cam-4")
    assert member(fleet, "cam-1").wait.text.startswith("excluded by ana: stolen")
    fleet.clients["cam-5"].dies_in = 9
    fleet.kill_client("cam-5")
    fleet.add_client("cam-5")
    fleet.run(until=lambda: fleet.rounds.index == 1)
    assert set(fleet.store.uploads(0)) == {"cam-2", "cam-3", "cam-4", "cam-5"}


OUTCOMES = {
    Exclude("cam-5"): lambda fleet: fleet.store.roll.refresh()["cam-5"].exclusion is not None,
    Readmit("cam-4"): lambda fleet: fleet.store.roll.refresh()["cam-4"].exclusion is None,
    Pause(): lambda fleet: fleet.rounds.is_paused and not fleet.clients["cam-1"].announcement.deadline_s,
    Drain(): lambda fleet: fleet.rounds.course.value == "draining",
    CloseRound(): lambda fleet: fleet.rounds.index == 2 and "cam-5" not in fleet.store.uploads(1),
    ExtendRound(90.0): lambda fleet: fleet.rounds.remaining_s(fleet.now) > 120,
    RollBack("cam-1"): lambda fleet: fleet.clients["cam-1"].download().personalised["w"].tolist() == FIRST[0],
}
FIRST: list[list[float]] = [[]]


@pytest.mark.parametrize("verb", OUTCOMES, ids=name_of)
@pytest.mark.parametrize("crashes", [False, True], ids=["lives", "crashes"])
def test_a_deed_is_done_and_told_once_though_a_crash_follows_it(fleet: TinyFleet, verb: Verb, crashes: bool) -> None:
    fleet.run(until=lambda: holds(fleet, "cam-1", 0))
    FIRST[0] = fleet.clients["cam-1"].download().personalised["w"].tolist()
    for client in ("cam-4", "cam-5"):
        fleet.clients[client].dies_in = 1
    fleet.run(until=lambda: fleet.rounds.index == 1 and len(fleet.rounds.accepted) == 3)
    do(fleet, Exclude("cam-4"))
    fleet.crash_at = Step.DEED_DONE if crashes else None
    if crashes:
        with pytest.raises(Crash):
            do(fleet, verb)
        for _ in range(2):
            fleet.kill_aggregator()
            fleet.new_service()
            fleet.run(for_s=1.0, until=lambda: fleet.service.ready)
    else:
        do(fleet, verb)
    fleet.run(for_s=20.0, until=lambda: OUTCOMES[verb](fleet))
    assert [event["verb"] for event in events(fleet, "operator")] == ["exclude", name_of(verb)]


def test_deeds_that_others_wrote_are_told_once_each_and_the_journal_is_read_once_for_all(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(folder: Path, word: str) -> Iterator[dict[str, object]]:
        read.append(folder)
        return read_journal(folder, word)

    monkeypatch.setattr(journal, "read_journal", counted)
    fleet.run(until=lambda: fleet.rounds.index == 1)
    for number in range(5):
        fleet.store.deeds.add(Deed(1.0, "me", "enroll", f"cam-{number}", "a member from now on"))
    fleet.run(for_s=5.0, until=lambda: len(events(fleet, "operator")) == 5)
    assert read == []
    for number in range(5, 9):
        fleet.store.deeds.add(Deed(1.0, "me", "enroll", f"cam-{number}", "a member from now on"))
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.run(for_s=5.0, until=lambda: len(events(fleet, "operator")) == 9)
    assert [event["client"] for event in events(fleet, "operator")] == [f"cam-{number}" for number in range(9)]
    assert {event["time"] for event in events(fleet, "operator")} == {1.0}, "when it was done, not when it was told"
    assert len(read) <= 2, "one for deeds, one for the newest round's line"
    told = [event["event"] for event in read_journal(fleet.tmp_path / "aggregator")]
    begun = len(told) - 1 - told[::-1].index("aggregator started")
    assert told[begun - 4 : begun] == ["operator"] * 4, "what was done while no aggregator ran comes before its start"


@pytest.mark.parametrize("verb", OUTCOMES, ids=name_of)
def test_a_deed_that_the_disk_does_not_take_is_not_done(
    fleet: TinyFleet, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in ("cam-4", "cam-5"):
        fleet.clients[client].dies_in = 1
    fleet.run(until=lambda: fleet.rounds.index == 1 and len(fleet.rounds.accepted) == 3)
    do(fleet, Exclude("cam-4"))

    rows = [list(fleet.store._db.execute(f"SELECT * FROM {table}")) for table in TABLES]
    with monkeypatch.context() as patch:
        patch.setattr(fleet.store.deeds, "add", Mock(side_effect=OSError(errno.ENOSPC, "no space left on device")))
        with pytest.raises(VerbRefused, match="nothing was changed"):
            do(fleet, verb)
    assert rows == [list(fleet.store._db.execute(f"SELECT * FROM {table}")) for table in TABLES]
    assert (fleet.rounds.index, fleet.rounds.phase.value, fleet.rounds.is_paused) == (1, "open", False)


TABLES = ("facts", "rounds", "uploads", "clients", "versions", "deeds")


def test_a_paused_fleet_begins_nothing_takes_what_comes_and_goes_on(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet)
    assert "its deadline stands still" in do(fleet, Pause())
    with pytest.raises(VerbRefused, match="paused already"):
        do(fleet, Pause())
    fleet.clients["cam-5"].dies_in = 9
    fleet.run(until=lambda: len(fleet.rounds.accepted) == 5)
    left = fleet.rounds.remaining_s(fleet.now)
    fleet.now += 300.0  # far beyond the deadline
    fleet.run(until=lambda: fleet.clients["cam-1"].announcement.paused)
    assert (fleet.rounds.index, fleet.rounds.remaining_s(fleet.now)) == (0, left)
    do(fleet, Resume())
    fleet.run()
    assert {event["by"] for event in events(fleet, "round closed")} == {"quorum"}


def test_rounds_that_have_an_interval_begin_and_end_when_they_are_due(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path / "slow", ("cam-1", "cam-2"), num_rounds=2, interval_s=20.0)
    began = fleet.now
    fleet.run(until=lambda: fleet.rounds.index == 1 and len(fleet.rounds.accepted) == 2)  # these ask no leave
    word = fleet.clients["cam-1"].announcement
    assert (word.round, word.state, word.paused, word.deadline_s) == (1, "open", True, 0.0)
    assert 0 < word.rests_s <= 20
    assert fleet.clients["cam-1"].manifest.round == 1  # the new model is there to serve meanwhile
    parts = fleet.service._parts
    assert [wait.reason for wait in fleet_waits(facts_of(parts, fleet.rounds, fleet.now))] == [Why.NOT_DUE]
    fleet.run()
    assert fleet.rounds.index == 2
    assert fleet.now - began >= 20
    assert [event["because"] for event in events(fleet, "round began")] == ["its interval is over"]
    fleet.kill_aggregator()


@pytest.fixture
def resting(tmp_path: Path) -> Iterator[Callable[[Opening], TinyFleet]]:
    """Makes a fleet of two whose rounds wait; these upload without leave, and the round doesn't close by that."""
    with contextlib.ExitStack() as stack:

        def make(opening: Opening) -> TinyFleet:
            made = TinyFleet(tmp_path / "resting", ("cam-1", "cam-2"), num_rounds=2, opening=opening)
            stack.callback(made.close)
            made.run(until=lambda: len(made.rounds.accepted) == 2)
            return made

        yield make


@pytest.mark.parametrize("crashes", [False, True], ids=["lives", "crashes"])
def test_each_round_waits_until_an_operator_opens_it_over_restarts(
    resting: Callable[[Opening], TinyFleet], crashes: bool
) -> None:
    fleet = resting(Opening())
    word = fleet.clients["cam-1"].announcement
    assert (word.round, word.state, word.paused, word.rests_s) == (0, "open", True, math.inf)
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.run(until=lambda: fleet.service.ready)
    assert fleet.rounds.rests
    wait = fleet_waits(facts_of(fleet.service._parts, fleet.rounds, fleet.now))[0]
    assert (wait.reason, wait.text) == (
        Why.NOT_DUE,
        "the next round isn't due yet: it begins when an operator opens it",
    )
    fleet.crash_at = Step.DEED_DONE if crashes else None
    if crashes:
        with pytest.raises(Crash):
            do(fleet, OpenRound())
        fleet.kill_aggregator()
        fleet.new_service()
    else:
        assert "round 0 begins now" in do(fleet, OpenRound())
    fleet.run(until=lambda: fleet.rounds.index == 1 and len(fleet.rounds.accepted) == 2)
    assert fleet.clients["cam-1"].manifest.round == 1  # the new model is there to serve meanwhile
    do(fleet, Pause())
    with pytest.raises(VerbRefused, match="`aggregator resume` comes first"):
        do(fleet, OpenRound())
    do(fleet, Resume())
    assert fleet.rounds.rests
    do(fleet, OpenRound())
    with pytest.raises(VerbRefused, match="has begun already"):
        do(fleet, OpenRound())
    fleet.run()
    assert [(event["who"], event["verb"]) for event in events(fleet, "operator") if event["verb"] == "round open"] == [
        ("ana", "round open")
    ] * 2


def test_a_round_begins_with_enough_samples_of_those_that_it_waits_for(
    resting: Callable[[Opening], TinyFleet],
) -> None:
    fleet = resting(Opening(num_samples=10))
    for client, num_samples, round_index in (("cam-1", 4, 0), ("cam-2", 50, -1)):
        fleet.clients[client].says = {"labels_waiting": num_samples, "round": round_index}
    fleet.run(until=lambda: fleet.rounds.signs.num_samples == 4)
    assert fleet.rounds.awaits(fleet.now) == "when 6 more labelled samples wait at its members (4 of 10)"
    fleet.clients["cam-2"].says = {"labels_waiting": 6, "round": 0}
    fleet.run(until=lambda: fleet.rounds.index == 1)
    assert fleet.rounds.rests, "what was said before the round is used up"
    began = [(event["round"], event["because"]) for event in events(fleet, "round began")]
    assert began == [(0, "10 labelled samples wait at its members")]
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.run(until=lambda: fleet.service.ready)
    assert fleet.rounds.rests


def test_a_round_begins_when_the_model_of_one_that_it_waits_for_falls(
    resting: Callable[[Opening], TinyFleet],
) -> None:
    fleet = resting(Opening(accuracy=0.8))
    for client, right, round_index in (("cam-1", 180, 0), ("cam-2", 20, -1)):
        fleet.clients[client].says = {"labels_answered": 200, "labels_right": right, "round": round_index}
    fleet.run(until=lambda: fleet.rounds.signs.whose == "cam-1")
    assert fleet.rounds.awaits(fleet.now).endswith("(90.0% of cam-1 is the lowest)")
    fleet.clients["cam-2"].says = {"labels_answered": 100, "labels_right": 79, "round": 0}
    fleet.run(until=lambda: fleet.rounds.index == 1)
    assert fleet.rounds.rests, "what was said before the round is used up"
    (began,) = events(fleet, "round began")
    assert began["because"] == "the model of cam-2 answers 79.0% of its labels rightly"
    assert "round 1 begins and ends as usual" in do(fleet, Drain())
    assert "round 1, which begins as it would have" in do(fleet, Resume())


def test_a_drained_fleet_ends_its_round_and_pauses_also_over_a_restart(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet)
    assert "round 0 ends as usual" in do(fleet, Drain())
    assert "draining; `aggregator resume` lets rounds go on" in read_status(fleet.tmp_path / "aggregator").lines()
    do(fleet, CloseRound())
    fleet.run(until=lambda: fleet.rounds.index == 1)
    assert fleet.rounds.is_paused
    assert events(fleet, "round opened")[-1]["paused"]
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.now += 300.0
    fleet.run(until=lambda: fleet.service.ready)
    assert (fleet.rounds.index, fleet.rounds.is_paused) == (1, True)
    do(fleet, Resume())
    fleet.clients["cam-5"].dies_in = 9
    fleet.run()


def test_a_client_goes_back_to_what_it_had_and_forward_again(fleet: TinyFleet) -> None:
    fleet.clients["cam-5"].dies_in = 2
    models = {}
    for index in range(3):
        fleet.run(
            until=lambda index=index: fleet.clients["cam-1"].manifest and fleet.clients["cam-1"].manifest.round == index
        )
        models[index] = fleet.clients["cam-1"].download().personalised["w"].tolist()
    fleet.run(until=lambda: len(fleet.rounds.accepted) == 4)
    served = fleet.clients["cam-1"].manifest
    assert "cam-1 serves version 2 of round 1 again" in do(fleet, RollBack("cam-1"))

    def serves(index: int) -> bool:
        return fleet.clients["cam-1"].download().personalised["w"].tolist() == models[index]

    fleet.run(until=lambda: serves(1))
    back = fleet.clients["cam-1"].manifest
    assert (back.round, back.version) == (2, served.version + 1)
    assert back.notice == "an operator rolled this client back to version 2"
    assert "stay as they are" not in do(fleet, RollBack("cam-1")), "nobody asked for others"
    fleet.run(until=lambda: serves(0))
    plan = fleet.service.coordinator.control.plan(RollBack("cam-1", to=served.version))
    assert plan.undo == "aggregator rollback cam-1 --to 1"
    do(fleet, RollBack("cam-1", to=served.version))
    fleet.run(until=lambda: serves(2))
    with pytest.raises(VerbRefused, match="no such version to go back to; kept are 1, 2, 3; 3 is served"):
        do(fleet, RollBack("cam-1", to=99))
    do(fleet, Exclude("cam-3", "dirty lens"))
    assert events(fleet, "operator")[-1]["detail"].endswith("; because: dirty lens")
    with pytest.raises(VerbRefused, match="excluded already, by ana: dirty lens"):
        do(fleet, Exclude("cam-3"))
    with pytest.raises(VerbRefused, match="is excluded, and gets no models"):
        do(fleet, RollBack("cam-3"))
    assert "cam-3 stay as they are: excluded" in do(fleet, RollBack("*"))
    fleet.run(until=lambda: serves(1) and fleet.clients["cam-4"].manifest.version == 4)
    fleet.clients["cam-5"].dies_in = 9
    fleet.run()


def test_a_device_that_only_serves_delays_nothing(fleet: TinyFleet) -> None:
    client = fleet.clients["cam-5"]
    client.dies_in = 0
    client._presence = lambda status: Presence("cam-5", status, client.boot, client._sequence, trains=False)
    fleet.run(until=lambda: fleet.rounds.index == 2)
    assert fleet.now < 160, "no round waited for its deadline"
    assert (member(fleet, "cam-5").trains, member(fleet, "cam-5").wait.reason) == (False, "serves-only")
    assert fleet.clients["cam-5"].manifest.round == 2, "it gets its models"


def test_without_a_number_of_clients_a_round_waits_for_whoever_belongs_to_the_fleet(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path, ("cam-1", "cam-2"), num_clients=None)
    for client in ("cam-1", "cam-2"):
        fleet.clients[client].dies_in = 1
    fleet.run(until=lambda: fleet.rounds.index == 1)
    table = Members(tmp_path / "aggregator")
    for number in (1, 2, 3):
        table.enrol(f"cam-{number}", Issued(number, 0.0, 9e9, 9e9), 1.0)  # beside the running aggregator
    fleet.run(until=lambda: fleet.rounds.quorum == 3)
    assert member(fleet, "cam-3").wait.reason == "never-seen"
    table.revoke("cam-3", 2.0)
    fleet.run(until=lambda: fleet.rounds.quorum == 2)
    fleet.close()


def test_who_is_revoked_counts_no_more_in_the_open_round_and_the_round_waits_for_the_others(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path, num_clients=None)
    table = Members(tmp_path / "aggregator")
    for number in (1, 2, 3):
        table.enrol(f"cam-{number}", Issued(number, 0.0, 9e9, 9e9), 1.0)
    fleet.clients["cam-2"].dies_in = 0
    fleet.run(until=lambda: fleet.rounds.accepted == ("cam-1", "cam-3") and fleet.rounds.quorum == 3)
    index = fleet.rounds.index
    table.revoke("cam-3", 2.0)
    fleet.run(until=lambda: fleet.rounds.quorum == 2)
    assert (fleet.rounds.index, fleet.rounds.accepted) == (index, ("cam-1",)), "it waits for cam-2"
    assert set(fleet.store.uploads(index)) == {"cam-1"}
    (withdrawn,) = events(fleet, "upload withdrawn")
    assert (withdrawn["client"], withdrawn["round"]) == ("cam-3", index)
    deeds = [(event["verb"], event["client"]) for event in events(fleet, "operator")]
    assert deeds == [("enroll", "cam-1"), ("enroll", "cam-2"), ("enroll", "cam-3"), ("revoke", "cam-3")]
    assert events(fleet, "other device") == [], "it is the same device, and revoked"
    for verb in (Exclude("cam-3"), Readmit("cam-3"), RollBack("cam-3")):
        with pytest.raises(VerbRefused, match="cam-3 is revoked; `aggregator enroll cam-3`"):
            do(fleet, verb)
    (line,) = [line for line in read_status(tmp_path / "aggregator").lines() if line.startswith("cam-3")]
    assert line.endswith(", is revoked")
    fleet.close()


def test_who_took_part_before_the_first_enrolment_counts_no_more_until_it_is_enrolled(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path, ("cam-1", "cam-2"))
    fleet.clients["cam-1"].dies_in = 1
    fleet.run(until=lambda: fleet.rounds.accepted == ("cam-2",) and fleet.rounds.index == 1)
    table = Members(tmp_path / "aggregator")
    table.enrol("cam-1", Issued(1, 0.0, 9e9, 9e9), 1.0)
    fleet.run(until=lambda: fleet.rounds.accepted == ())
    (line,) = [line for line in read_status(tmp_path / "aggregator").lines() if line.startswith("cam-2")]
    assert line.endswith(", isn't enrolled")
    fleet.run(until=lambda: fleet.clients["cam-2"].announcement.shuts_out("cam-2"))
    assert not fleet.clients["cam-2"].announcement.shuts_out("cam-1")
    for verb in (Readmit("cam-2"), RollBack("cam-2")):
        with pytest.raises(VerbRefused, match="cam-2 isn't enrolled; `aggregator enroll cam-2`"):
            do(fleet, verb)
    table.enrol("cam-2", Issued(2, 0.0, 9e9, 9e9), 1.0)
    fleet.clients["cam-2"].uploaded = 0
    fleet.run(until=lambda: fleet.rounds.accepted == ("cam-2",))
    fleet.run(until=lambda: not fleet.clients["cam-2"].announcement.shuts_out("cam-2"))
    fleet.close()


def test_a_round_stays_open_for_a_year_at_most(fleet: TinyFleet) -> None:
    fleet.run(until=lambda: fleet.service.ready)
    for _ in range(12):
        do(fleet, ExtendRound(30 * 86400.0))
    with pytest.raises(VerbRefused, match="more than a year"):
        do(fleet, ExtendRound(30 * 86400.0))


@pytest.mark.parametrize(("late_rounds", "fate"), [(0, "is lost"), (2, "can count in a later one")])
def test_closing_a_round_says_what_becomes_of_the_work_that_it_waited_for(
    tmp_path: Path, late_rounds: int, fate: str
) -> None:
    fleet = TinyFleet(tmp_path, ("cam-1", "cam-2"), late_rounds=late_rounds)
    fleet.clients["cam-2"].dies_in = 0
    fleet.run(until=lambda: fleet.rounds.accepted == ("cam-1",))
    assert do(fleet, CloseRound()).endswith(f"without cam-2, whose work of this round {fate}")
    fleet.close()


def test_excluding_too_many_says_that_no_round_ends(tmp_path: Path) -> None:
    fleet = TinyFleet(tmp_path, ("cam-1", "cam-2"), min_clients=2)
    fleet.clients["cam-2"].dies_in = 0
    fleet.run(until=lambda: fleet.rounds.accepted == ("cam-1",))
    assert "no round ends until another one takes part" in do(fleet, Exclude("cam-2"))
    fleet.run(until=lambda: events(fleet, "round extended") != [])
    assert fleet.rounds.index == 0
    fleet.close()


@pytest.mark.parametrize(
    ("verb", "why"),
    [
        (Exclude("cam-6"), "did you mean 'cam-"),
        (Readmit("cam-1"), "isn't excluded"),
        (Resume(), "isn't paused"),
        (CloseRound(), "closes with 3 at least"),
        (RollBack("cam-1", to=77), "no such version to go back to; kept are 1 "),
        (RollBack("*", to=77), "no client has such a version"),
    ],
    ids=str,
)
def test_what_cannot_be_done_says_why_and_changes_nothing(fleet: TinyFleet, verb: Verb, why: str) -> None:
    fleet.rules = RoundRules(num_clients=5, min_clients=3)
    fleet.kill_aggregator()
    fleet.new_service()
    fleet.run(until=lambda: fleet.rounds.index == 1 and not fleet.rounds.accepted)
    before = fleet.service.coordinator.control.look(0.0)
    for attempt in (fleet.service.coordinator.control.plan, lambda verb: do(fleet, verb)):
        with pytest.raises(VerbRefused, match=why):
            attempt(verb)
    after = fleet.service.coordinator.control.look(0.0)
    assert [found.exclusion for found in after.members] == [found.exclusion for found in before.members]
    assert events(fleet, "operator") == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"verb": "stop"}',
        b'{"verb": "exclude"}',
        b'{"verb": "exclude", "client": ""}',
        b'{"verb": "exclude", "client": "../x"}',
        b'{"verb": "exclude", "client": "a", "force": true}',
        b'{"verb": "exclude", "client": "a", "because": "\\u001b[2J"}',
        b'{"verb": "exclude", "client": "a", "because": "' + b"x" * 201 + b'"}',
        b'{"verb": "rollback", "client": "a", "to": 0}',
        b'{"verb": "rollback", "client": "a", "to": 1e300}',
        b'{"verb": "exclude", "client": "*"}',
        b'{"verb": "round extend", "by_s": -1}',
        b'{"verb": "round extend", "by_s": NaN}',
        b" " * 5000,
        b"\xff",
    ],
)
def test_what_is_no_verb_is_one_documented_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_verb(data)


def test_all_means_every_client_to_a_program_too() -> None:
    assert decode_verb(b'{"verb": "rollback", "client": "all"}') == RollBack("*")
    with pytest.raises(MalformedMessage, match="means every client"):
        decode_verb(b'{"verb": "exclude", "client": "all"}')


@pytest.mark.parametrize(("text", "version"), [("7", 7), ("2/7", (2 << 32) + 7)])
def test_a_version_is_written_as_it_is_shown(text: str, version: int) -> None:
    assert parse_version(text) == version
    for wrong in ("", "x", "/7", "7/", "1/2/3", "-1", "9" * 40):
        with pytest.raises(MalformedMessage):
            parse_version(wrong)


def test_other_threads_are_answered_by_the_loop(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet)
    answers: list[object] = []

    def ask() -> None:
        control = fleet.service.control
        answers.append(control.plan(Exclude("cam-5")).undo)
        answers.append(control.do(decode_verb(b'{"verb": "exclude", "client": "cam-5"}'), "ana").undo)
        try:
            control.do(Exclude("cam-5"), "ana")
        except VerbRefused as refused:
            answers.append(str(refused))
        answers.append(control.look().expected)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        fleet.service.loop.pump(0.01)
    assert answers == ["aggregator readmit cam-5"] * 2 + ["cam-5 is excluded already, by ana", 4]


def test_a_full_disk_lets_no_aggregator_begin_anew_for_more_classes(
    fleet: TinyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfleet.aggregator.service.planned", lambda _, names: SimpleNamespace(text=str(names)))
    waits_for_the_fifth(fleet)
    service = fleet.service
    service._parts.disk.problem = "disk full: 0 MB free of 80 MB; uploads wait"
    with pytest.raises(VerbRefused, match="disk full: 0 MB free of 80 MB; uploads wait; nothing was changed"):
        service._grow(("tram",), "ana", False)
    assert service.growth is None
    assert "tram" in service._grow(("tram",), "ana", True).text
    service._parts.disk.problem = ""
    service._grow(("tram",), "ana", False)
    assert service.growth == (("tram",), "ana")


@pytest.mark.parametrize(
    ("kept", "origin"),
    [
        ([(1, 1), (2, 2), (3, 3)], 2),
        ([(1, 1), (2, 4), (3, 3)], 1),  # right behind a roll back to 2
        ([(2, 6), (3, 5), (7, 7)], 2),  # a round after two of them: what served, not what was sent away
        ([(5, 5)], None),
    ],
)
def test_a_rollback_leads_to_what_was_served_before(kept: list[tuple[int, int]], origin: int | None) -> None:
    contents = tuple(Kept(first, Manifest("down", "fleet", "cam-1", 1, version, ())) for first, version in kept)
    found = target_of(contents, None)
    assert (None if found is None else found.origin) == origin
