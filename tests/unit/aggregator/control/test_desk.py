"""What operators tell an aggregator: planned, done, durable, in the journal; and what the fleet makes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_fleet import Crash, TinyFleet

from replayfleet.aggregator.control.verbs import Exclude, Readmit, Verb, VerbRefused, decode_verb
from replayfleet.aggregator.control.view import MemberView
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.steps import Step
from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.messages import Presence

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


def waits_for_the_fifth(fleet: TinyFleet, round_index: int = 0) -> None:
    """Four uploads are there, and the fifth never comes."""
    fleet.clients["cam-5"].dies_in = round_index
    fleet.run(until=lambda: fleet.rounds.index == round_index and len(fleet.rounds.accepted) == 4)


def test_one_of_five_is_excluded_while_a_round_waits_for_it_and_readmitted(fleet: TinyFleet) -> None:
    waits_for_the_fifth(fleet, round_index=1)
    assert (member(fleet, "cam-5").is_awaited, member(fleet, "cam-4").is_awaited) == (True, False)
    assert member(fleet, "cam-5").wait.reason == "upload"
    before = fleet.now
    assert "closes with 4 uploads, 4 are there" in do(fleet, Exclude("cam-5", "it only sends noise"))
    fleet.run(until=lambda: fleet.rounds.index == 3)
    assert fleet.now - before < 5, "this round and the next close by quorum, not by their deadline of 60 s"
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


@pytest.mark.parametrize("verb", [Exclude("cam-5"), Readmit("cam-4")], ids=["exclude", "readmit"])
def test_a_deed_that_a_crash_interrupts_is_done_and_told_once(fleet: TinyFleet, verb: Verb) -> None:
    waits_for_the_fifth(fleet)
    do(fleet, Exclude("cam-4"))
    fleet.crash_at = Step.DEED_DONE
    with pytest.raises(Crash):
        do(fleet, verb)
    for _ in range(2):
        fleet.kill_aggregator()
        fleet.new_service()
        fleet.run(for_s=1.0, until=lambda: fleet.service.ready)
    assert fleet.store.roll.refresh()[verb.client].exclusion is None or isinstance(verb, Exclude)
    assert [event["verb"] for event in events(fleet, "operator")] == ["exclude", type(verb).__name__.lower()]


def test_a_device_that_only_serves_delays_nothing(fleet: TinyFleet) -> None:
    client = fleet.clients["cam-5"]
    client.dies_in = 0
    client._presence = lambda status: Presence("cam-5", status, client.boot, client._sequence, trains=False)
    fleet.run(until=lambda: fleet.rounds.index == 2)
    assert fleet.now < 160, "no round waited for its deadline"
    assert (member(fleet, "cam-5").trains, member(fleet, "cam-5").wait.reason) == (False, "serves-only")
    assert fleet.clients["cam-5"].manifest.round == 2, "it gets its models"


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
    ],
    ids=["nobody", "not excluded"],
)
def test_what_cannot_be_done_says_why_and_changes_nothing(fleet: TinyFleet, verb: Verb, why: str) -> None:
    fleet.run(until=lambda: fleet.rounds.index == 1)
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
        b" " * 5000,
        b"\xff",
    ],
)
def test_what_is_no_verb_is_one_documented_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_verb(data)


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
