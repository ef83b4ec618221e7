"""The coordinator and its download desk, with a scripted courier, a scripted method and ``now`` as a number."""

from __future__ import annotations

import dataclasses
import errno
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from replayfleet.aggregator.admission import Caps, Gate
from replayfleet.aggregator.aggregation import RoundResult
from replayfleet.aggregator.coordinator import MAX_LITTER_BYTES, MAX_REPORTS, Coordinator
from replayfleet.aggregator.leading import Claim, Leadership
from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.operator.journal import Journal as EventJournal
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.precision.wishes import Wish, Wishes
from replayfleet.aggregator.presence import DEAD_AFTER_S, MAX_NEWCOMERS, PresenceTable
from replayfleet.aggregator.records.roll import Exclusion
from replayfleet.aggregator.rounds.machine import Phase, RoundRules
from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.aggregator.sync.downloads import MAX_PREPARING
from replayfleet.aggregator.sync.finish import GRACE_S
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason, ReplayfleetError
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.service.disk import Disk, Room, disk_errno
from replayfleet.federation.wire.protocol.facts import encode_facts
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import (
    COUNTER_BITS,
    Announcement,
    BlobEntry,
    FleetSpec,
    Manifest,
    Offer,
    Presence,
    Probe,
    Report,
    RolledBack,
    Serving,
    Verdict,
)
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Failed, Offered, Received

SPEC = FleetSpec("street", "scripted", {}, {}, 0)
COMMON = BlobEntry("task", "aa" * 32, 5, shared=True)
OWN = BlobEntry("own", "bb" * 32, 5)


class Upload:
    @staticmethod
    def unpack(_artefacts: Artefacts) -> Any:
        return SimpleNamespace(pack=lambda: Artefacts({}, {}))


class Method:
    name, stores_data, Upload, Download = "scripted", False, Upload, Upload

    @staticmethod
    def check_upload(_upload: Any) -> None:
        """Every upload is good."""


class Courier:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sent: list[tuple[str, Manifest, tuple[str, ...]]] = []
        self.accepted: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.verdicts: list[tuple[str, bool]] = []
        self.reasons: list[str] = []
        self.counts_in: list[int] = []
        self.counters: Counter[str] = Counter()
        self.withdrawn: list[str] = []

    def handle(self, _topic: str, _payload: bytes, _now: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def tick(self, _now: float) -> list[Event]:
        return []

    def resume(self, _now: float) -> None:
        pass

    def forget(self, peer: str | None = None, *, for_good: bool = False) -> None:
        self.sent = [] if peer is None else [sent for sent in self.sent if sent[0] != peer]

    def withdraw(self, peer: str) -> None:
        self.withdrawn.append(peer)

    advanced = float("-inf")

    def advanced_at(self, _peer: str) -> float:
        return self.advanced

    def send(
        self, peer: str, manifest: Manifest, digests: Any, _now: float, answers: str = "", bases: Any = None
    ) -> None:
        self.bases = bases
        self.sent.append((peer, manifest, tuple(digests)))

    def accept(self, peer: str, offer: Offer, _now: float) -> list[Event]:
        self.accepted.append(peer)
        return [Arrived(peer, offer.transfer_id, offer.manifest, 7)]

    def refuse(self, peer: str, _offer: Offer, reason: str, _detail: str, _now: float) -> None:
        self.refused.append((peer, reason))

    def conclude(
        self, peer: str, _manifest: Manifest, _id: str, *, accepted: bool, counts_in: int = -1, **why: str
    ) -> None:
        self.verdicts.append((peer, accepted))
        self.counts_in.append(counts_in)
        self.reasons.append(why.get("reason", ""))


class Jobs:
    """Runs work when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[..., None], Callable[..., None]]] = []

    @property
    def idle(self) -> bool:
        return not self.waiting

    def submit(self, work: Any, done: Any, failed: Any) -> None:
        self.waiting.append((work, done, failed))

    def run(self, now: float) -> None:
        while self.waiting:
            work, done, failed = self.waiting.pop(0)
            try:
                result = work()
            except (ValueError, OSError, MemoryError) as error:
                failed(error, now)
            else:
                done(result, now)


class Aggregation:
    def __init__(self) -> None:
        self.fails = False
        self.ran: list[tuple[int, list[str]]] = []
        self.left_out: frozenset[str] = frozenset()

    def download_for(
        self, client_id: str, round_index: int, _state: Any, wishes: Mapping[str, Wish], left_out: frozenset[str]
    ) -> Manifest:
        self.left_out = left_out
        if self.fails:
            raise ValueError("no disk")
        return self.draft(client_id, round_index, wishes)

    @staticmethod
    def draft(client_id: str, round_index: int, wishes: Mapping[str, Wish]) -> Manifest:
        """Rounded, if the client wants that and didn't refuse it."""
        draft, wish = Manifest("down", "street", client_id, round_index, 0, (COMMON, OWN)), wishes.get(client_id)
        if wish is None or wish.refused:
            return draft
        serving = Serving(f"graph/task-{wish.precision}", "graph/rounded-from/own", Probe(0, 1, (0.0,), 1.0))
        return msgspec.structs.replace(draft, serving=serving)

    def run(
        self,
        index: int,
        uploads: Mapping[str, Manifest],
        _state: Any,
        _former: Any,
        wishes: Mapping[str, Wish],
        left_out: frozenset[str],
    ) -> RoundResult:
        self.left_out = left_out
        if self.fails:
            raise MemoryError
        self.ran.append((index, list(uploads)))
        drafts = {client: self.draft(client, index + 1, wishes) for client in uploads}
        return RoundResult(index, StoredArtefacts((), "cc" * 32), drafts, {}, {}, {}, {}, 0.1, 0.1)


class Journal:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}  # of the newest

    def add(self, event: str, **facts: Any) -> None:
        self.lines.append(event)
        self.facts = facts

    def numbers(self, _event: str, _field: str) -> set[int]:
        return set(range(100))


class Desk:
    """A coordinator over a store on disk, which a restart reads again."""

    max_clients = 3

    def __init__(self, folder: Path, claim: Claim = Claim.SOLE, wall_s: float = 0.0, **rules: Any) -> None:
        self.claim = claim
        self.folder, self.rules = folder, {"num_clients": 2, "deadline_s": 60.0, **rules}
        self.store = AggregatorStore(folder)
        if self.store.spec() is None:
            self.store.found(SPEC, 0.0)
        self.courier, self.jobs, self.aggregation, self.journal = Courier(), Jobs(), Aggregation(), Journal()
        self.announced: list[Announcement] = []
        self.collected: list[set[str]] = []
        self.lost, self.known = set[str](), set[str]()
        self.presence = PresenceTable()
        self.disk = Disk(folder, "uploads wait", 0.0)
        self.releases = Mock(roots=(), signed=lambda manifest: manifest)
        place = (self.store.epoch(), self.store.round().index)
        self.leadership = Leadership(self.store.home(), "1", place, self.claim)
        parts: Any = Parts(
            spec=SPEC,
            rules=RoundRules(**self.rules),
            method=cast("Any", Method),
            gate=Gate("street", {}.get, Caps(max_clients=self.max_clients)),
            store=self.store,
            disk=self.disk,
            blobs=cast("Any", self),
            courier=cast("Any", self.courier),
            aggregation=cast("Any", self.aggregation),
            jobs=cast("Any", self.jobs),
            journal=cast("Any", self.journal),
            metrics=Metrics(),
            presence=self.presence,
            wishes=Wishes(self.presence),
            announce=self.announced.append,
            leadership=self.leadership,
            releases=cast("Any", self.releases),
            ring=cast("Any", SimpleNamespace(keep=self.known.add, turned_away=list, other_uses=lambda *_: False)),
            wall_clock=lambda: wall_s,
        )
        self.coordinator = Coordinator(parts, 0.0)
        self.coordinator.start(0.0)

    def collect(self, keep: set[str]) -> int:
        self.collected.append(keep)
        return 0

    def has(self, digest: str) -> bool:
        return digest not in self.lost

    def restarted(self, wall_s: float = 0.0) -> Desk:
        self.store.close()
        return Desk(self.folder, wall_s=wall_s, **self.rules)

    def hears(self, *events: Event, now: float = 0.0) -> None:
        self.courier.events = list(events)
        self.coordinator.on_message("", b"", now)

    def online(self, *clients: str, now: float = 0.0, sequence: int = 1, precision: str = "") -> None:
        said = (Presence(client, "online", "boot", sequence, precision=precision) for client in clients)
        self.hears(*(Received(presence.client_id, presence) for presence in said), now=now)
        self.jobs.run(now)

    def upload(self, *clients: str, round_index: int = 0, now: float = 1.0) -> None:
        self.presence.members |= frozenset(clients)
        for client in clients:
            manifest = Manifest("up", "street", client, round_index, 1, (), encode_facts({}))
            self.hears(Offered(client, Offer("client", "0" * 32, manifest, (), 1024, b"")), now=now)

    def verdict(self, client: str, manifest: Manifest, *, accepted: bool, why: str = "busy") -> None:
        told = Verdict("client", "0" * 32, manifest.round, manifest.version, accepted, "" if accepted else why)
        self.hears(Concluded(client, manifest, told, 9))

    def offered(self) -> list[tuple[str, int, int]]:
        return [(peer, manifest.round, manifest.version) for peer, manifest, _ in self.courier.sent]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def enrolled(desk: Desk, *clients: str) -> Members:
    table = Members(desk.folder)
    for number, client in enumerate(clients, start=1):
        table.enrol(client, Issued(number, 0.0, 9e9, 9e9), 1.0)
    return table


def test_a_round_from_the_first_sign_of_life_to_the_next_rounds_downloads(desk: Desk) -> None:
    desk.online("a", "b")
    assert desk.offered() == [("a", 0, 1), ("b", 0, 1)]
    desk.upload("a")
    assert desk.coordinator.rounds.is_open
    desk.upload("b")
    assert desk.courier.verdicts == [("a", True), ("b", True)]
    assert desk.announced[-1].state == "aggregating"
    desk.jobs.run(2.0)
    assert desk.aggregation.ran == [(0, ["a", "b"])]
    assert (desk.announced[-1].state, desk.announced[-1].round) == ("open", 1)
    assert [one for one in desk.offered() if one[0] != EVERYBODY][2:] == [("a", 1, 2), ("b", 1, 2)]


def test_a_client_whose_upload_counts_is_known_again_though_it_never_confirmed_a_download(desk: Desk) -> None:
    desk.online("a", "b")
    assert desk.known == set()
    desk.upload("a")
    assert desk.known == {"a"}


@pytest.mark.parametrize(("wall_s", "took_s"), [(40.0, 40.0), (-3600.0, 0.0)])  # a clock that was put right
def test_a_round_that_a_process_before_opened_took_as_long_as_it_did(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, wall_s: float, took_s: float
) -> None:
    anew = desk.restarted(wall_s)
    anew.online("a", "b")
    told = list[tuple[str, Any]]()
    monkeypatch.setattr(anew.journal, "add", lambda event, **facts: told.append((event, facts)))
    anew.upload("a", "b", now=1.0)
    anew.jobs.run(1.0)
    facts = dict(told)
    assert (facts["round closed"]["open_s"], facts["round committed"]["round_s"]) == (took_s, took_s)


def test_what_all_clients_share_travels_once_and_only_what_a_client_lacks_is_offered(desk: Desk) -> None:
    desk.online("a", "b")
    desk.verdict("a", desk.courier.sent[0][1], accepted=True)
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    assert [(peer, digests) for peer, _, digests in desk.courier.sent[2:]] == [
        (EVERYBODY, (COMMON.digest,)),  # b never confirmed it
        ("a", ()),
        ("b", (OWN.digest,)),
    ]


@pytest.mark.parametrize(
    "error",
    [
        KeyError("aa"),
        MalformedMessage("too large"),
        ArtefactRejected(Reason.WRONG_DIGEST, "damaged"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
    ids=repr,
)
def test_where_what_all_share_cant_be_sent_to_all_each_is_sent_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    send = desk.courier.send

    def to_one(peer: str, *rest: Any, **options: Any) -> None:
        if peer == EVERYBODY:
            raise error
        send(peer, *rest, **options)

    monkeypatch.setattr(desk.courier, "send", to_one)
    desk.online("a", "b")
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    digests = (COMMON.digest, OWN.digest)
    assert [(peer, sent) for peer, _, sent in desk.courier.sent[2:]] == [("a", digests), ("b", digests)]


def test_a_client_that_comes_back_is_offered_the_same_download_again(desk: Desk) -> None:
    desk.online("a")
    desk.hears(Received("a", Presence("a", "online", "another boot", 1)), now=5.0)
    desk.jobs.run(5.0)
    assert desk.offered() == [("a", 0, 1), ("a", 0, 1)]


def test_a_download_that_cant_be_made_is_tried_again_while_its_client_waits(desk: Desk) -> None:
    desk.aggregation.fails = True
    desk.online("a")
    for now in (3.0, 6.0):
        desk.coordinator.tick(now)
        desk.jobs.run(now)
    assert (desk.offered(), desk.journal.lines.count("download failed")) == ([], 3)
    desk.aggregation.fails = False
    desk.coordinator.tick(9.0)
    desk.jobs.run(9.0)
    assert desk.offered() == [("a", 0, 1)]


def test_a_download_that_cant_be_made_is_tried_again_at_the_next_sign_of_life(desk: Desk) -> None:
    desk.aggregation.fails = True
    desk.online("a")
    assert desk.offered() == []
    assert desk.journal.lines[-1] == "download failed"
    desk.aggregation.fails = False
    desk.hears(Received("a", Presence("a", "online", "another boot", 1)))
    desk.jobs.run(0.0)
    assert desk.offered() == [("a", 0, 1)]


def test_no_more_clients_are_served_than_the_fleet_may_have(desk: Desk) -> None:
    desk.online("a", "b", "c", "d")
    assert [client for client, *_ in desk.offered()] == ["a", "b", "c"]


def test_a_revoked_member_takes_no_place(desk: Desk) -> None:
    desk.online("a", "b", "c")
    table = enrolled(desk, "a", "b", "c", "d")
    table.revoke("a", 2.0)
    desk.coordinator.tick(3.0)
    desk.online("d", now=3.0)
    desk.online("e", now=3.0)
    assert [client for client, *_ in desk.offered()] == ["b", "c", "d"]
    desk.upload("d", now=4.0)
    assert ("d", True) in desk.courier.verdicts
    table.enrol("e", Issued(5, 0.0, 9e9, 9e9), 5.0)
    table.close()
    desk.coordinator.tick(6.0)
    desk.hears(Received("e", Presence("e", "online", "with its identity", 1)), now=6.0)
    desk.jobs.run(6.0)
    assert desk.offered()[-1][0] == "e", "who is enrolled has a place, however many made-up ones were there before"


def test_a_deadline_with_too_few_uploads_extends_the_round_and_those_who_refused_get_another_version(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, min_clients=1)
    desk.online("a", "b", now=50.0)
    desk.verdict("a", desk.courier.sent[0][1], accepted=False)
    desk.verdict("b", desk.courier.sent[1][1], accepted=True)
    desk.coordinator.tick(60.0)
    assert desk.coordinator.rounds.is_open
    assert desk.announced[-1].deadline_s == 60.0
    assert desk.offered()[2:] == [("a", 0, 2)]
    desk.upload("b", now=61.0)
    desk.coordinator.tick(120.0)
    assert desk.coordinator.rounds.phase is Phase.AGGREGATING


def test_a_round_that_is_extended_is_tried_again_by_those_who_could_not_train_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, min_clients=1)
    desk.online("a", "b", now=50.0)
    for client, manifest, _ in list(desk.courier.sent):
        desk.verdict(client, manifest, accepted=True)
    failed = Presence("a", "online", "boot", 2, reason="training-failed", why="the training process died 5 times")
    desk.hears(Received("a", failed), now=55.0)
    desk.coordinator.tick(60.0)
    assert desk.offered()[2:] == [("a", 0, 2)]


def test_a_rollback_is_noted_once_and_never_about_what_was_not_sent(desk: Desk) -> None:
    desk.online("a")
    told = Received("a", RolledBack("a", 0, 1, -1, "failing"))
    desk.hears(told)
    desk.hears(told)
    desk.hears(Received("a", RolledBack("a", 0, 7, -1, "failing")))
    desk.hears(Received("b", RolledBack("a", 0, 1, -1, "failing")))  # in another's name
    desk.online("b")
    desk.hears(Received("b", RolledBack("b", 2**52, 1, -1, "failing")))  # of a round that is yet to come
    assert desk.journal.lines.count("model rolled back") == 1


def test_whoever_died_twice_with_a_model_gets_it_anew_and_then_ever_later(desk: Desk) -> None:
    desk.online("a", "b")
    told = {"a": "crashed", "b": "drifted"}
    for version, due in ((1, 5.0), (2, 10.0), (3, 20.0)):
        for client, reason in told.items():
            desk.hears(Received(client, RolledBack(client, 0, version, -1, reason)))
        desk.hears(Received("a", Presence("a", "online", "boot", 1 + version)), now=due - 0.2)
        desk.coordinator.tick(due - 0.1)
        assert len(desk.offered()) == 1 + version
        desk.coordinator.tick(due)
        assert desk.offered()[-1] == ("a", 0, version + 1), "else a round may wait for it until its deadline"
    assert [client for client, _, _ in desk.offered()] == ["a", "b", "a", "a", "a"]


def test_a_download_whose_process_died_as_it_loaded_is_made_anew_too_and_ever_later(desk: Desk) -> None:
    desk.online("a", "b")
    for version, due in ((1, 5.0), (2, 10.0)):
        for client, reason in (("a", "crashed"), ("b", "load-failed")):
            manifest = next(sent for peer, sent, _ in reversed(desk.courier.sent) if peer == client)
            desk.verdict(client, manifest, accepted=False, why=reason)
        desk.coordinator.tick(due - 0.1)
        assert len(desk.offered()) == 1 + version
        desk.coordinator.tick(due)
        desk.jobs.run(due)
        assert desk.offered()[-1] == ("a", 0, version + 1)


def test_a_report_counts_once_for_each_version_and_only_from_its_client(desk: Desk) -> None:
    desk.online("a")
    report = Report("a", 0, 1, {"accuracy": 0.5})
    for event in (Received("b", report), Received("a", report), Received("a", report)):
        desk.hears(event)
    desk.hears(Received("a", Report("a", 0, 2, {})))
    assert desk.journal.lines.count("client report") == 1


def test_of_a_detector_the_journal_says_how_many_boxes_it_finds(desk: Desk) -> None:
    desk.online("a", "b")
    desk.hears(Received("a", Report("a", 0, 1, {"boxes_found": 0.25})))
    assert desk.journal.facts["boxes_found"] == 0.25
    assert "accuracy" not in desk.journal.facts
    desk.hears(Received("b", Report("b", 0, 1, {"accuracy": 0.5})))
    assert desk.journal.facts["accuracy"] == 0.5


def test_a_client_whose_version_it_made_huge_itself_fills_the_journal_with_no_reports(desk: Desk) -> None:
    desk.online("a")
    desk.hears(Received("a", Presence("a", "online", "another", 1, serving_version=7)))
    desk.jobs.run(0.0)
    for version in range(2, 99):
        desk.hears(Received("a", Report("a", 0, version, {})))
    assert desk.journal.lines.count("client report") == MAX_REPORTS
    desk.online("b")
    desk.hears(Received("b", Report("b", 0, 1, {})))
    assert desk.journal.lines.count("client report") == MAX_REPORTS + 1


def test_a_client_that_falls_silent_is_gone_and_gets_nothing_of_the_next_round(desk: Desk) -> None:
    desk.online("a", "b")
    desk.upload("a", now=1.0)
    desk.online("a", now=DEAD_AFTER_S, sequence=2)
    desk.coordinator.tick(DEAD_AFTER_S + 0.1)
    assert desk.journal.lines[-1] == "client gone"
    assert desk.presence.live == ("a",)
    assert desk.courier.withdrawn == ["b"]
    desk.hears(Received("a", Presence("a", "offline", "boot", 3)))
    assert desk.courier.withdrawn == ["b", "a"], "its connection broke"


def test_a_download_that_was_being_made_for_a_client_that_is_gone_waits_for_its_return(desk: Desk) -> None:
    desk.hears(Received("a", Presence("a", "online", "boot", 1)), Received("a", Presence("a", "offline", "boot", 2)))
    desk.jobs.run(1.0)
    assert desk.offered() == []
    desk.online("a", now=2.0, sequence=3)
    assert desk.offered() == [("a", 0, 1)]


def test_an_upload_that_counts_is_confirmed_again_and_another_one_is_refused(desk: Desk) -> None:
    desk.upload("a", "a")
    assert desk.courier.verdicts == [("a", True)] * 2
    assert desk.courier.accepted == ["a"]
    desk.upload("b", round_index=4)
    assert desk.courier.refused == [("b", "wrong-round")]
    assert desk.coordinator.rounds.accepted == ("a",)


def test_a_late_upload_counts_once_in_the_open_round_and_its_client_is_told_in_which(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=1, late_rounds=1)
    assert desk.announced[-1].late_rounds == 1
    for closing in range(2):
        desk.upload("b", round_index=closing)
        desk.upload("a", round_index=closing, now=2.0)
        assert desk.courier.refused[closing:] == [("a", "busy")], "the next round takes it"
        desk.jobs.run(3.0)
    assert "upload rejected" not in desk.journal.lines, "it only waits"
    desk.upload("a", round_index=0)
    assert desk.courier.refused[2:] == [("a", "wrong-round")], "two rounds late"
    desk.upload("a", "a", round_index=1)
    assert desk.courier.counts_in == [0, 1, 2, 2], "told again, and counted once"
    desk.jobs.run(4.0)
    assert desk.aggregation.ran[-1] == (2, ["a"])
    again = desk.restarted()
    again.upload("a", round_index=1)
    assert again.courier.counts_in == [2], "its round is over, and it stays used"


@pytest.mark.parametrize("num_clients", [None, 2])
def test_who_was_revoked_while_no_aggregator_ran_closes_no_round_at_its_start(
    tmp_path: Path, num_clients: int | None
) -> None:
    desk = Desk(tmp_path, num_clients=num_clients)
    table = enrolled(desk, "a", "b")
    desk.coordinator.tick(1.5)
    desk.upload("a", now=1.6)
    assert desk.coordinator.rounds.accepted == ("a",)
    table.revoke("a", 2.0)
    again = desk.restarted()
    again.coordinator.tick(0.2)
    assert again.coordinator.rounds.accepted == ()
    assert (again.coordinator.rounds.is_open, again.aggregation.ran) == (True, [])


def test_an_upload_that_arrives_after_its_client_was_revoked_counts_no_more(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=None)
    table = enrolled(desk, "a", "b", "c")
    desk.coordinator.tick(1.5)
    desk.upload("b", now=1.6)
    table.revoke("a", 2.0)
    desk.coordinator.tick(3.0)
    desk.hears(Arrived("a", "0" * 32, Manifest("up", "street", "a", 0, 1, ()), 7), now=3.1)
    assert (desk.courier.verdicts[-1], desk.courier.reasons[-1]) == (("a", False), "excluded")
    assert (desk.coordinator.rounds.accepted, desk.aggregation.ran) == (("b",), [])


def test_who_is_revoked_is_offered_nothing_more_and_who_is_enrolled_again_gets_the_newest(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=None)
    run = desk.aggregation.run  # as methods do: a download for each client of their state
    desk.aggregation.run = lambda index, uploads, *more: run(index, {"a": None, "z": None, **uploads}, *more)  # type: ignore
    table = enrolled(desk, "a", "b")
    desk.coordinator.tick(1.5)
    desk.online("a", "b", now=1.6)
    assert [client for client, *_ in desk.offered()] == ["a", "b"]
    metrics = desk.coordinator._parts.metrics
    metrics.reported |= {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.6}}
    table.revoke("a", 2.0)
    desk.coordinator.tick(3.0)
    assert metrics.reported.keys() == {"b"}, "the places are for those who report"
    assert [client for client, *_ in desk.offered()] == ["b"], "what was on its way to it ends too"
    desk.upload("b", now=3.1)
    desk.jobs.run(3.2)
    desk.coordinator.tick(3.3)
    assert (desk.coordinator.rounds.index, desk.aggregation.left_out) == (1, {"a"})
    assert [client for client, *_ in desk.offered()] == ["b", "b"]
    assert desk.store.download("a") is None, "a commit makes none for it, and keeps none"
    assert desk.store.download("z") is None, "nor for one that was never enrolled"
    assert desk.store.versions.of("a") == ()
    table.enrol("a", Issued(9, 0.0, 9e9, 9e9), 4.0)
    desk.coordinator.tick(5.0)
    desk.hears(Received("a", Presence("a", "online", "with its new keys", 1)), now=5.0)
    desk.jobs.run(5.0)
    assert (desk.offered()[-1][:2], desk.aggregation.left_out) == (("a", 1), frozenset())


def test_who_is_excluded_is_offered_nothing_when_it_comes_back(desk: Desk) -> None:
    def comes_back(boot: str) -> list[tuple[str, int, int]]:
        desk.courier.sent.clear()
        desk.store.roll.refresh()
        desk.hears(Received("b", Presence("b", "online", boot, 1)), now=2.0)
        desk.jobs.run(2.0)
        return desk.offered()

    desk.online("a", "b")
    desk.store.exclude("b", Exclusion(1.0, "ana", "it only sends noise"))
    assert comes_back("second") == []
    desk.store.roll.readmit("b")
    assert comes_back("third") == [("b", 0, 1)]


def test_who_was_revoked_and_enrolled_again_within_a_second_has_no_upload_in_the_round(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    table = enrolled(desk, "a", "b")
    desk.coordinator.tick(1.5)
    desk.upload("a", now=1.6)
    desk.store.withdraw("a")  # as `aggregator revoke` does
    table.revoke("a", 2.0)
    table.enrol("a", Issued(9, 0.0, 9e9, 9e9), 2.1)
    desk.coordinator.tick(3.0)
    assert desk.coordinator.rounds.accepted == ()
    desk.upload("b", now=4.0)
    assert desk.coordinator.rounds.is_open, "it waits for the new device"
    assert desk.coordinator.rounds.accepted == ("b",)


def test_a_leader_that_leads_on_in_another_epoch_aggregates_its_round_once(tmp_path: Path) -> None:
    """The commit waited for the disk behind the new epoch, which began the round's aggregation again."""
    desk = Desk(tmp_path, Claim.ASK, num_clients=1, min_clients=1)
    desk.coordinator.on_connected(0.0)
    desk.coordinator.tick(1.5)
    desk.upload("a", now=2.0)
    desk.coordinator.tick(2.2)
    assert desk.coordinator.rounds.phase is Phase.AGGREGATING
    room = [Room(0, 1 << 30)]
    desk.disk._room, desk.disk._look_at = lambda: room[0], 0.0
    desk.coordinator.tick(2.4)
    assert desk.disk.problem
    other = Announcement("00-0", 0, "open", 60.0, SPEC, epoch=0)
    desk.hears(Received(EVERYBODY, other), now=2.6)
    desk.jobs.run(2.8)
    room[0] = Room(1 << 30, 1 << 30)
    for now in (10.0, 15.0):
        desk.coordinator.tick(now)
    desk.jobs.run(16.0)
    assert (desk.coordinator.rounds.index, desk.leadership.epoch) == (1, 1)
    assert len(desk.aggregation.ran) == 1


def test_goodbye_can_be_said_to_a_store_that_is_closed(desk: Desk) -> None:
    desk.online("a")
    desk.coordinator.rounds.phase = Phase.FINISHED
    desk.store.close()
    desk.coordinator.farewell(2.0)


def test_when_members_were_heard_of_is_known_after_a_run_that_was_shorter_than_a_minute(desk: Desk) -> None:
    desk.online("a")
    desk.upload("a")
    assert desk.store.roll.refresh()["a"].seen_at is None
    desk.coordinator.farewell(2.0)
    assert desk.store.roll.standings["a"].seen_at is not None


def test_what_arrived_of_an_upload_while_a_round_aggregates_is_kept_for_the_next_one(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=1, late_rounds=1)
    blob = BlobEntry("task", "dd" * 32, 5)
    late = Manifest("up", "street", "a", 0, 1, (blob,))
    desk.upload("b")
    desk.hears(Arrived("a", "0" * 32, late, 7), now=2.0)
    assert desk.courier.reasons[-1] == "busy"
    assert blob.digest in desk.coordinator._parts.arriving.digests()


@pytest.mark.parametrize("closed", [False, True])
def test_a_restart_goes_on_where_the_store_says(desk: Desk, closed: bool) -> None:
    desk.upload("a", *(["b"] if closed else []))
    again = desk.restarted()
    assert again.coordinator.rounds.accepted == (("a", "b") if closed else ("a",))
    assert again.jobs.idle is not closed
    if not closed:
        again.upload("b")
    again.jobs.run(0.0)
    assert again.aggregation.ran == [(0, ["a", "b"])]
    assert again.coordinator.rounds.index == 1


def test_a_round_that_cant_be_aggregated_ends_the_process_and_keeps_its_uploads(desk: Desk) -> None:
    desk.aggregation.fails = True
    desk.upload("a", "b")
    with pytest.raises(ReplayfleetError, match=r"aggregated: memory doesn't suffice \(MemoryError: \); its uploads"):
        desk.jobs.run(0.0)
    assert desk.restarted().coordinator.rounds.accepted == ("a", "b")


def test_a_round_that_another_writer_committed_ends_the_process(desk: Desk) -> None:
    desk.online("a", "b")
    desk.upload("a", "b")
    assert desk.store.commit_round(0, StoredArtefacts((), "cc" * 32), {}, 2.0)
    with pytest.raises(ReplayfleetError, match="was committed twice; the data dir has two writers"):
        desk.jobs.run(2.0)


def test_the_end_is_announced_and_stays_announced(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=1, num_rounds=1)
    desk.coordinator.farewell(0.0)
    assert desk.announced[-1].state == "offline"
    desk.online("a")
    desk.upload("a")
    desk.jobs.run(1.0)
    assert desk.announced[-1].state == "finished"
    desk.coordinator.farewell(2.0)
    assert desk.announced[-1].state == "finished"
    assert desk.coordinator.finish.waiting_for(2.0) == ["a"]
    desk.verdict("a", desk.courier.sent[-1][1], accepted=True)
    desk.hears(Received("a", Report("a", 1, 2, {})))
    assert desk.coordinator.finish.waiting_for(2.0) == []


def test_a_finished_run_waits_for_a_client_whose_connection_just_broke_not_for_one_that_left(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, num_clients=2, num_rounds=1)
    desk.online("a", "b")
    desk.upload("a", "b")
    desk.jobs.run(1.0)
    desk.hears(Received("a", Presence("a", "offline", "boot", 2)), now=2.0)
    desk.hears(Received("b", Presence("b", "stopped", "boot", 2)), now=2.0)
    assert not desk.coordinator.over(3.0)
    assert desk.coordinator.finish.waiting_for(2.0 + DEAD_AFTER_S) == ["a"]
    assert not desk.coordinator.over(2.0 + DEAD_AFTER_S)
    assert desk.coordinator.over(2.1 + DEAD_AFTER_S)


def test_a_finished_run_waits_for_a_client_that_receives_its_last_models_slowly(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_clients=1, num_rounds=1)
    desk.online("a")
    desk.upload("a")
    desk.jobs.run(1.0)
    over = []
    for now in range(1, 1000):
        desk.hears(Received("a", Presence("a", "online", "boot", 1 + now)), now=float(now))
        desk.courier.advanced = min(now // 33 * 33.0, 297.0)  # a block at 64 kbit/s, until something breaks
        over.append(desk.coordinator.over(float(now)))
    assert over.index(True) + 1 == 297 + GRACE_S


def test_blobs_that_something_still_needs_are_never_collected(desk: Desk) -> None:
    desk.online("a")
    desk.coordinator.tick(0.1)
    assert desk.collected == [{COMMON.digest, OWN.digest}]
    desk.coordinator.tick(0.2)
    assert len(desk.collected) == 1  # once after every commit


class FullDisk:
    """Every write of the store fails as on a full disk, until there is room."""

    def __init__(self, desk: Desk, *methods: str, error: Exception | None = None) -> None:
        self.full, self.desk = True, desk
        for name in methods:
            setattr(desk.store, name, partial(self._write, getattr(desk.store, name), error or FULL))

    def _write(self, write: Callable[..., Any], error: Exception, *words: Any) -> Any:
        if self.full:
            raise error
        return write(*words)

    def gets_free(self, now: float) -> None:
        self.full = False
        self.desk.coordinator.tick(now + 4)  # later than the longest wait
        self.desk.jobs.run(now + 4)


FULL = sqlite3.OperationalError("database or disk is full")


def test_an_upload_that_cant_be_kept_is_to_be_offered_again_and_none_is_taken_until_there_is_room(desk: Desk) -> None:
    disk = FullDisk(desk, "accept_upload")
    desk.upload("a")
    assert (desk.courier.verdicts, desk.courier.reasons) == ([("a", False)], ["busy"])
    assert desk.coordinator.rounds.accepted == ()
    desk.upload("b")
    assert desk.courier.refused == [("b", "busy")]
    disk.gets_free(1.0)
    desk.upload("a", "b")
    assert desk.coordinator.rounds.accepted == ("a", "b")


@pytest.mark.parametrize("method", ["close_round", "commit_round"])
def test_a_step_of_a_round_that_cant_be_written_is_done_when_there_is_room_and_once(desk: Desk, method: str) -> None:
    disk = FullDisk(desk, method)
    desk.online("a", "b")
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    num_announced = len(desk.announced)
    desk.coordinator.tick(11.0)
    assert len(desk.announced) == num_announced + 1, "it lives"
    assert desk.coordinator.rounds.index == 0
    disk.gets_free(10.0)
    assert (desk.coordinator.rounds.index, desk.aggregation.ran) == (1, [(0, ["a", "b"])])
    assert [one for one in desk.offered() if one[:2] == ("a", 1)]
    assert desk.restarted().coordinator.rounds.index == 1


def test_an_aggregator_that_stands_by_warns_of_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spare = Desk(tmp_path, Claim.ASK)
    spare.coordinator.on_connected(0.0)
    with EventJournal(tmp_path) as written, caplog.at_level("INFO"):
        spare.journal.add = written.add  # type: ignore[method-assign]
        for now in (0.5, 1.6):
            spare.hears(Received(EVERYBODY, Announcement("other-0", 0, "open", 60.0, SPEC, epoch=3)), now=now)
            spare.coordinator.tick(now + 1)
    assert [one.levelname for one in caplog.records if one.message == "standing by"] == ["WARNING"]


def test_an_aggregator_that_stands_by_hears_who_is_there_and_leaves_all_else_to_the_one_that_leads(
    tmp_path: Path,
) -> None:
    spare = Desk(tmp_path, Claim.ASK)
    spare.coordinator.on_connected(0.0)
    for now in (0.5, 1.6):
        spare.hears(Received(EVERYBODY, Announcement("other-0", 0, "open", 60.0, SPEC, epoch=3)), now=now)
        spare.coordinator.tick(now + 1)
    spare.online("a", now=3.0)
    spare.upload("a", now=3.0)
    assert spare.presence.live == ("a",)
    assert (spare.courier.accepted, spare.courier.refused, spare.courier.verdicts, spare.offered()) == ([], [], [], [])
    assert spare.store.uploads(0) == {}


def test_who_steps_back_while_a_round_is_aggregated_publishes_nothing(desk: Desk) -> None:
    desk.online("a", "b")
    desk.upload("a", "b")
    desk.courier.sent.clear()
    desk.hears(Received(EVERYBODY, Announcement("other-0", 0, "open", 60.0, SPEC, epoch=3)), now=1.5)
    assert desk.leadership.stands_by
    desk.jobs.run(2.0)
    assert desk.aggregation.ran == [(0, ["a", "b"])]
    assert desk.offered() == []


def test_a_spare_that_cannot_raise_the_epoch_demotes_nobody_when_its_disk_is_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It led in memory, ignored the leader that was back, and took over from round 0 as soon as it could write."""
    spare = Desk(tmp_path, Claim.ASK)

    def leader(state: Any, now: float) -> None:
        spare.hears(Received(EVERYBODY, Announcement("other-0", 0, state, 60.0, SPEC, epoch=3)), now=now)

    tried = []

    def full(epoch: int) -> None:
        tried.append(epoch)
        raise FULL

    spare.coordinator.on_connected(0.0)
    leader("open", 0.5)
    spare.coordinator.tick(1.5)
    leader("open", 1.6)
    assert spare.leadership.stands_by
    with monkeypatch.context() as patched:
        patched.setattr(spare.store, "raise_epoch", full)
        leader("offline", 2.0)
        spare.coordinator.tick(32.0)
        assert not spare.leadership.leads
        spare.coordinator.tick(32.2)
        assert set(tried) == {4}
        leader("open", 33.0)
    for now in (40.0, 60.0, 80.0):  # its disk is well
        leader("open", now)
        spare.coordinator.tick(now)
        assert not spare.leadership.leads
    assert {one.state for one in spare.announced} == {"standby"}
    leader("offline", now)
    assert not spare.releases.outlive_rival.called
    with monkeypatch.context() as patched:
        patched.setattr(spare.coordinator._chronicle, "started", Mock(side_effect=FULL))
        spare.coordinator.tick(now + 30.5)
    spare.coordinator.tick(now + 35.0)
    assert (spare.leadership.leads, spare.store.epoch()) == (True, 4)
    assert spare.releases.outlive_rival.call_count == 1


def test_an_aggregation_that_the_disk_refused_is_done_again_and_the_round_stays_closed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(desk.aggregation, "run", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        desk.upload("a", "b")
        desk.jobs.run(2.0)
    assert "disk full" in desk.disk.problem
    desk.coordinator.tick(20.0)
    desk.jobs.run(20.0)
    assert desk.coordinator.rounds.index == 1


def test_an_upload_that_our_own_disk_lost_is_no_quarantine(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.aggregation.run

    def without(*words: Any) -> RoundResult:
        left_out = {"a": "our own copy is damaged", "b": "implausible"}
        return dataclasses.replace(run(*words), quarantined=left_out, lost=frozenset("a"))

    monkeypatch.setattr(desk.aggregation, "run", without)
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    assert [line for line in desk.journal.lines if line in {"upload lost", "upload quarantined"}] == [
        "upload lost",
        "upload quarantined",
    ]


@pytest.mark.parametrize("lost", ["cc" * 32, COMMON.digest], ids=["of the state", "of a download"])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_round_whose_blobs_went_to_another_folder_is_aggregated_again_once(
    desk: Desk, lost: str, comes_back: bool
) -> None:
    """While the data dir was replaced they were written there: a commit would name what nobody has."""
    disk = FullDisk(desk, "commit_round")
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    desk.lost.add(lost)
    disk.full = False
    desk.coordinator.tick(8.0)
    assert desk.store.round().index == 0
    if comes_back:
        desk.lost.clear()
    desk.jobs.run(8.0)
    assert (desk.store.round().index, len(desk.aggregation.ran)) == (1, 2)


def test_nothing_is_collected_in_a_folder_that_replaced_the_data_dir(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.disk, "is_there", lambda: False)
    desk.coordinator.tick(1.0)
    assert desk.collected == []
    monkeypatch.undo()
    desk.coordinator.tick(2.0)
    assert len(desk.collected) == 1


def test_blobs_of_a_round_that_waits_for_its_commit_are_not_collected(desk: Desk) -> None:
    disk = FullDisk(desk, "commit_round")
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    desk.coordinator.tick(3.0)  # the first since it started, when it has some to collect
    assert desk.collected == []
    disk.gets_free(4.0)
    desk.coordinator.tick(20.0)
    assert len(desk.collected) == 1


def test_whoever_missed_a_download_because_of_the_disk_is_offered_it_again(desk: Desk) -> None:
    disk = FullDisk(desk, "put_download")
    with pytest.raises(sqlite3.OperationalError):
        desk.online("a")  # the loop tells the disk
    desk.disk.takes(FULL)
    assert desk.offered() == []
    disk.gets_free(1.0)
    assert desk.offered() == [("a", 0, 1)]


def test_a_store_that_was_full_in_the_middle_of_a_transaction_goes_on(tmp_path: Path) -> None:
    """SQLite takes back what a full disk stopped by itself; a page limit fills a database as a disk does."""
    store = AggregatorStore(tmp_path)
    store.found(SPEC, 0.0)
    (num_pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {num_pages}")
    large = Manifest("up", "street", "a", 0, 1, (), bytes(1 << 20))
    with pytest.raises(sqlite3.OperationalError, match="full") as raised:
        store.accept_upload(large, 1, 0)
    assert disk_errno(raised.value) == errno.ENOSPC
    assert store.uploads(0) == {}
    store._db.execute(f"PRAGMA max_page_count = {num_pages + 1000}")
    assert store.accept_upload(large, 1, 0)
    store.close()


def test_a_download_that_a_client_cant_take_now_is_offered_again_until_it_holds_it(desk: Desk) -> None:
    desk.online("a")
    manifest, now = desk.courier.sent[0][1], 0.0
    for attempt in range(20):
        desk.verdict("a", manifest, accepted=False)
        now += 3.0
        desk.online("a", now=now, sequence=attempt + 2)
        desk.coordinator.tick(now)
        assert len(desk.offered()) == attempt + 2
    assert desk.journal.lines.count("download refused") == 1, "said once, however often it is tried"
    desk.verdict("a", manifest, accepted=True)
    desk.coordinator.tick(now + 5.0)
    assert len(desk.offered()) == 21


def test_a_download_that_a_client_refuses_for_good_is_not_offered_again(desk: Desk) -> None:
    desk.online("a")
    told = Verdict("client", "0" * 32, 0, 1, False, "probe-mismatch")
    desk.hears(Concluded("a", desk.courier.sent[0][1], told, 9))
    desk.coordinator.tick(9.0)
    assert len(desk.offered()) == 1


def test_the_announcement_says_which_uploads_count_and_a_restart_says_it_again(desk: Desk) -> None:
    desk.online("a", "b")
    desk.upload("a")
    desk.coordinator.on_connected(2.0)
    mark = Manifest("up", "street", "a", 0, 1, (), encode_facts({})).mark
    assert desk.announced[-1].counts(mark)
    desk = desk.restarted()
    assert desk.announced[-1].counts(mark)
    desk.upload("b")
    desk.jobs.run(3.0)
    assert (desk.announced[-1].round, desk.announced[-1].holds) == (1, b"")


@pytest.mark.parametrize("lost", [False, True], ids=["", "its client's download was lost"])
def test_an_upload_of_an_epoch_that_was_undone_is_refused(desk: Desk, *, lost: bool) -> None:
    desk.online("a", "b")
    desk.store.raise_epoch(1)
    if lost:
        desk.store.drop_download("a")
    desk.upload("a")
    assert not desk.coordinator.rounds.accepted
    assert desk.courier.refused[-1] == ("a", "wrong-round")


@pytest.mark.parametrize("epoch", [0, 2], ids=["the one before", "one that a restored store knows nothing of"])
def test_an_upload_that_arrives_from_another_epoch_counts_no_more(desk: Desk, epoch: int) -> None:
    desk.online("a", "b")
    desk.store.raise_epoch(1)  # while it was on its way
    sent = Manifest("up", "street", "a", 0, (epoch << COUNTER_BITS) + 1, (), encode_facts({}))
    desk.hears(Arrived("a", "0" * 32, sent, 7))
    assert not desk.coordinator.rounds.accepted
    assert (desk.courier.verdicts[-1], desk.courier.reasons[-1]) == (("a", False), "wrong-round")


def test_a_client_ahead_of_the_store_gets_the_open_rounds_download_as_a_newer_version(desk: Desk) -> None:
    ahead = Presence("a", "online", "boot", 1, serving_version=50)
    desk.hears(Received("a", ahead))
    desk.jobs.run(0.0)
    ((client, round_index, version),) = desk.offered()
    assert (client, round_index) == ("a", 0)
    assert version > 50
    assert desk.journal.lines[-1] == "client ahead"


class Crowd(Desk):
    """Two members, and 3,000 ids that somebody made up."""

    max_clients = 1024
    ids = tuple(f"made-up-{number}" for number in range(3000))

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.online("a", "b")
        for _, manifest, _ in list(self.courier.sent):
            self.verdict(manifest.client_id, manifest, accepted=True)
        self.time = 1.0
        self.passes(1.0)

    def passes(self, seconds: float) -> None:
        self.time += seconds
        self.coordinator.tick(self.time)

    def flood(self, sequence: int) -> None:
        self.hears(*(Received(c, Presence(c, "online", "boot", sequence)) for c in self.ids), now=self.time)


def test_made_up_ids_cost_few_jobs_rows_and_lines_and_no_round(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    for sequence in range(1, 30):
        crowd.flood(sequence)
        assert len(crowd.jobs.waiting) <= MAX_PREPARING
        crowd.jobs.run(crowd.time)
        crowd.passes(1.0)
        crowd.jobs.run(crowd.time)
        assert len(crowd.store.clients()) <= 2 + MAX_NEWCOMERS
        assert len(crowd.presence.live) <= 2 + MAX_NEWCOMERS
    crowd.hears(*(Received(c, Presence(c, "online", "boot", 99)) for c in "ab"), now=crowd.time)
    crowd.upload("a", "b", now=crowd.time)
    crowd.jobs.run(crowd.time)
    assert crowd.coordinator.rounds.index == 1
    members = crowd.coordinator.control.look(crowd.time).members
    assert {member.client for member in members if member.is_member} == {"a", "b"}, "they alone become labels"


def test_when_the_flood_is_over_a_newcomer_gets_its_place_and_the_ghosts_leave_nothing(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    crowd.flood(1)
    for sequence in range(10):
        crowd.hears(Received("new", Presence("new", "online", "boot", sequence)), now=crowd.time)
        crowd.passes(5.0)
        crowd.jobs.run(crowd.time)
    assert "new" in [client for client, *_ in crowd.offered()]
    assert crowd.store.clients() == ("a", "b", "new")
    assert crowd.presence.newcomers == ["new"]


def test_a_download_that_was_being_made_for_a_ghost_leaves_nothing(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    crowd.flood(1)
    crowd.passes(DEAD_AFTER_S + 1)
    crowd.passes(1.0)
    crowd.jobs.run(crowd.time)
    assert crowd.store.clients() == ("a", "b")


def test_what_ghosts_reported_keeps_no_place_that_a_member_needs(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    crowd.flood(1)
    crowd.jobs.run(crowd.time)
    for client, manifest, _ in crowd.courier.sent:
        crowd.hears(Received(client, Report(client, 0, manifest.version, {"accuracy": 0.5})), now=crowd.time)
    reported, shown = crowd.coordinator._reported, crowd.coordinator._parts.metrics.reported
    shown.update({client: {"accuracy": 0.5} for client in reported})  # as the journal's listener does
    assert len(shown) > 2
    crowd.passes(DEAD_AFTER_S + 1)
    crowd.passes(1.0)
    assert reported.keys() | shown.keys() <= {"a", "b"}


def test_rows_of_those_who_never_confirmed_are_gone_some_time_after_a_restart(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    crowd.flood(1)
    crowd.jobs.run(crowd.time)
    assert len(crowd.store.clients()) > 2
    crowd.store.close()
    desk = Desk(tmp_path)
    desk.coordinator.tick(1.0)
    assert len(desk.store.clients()) > 2, "who was there before has time to come back"
    desk.coordinator.tick(DEAD_AFTER_S + 2.0)
    assert desk.store.clients() == ("a", "b")


def test_whoever_is_not_taken_in_takes_no_place_for_an_upload_and_is_told_to_come_again(desk: Desk) -> None:
    manifest = Manifest("up", "street", "stranger", 0, 1, (), encode_facts({}))
    desk.hears(Offered("stranger", Offer("client", "0" * 32, manifest, (), 1024, b"")))
    assert desk.courier.refused == [("stranger", "busy")]
    assert desk.journal.lines.count("upload rejected") == 0


def test_a_strangers_word_on_a_shared_download_is_not_kept(desk: Desk) -> None:
    shared = Manifest("down", "street", EVERYBODY, 0, 0, (COMMON,))
    desk.hears(Concluded("stranger", shared, Verdict("client", "0" * 32, 0, 0, accepted=True), 9))
    assert desk.store.clients() == ()


def precision(manifest: Manifest) -> str:
    return "fp32" if manifest.serving is None else manifest.serving.precision


@pytest.mark.parametrize("failed", ["refused", "rolled back"])
def test_a_client_that_cant_serve_a_rounded_model_gets_float32_at_once_and_from_then_on(
    desk: Desk, failed: str
) -> None:
    desk.online("a", precision="int8")
    (_, rounded, _) = desk.courier.sent[-1]
    assert precision(rounded) == "int8"
    if failed == "refused":
        desk.verdict("a", rounded, accepted=False, why="probe-mismatch")
    else:
        desk.verdict("a", rounded, accepted=True)
        desk.hears(Received("a", RolledBack("a", 0, rounded.version, -1, "too-slow")))
    desk.jobs.run(1.0)
    (_, instead, _) = desk.courier.sent[-1]
    assert (precision(instead), instead.version > rounded.version) == ("fp32", True)
    desk.upload("a", "b")
    desk.jobs.run(2.0)
    assert {precision(sent) for peer, sent, _ in desk.courier.sent if sent.round == 1} == {"fp32"}


def test_a_client_that_is_too_busy_for_a_rounded_model_is_offered_it_again(desk: Desk) -> None:
    desk.online("a", precision="fp16")
    desk.verdict("a", desk.courier.sent[-1][1], accepted=False)
    desk.coordinator.tick(60.0)
    assert precision(desk.courier.sent[-1][1]) == "fp16"


def test_after_a_restart_a_client_that_was_not_heard_yet_is_taken_to_want_what_it_had(desk: Desk) -> None:
    desk.online("a", precision="fp16")
    desk.online("b")
    desk.upload("a", "b")
    desk = desk.restarted()  # the round was closed, and is aggregated before anybody speaks
    desk.jobs.run(3.0)
    assert {client: precision(desk.store.download(client)) for client in "ab"} == {"a": "fp16", "b": "fp32"}


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()], ids=repr)
@pytest.mark.parametrize("looks", ["decode_upload", "dict"])
def test_an_upload_that_cant_be_looked_at_for_a_moment_is_to_be_offered_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: Exception, looks: str
) -> None:
    desk.online("a", "b")
    with monkeypatch.context() as patched:
        patched.setattr(f"replayfleet.aggregator.sync.uploads.{looks}", Mock(side_effect=error), raising=False)
        with pytest.raises(type(error)):  # the loop counts it, and logs where it comes from
            desk.upload("a")
    assert (desk.courier.verdicts, desk.courier.reasons) == ([("a", False)], ["busy"])
    desk.upload("a")
    assert (desk.courier.verdicts[1:], desk.coordinator.rounds.accepted) == ([("a", True)], ("a",))


@pytest.mark.parametrize("num_raising", [1, 2000])
def test_what_one_arrival_raises_costs_no_other_client_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, num_raising: int
) -> None:
    desk.online("a", "b")
    manifests = [Manifest("up", "street", client, 0, 1, (), encode_facts({})) for client in ("a", "b")]
    decoded = Mock(side_effect=[*[MemoryError()] * num_raising, Upload.unpack(Artefacts({}, {}))])
    monkeypatch.setattr("replayfleet.aggregator.sync.uploads.decode_upload", decoded)
    arrivals = [Arrived(one.client_id, "0" * 32, one, 9) for one in manifests]
    with pytest.raises(MemoryError):
        desk.hears(*arrivals[:1] * num_raising, arrivals[1], now=1.0)
    assert desk.courier.verdicts == [*[("a", False)] * num_raising, ("b", True)]


def test_each_error_of_what_arrives_at_once_is_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.online("a", "b")
    manifests = [Manifest("up", "street", client, 0, 1, (), encode_facts({})) for client in ("a", "b")]
    errors = Mock(side_effect=[MemoryError("the first"), ZeroDivisionError("the second")])
    monkeypatch.setattr("replayfleet.aggregator.sync.uploads.decode_upload", errors)
    with pytest.raises(MemoryError, match="the first"):
        desk.hears(*(Arrived(one.client_id, "0" * 32, one, 9) for one in manifests), now=1.0)
    (told,) = (record for record in caplog.records if record.message == "unexpected error")
    assert vars(told)["fields"]["error"] == "ZeroDivisionError: the second"


def test_what_came_with_refused_uploads_does_not_stay(desk: Desk) -> None:
    desk.online("a", "b")
    desk.coordinator.tick(1.0)
    before = len(desk.collected)
    manifest = Manifest("up", "street", "a", 7, 1, (BlobEntry("task", "0" * 64, 9),), encode_facts({}))
    desk.hears(Arrived("a", "0" * 32, manifest, 9), now=2.0)
    assert desk.courier.verdicts[-1] == ("a", False)
    desk.coordinator.tick(3.0)
    assert len(desk.collected) == before, "a client that is refused again and again costs no look at the disk each time"
    assert desk.disk.takes(OSError(errno.ENOSPC, "full"))
    desk.coordinator.tick(3.1)
    assert len(desk.collected) == before + 1, "the disk needs the room"
    desk.coordinator.tick(10.0)
    huge = msgspec.structs.replace(manifest, blobs=(BlobEntry("task", "0" * 64, MAX_LITTER_BYTES + 1),))
    desk.hears(Arrived("a", "0" * 32, huge, 9), now=13.0)
    desk.coordinator.tick(13.1)
    assert len(desk.collected) == before + 2


def test_what_broke_off_or_gave_way_to_another_offer_does_not_stay(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.online("a", "b")
    desk.coordinator.tick(1.0)
    monkeypatch.setattr(desk.courier, "accept", lambda *_: [])  # blocks come one after the other
    monkeypatch.setattr(Gate, "check_offer", lambda *_args, **_known: None)
    monkeypatch.setattr("replayfleet.aggregator.coordinator.MAX_LITTER_BYTES", 100)
    before = len(desk.collected)

    desk.presence.members = frozenset("a")

    def offers(digit: str, size_bytes: int) -> None:
        blobs = (BlobEntry("task", digit * 64, size_bytes),)
        manifest = Manifest("up", "street", "a", 0, 1, blobs, encode_facts({}))
        desk.hears(Offered("a", Offer("client", digit * 32, manifest, (), 1024, b"")), now=2.0)

    offers("1", 100)
    offers("1", 100)
    offers("2", 9)
    desk.coordinator.tick(3.0)
    assert len(desk.collected) == before, "as much as may lie about until the next commit"
    offers("3", 9)
    desk.coordinator.tick(4.0)
    assert len(desk.collected) == before + 1
    assert "3" * 64 in desk.collected[-1], "it is on its way"
    assert "1" * 64 not in desk.collected[-1]
    desk.hears(Failed("a", "3" * 32, OSError(errno.ENOSPC, "full")), now=4.1)
    desk.coordinator.tick(4.1)
    assert len(desk.collected) == before + 2, "the disk needs the room"
    assert "3" * 64 not in desk.collected[-1]
