from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from paho.mqtt.client import Client, MQTTMessageInfo

from replayfleet.edge_client.state_store import StateStore, TrainingCommit
from replayfleet.edge_client.sync.download import Gate
from replayfleet.edge_client.sync.session_logic import Pending, Place
from replayfleet.edge_client.sync.uploads import UploadDesk
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.wire.protocol.messages import Announcement, BlobEntry, FleetSpec, Manifest, Verdict
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Concluded, Failed
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.federation.wire.transport.mqtt_connection import Connection
from tests.support.voices import Member

TASK, KNOWN = BlobEntry("task", "a" * 64, 10), BlobEntry("sub-generator/1", "b" * 64, 10)
SPEC = FleetSpec("fleet", "fedavg", {}, {}, 0)
HERE = Place(0, 3)
HELD = Manifest("down", "fleet", "c1", 3, 4, (KNOWN,))


def said(holds: bytes = b"", state: Any = "open", round_index: int = 3, late: int = 0) -> Announcement:
    return Announcement("e1", round_index, state, 0.0, SPEC, holds=holds, late_rounds=late)


class FakeCourier:
    def __init__(self) -> None:
        self.sent: list[tuple[Manifest, tuple[str, ...]]] = []
        self.error: Exception | None = None

    def send(
        self, peer: str, manifest: Manifest, presumed_missing: tuple[str, ...], now: float, *, bases: Any = None
    ) -> str:
        self.bases = bases
        if self.error is not None:
            raise self.error
        self.sent.append((manifest, presumed_missing))
        return "f" * 32


class Desk:
    def __init__(self, folder: Path) -> None:
        self.courier = FakeCourier()
        self.records = StateStore(folder)
        self.records.commit_training(
            TrainingCommit(3, 5, "agreed", (KNOWN,), b"", (TASK, KNOWN), b"facts", 1.0, 40, 1), SPEC
        )
        self.packed_from: set[str] = set()
        self.disk = Disk(folder, "training waits", 0.0)
        parts: Any = SimpleNamespace(
            client_id="c1",
            gate=Gate("fleet", "c1"),
            records=self.records,
            courier=self.courier,
            disk=self.disk,
            blobs=SimpleNamespace(packed_against=lambda digests: self.packed_from),
        )
        self.desk = UploadDesk(parts)

    @property
    def mark(self) -> bytes:
        return Manifest("up", "fleet", "c1", 3, 5, (TASK, KNOWN), b"facts").mark

    def verdict(
        self, *, accepted: bool, reason: str = "", now: float = 0.0, version: int = 5, counts_in: int = -1
    ) -> bool:
        manifest = Manifest("up", "fleet", "c1", 3, version, ())
        verdict = Verdict("aggregator", "f" * 32, 3, version, accepted, reason, counts_in=counts_in)
        return self.desk.concluded(Concluded("c1", manifest, verdict, 1234), now)


@pytest.fixture
def made(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_only_what_the_aggregator_lacks_is_sent_and_everything_is_listed(made: Desk) -> None:
    made.desk.offer("e1", HELD, 0.0)
    manifest, missing = made.courier.sent[0]
    assert manifest == Manifest("up", "fleet", "c1", 3, 5, (TASK, KNOWN), b"facts")
    assert missing == (TASK.digest,)
    made.desk.offer("e1", None, 0.0)
    assert made.courier.sent[1][1] == (TASK.digest, KNOWN.digest)


def test_an_accepted_upload_is_kept_until_its_round_is_over(made: Desk) -> None:
    assert made.desk.pending("agreed") == Pending(HERE)
    made.desk.offer("e1", HELD, 0.0)
    assert made.desk.pending("agreed") == Pending(HERE, offered_to="e1")
    assert not made.verdict(accepted=True, version=4)
    assert made.desk.pending("agreed") == Pending(HERE, offered_to="e1"), "that verdict was for another upload"
    assert made.verdict(accepted=True)
    assert made.desk.pending("agreed") == Pending(HERE, counts=True, offered_to="e1")
    made.desk.reload()
    assert made.desk.pending("agreed") == Pending(HERE, counts=True), "so knows a client that restarts"
    made.desk.heard(said(holds=b"another."), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(HERE), "unless the announcement says otherwise"
    made.desk.heard(said(holds=made.mark), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(HERE, counts=True)
    made.desk.let_go()
    assert made.records.pending() == (None, None)


@pytest.mark.parametrize("told", ["by its verdict", "by an announcement"])
def test_a_client_that_restarts_after_the_round_of_its_accepted_upload_calls_it_no_unused_one(
    made: Desk, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    made.desk.offer("e1", HELD, 0.0)
    if told == "by its verdict":
        made.verdict(accepted=True)
    else:
        made.desk.heard(said(holds=made.mark), 0.0, "agreed")
    made.desk.reload()
    made.desk.heard(said(b"another.", round_index=4), 0.0, "agreed")
    made.desk.let_go()
    assert "upload not used" not in caplog.text
    assert made.records.pending() == (None, None)


def test_an_upload_that_the_aggregator_turns_out_not_to_hold_is_offered_again(
    made: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    made.desk.offer("e1", HELD, 0.0)
    made.verdict(accepted=True)
    made.desk.heard(said(holds=b"another.", state="aggregating", round_index=2), 0.0, "agreed")
    made.desk.heard(said(holds=made.mark + b"another."), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(HERE, counts=True, offered_to="e1")
    made.desk.heard(said(holds=b"another."), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(HERE)
    assert "WARNING" not in caplog.text, "the word may be from before it counted, or an operator took it out"
    made.desk.offer("e2", HELD, 0.0)
    assert len(made.courier.sent) == 2


def test_an_upload_that_counts_in_a_later_round_is_kept_until_that_is_over(made: Desk) -> None:
    made.desk.heard(said(b"another.", round_index=4, late=2), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(Place(0, 5))
    made.desk.offer("e1", HELD, 0.0)
    made.verdict(accepted=True, counts_in=4)
    assert made.desk.pending("agreed") == Pending(Place(0, 4), counts=True, offered_to="e1")
    made.desk.heard(said(b"another.", round_index=5, late=2), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(Place(0, 4), counts=True, offered_to="e1"), "used, not lost"
    made.desk.reload()
    made.desk.heard(said(made.mark, round_index=4, late=2), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(Place(0, 4), counts=True)
    made.desk.heard(said(b"another.", late=2), 0.0, "agreed")
    assert made.desk.pending("agreed") == Pending(Place(0, 5)), "the aggregator went back a round, and lost it"


@pytest.mark.parametrize(("open_round", "travels"), [(3, True), (5, True), (6, False)])
def test_a_late_upload_travels_as_a_difference_while_the_aggregator_has_what_it_was_trained_from(
    made: Desk, open_round: int, travels: bool
) -> None:
    made.packed_from = {"c" * 64}
    word = msgspec.structs.replace(said(round_index=open_round, late=9), decodes=("packed",))
    made.desk.heard(word, 0.0, "agreed")
    made.desk.offer("e1", HELD, 0.0)
    assert made.courier.bases == {KNOWN.digest} | (made.packed_from if travels else set())
    made.desk.heard(said(round_index=open_round, late=9), 0.0, "agreed")
    made.desk.offer("e1", HELD, 0.0)
    assert made.courier.bases is None, "it doesn't know what a difference is"


def test_an_upload_of_another_agreement_is_not_offered(made: Desk) -> None:
    assert made.desk.pending("agreed anew") is None


@pytest.mark.parametrize("reason", ["wrong-round", "not-finite", "wrong-counts"])
def test_a_rejected_upload_is_dropped_and_its_state_is_kept(reason: str, made: Desk) -> None:
    made.desk.offer("e1", HELD, 0.0)
    made.verdict(accepted=False, reason=reason)
    assert made.desk.pending("agreed") is None
    assert made.records.pending() == (None, None)
    training = made.records.training()
    assert training.state == (KNOWN,)


@pytest.mark.parametrize("reason", ["busy", "wrong-digest", "excluded"])
def test_what_passes_is_tried_again_within_three_seconds_for_ever(reason: str, made: Desk) -> None:
    now = 0.0
    for attempt in range(100):
        made.desk.offer("e1", HELD, now)
        assert len(made.courier.sent) == attempt + 1
        made.verdict(accepted=False, reason=reason, now=now)
        assert made.desk.pending("agreed") == Pending(HERE)
        made.desk.offer("e1", HELD, now + 0.2)
        assert len(made.courier.sent) == attempt + 1, "not at once"
        now += 3.0


def test_a_disk_that_refuses_is_tried_again(made: Desk) -> None:
    made.courier.error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):  # the loop tells the disk
        made.desk.offer("e1", HELD, 0.0)
    made.courier.error = None
    assert made.desk.pending("agreed") == Pending(HERE)
    made.desk.offer("e1", HELD, 0.0)
    assert not made.desk.failed(Failed("c1", "0" * 32, OSError("a download's")), 0.0)
    assert not made.disk.problem
    assert made.desk.failed(Failed("c1", "f" * 32, OSError(5, "Input/output error")), 0.0)
    assert made.disk.problem
    made.desk.offer("e1", HELD, 3.0)
    assert len(made.courier.sent) == 2


def test_an_upload_whose_blob_is_lost_is_dropped(made: Desk) -> None:
    made.courier.error = KeyError("a" * 64)
    made.desk.offer("e1", HELD, 0.0)
    assert made.desk.pending("agreed") is None


def test_dropping_a_late_upload_survives_a_restart(made: Desk) -> None:
    made.desk.let_go()
    assert made.records.pending() == (None, None)


def test_an_upload_comes_to_the_socket_in_six_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the desk to paho, which owns the socket: nobody in between parses a topic or frames a message anew."""
    walks: list[list[str]] = []

    def publish(client: Client, *_: Any, **__: Any) -> MQTTMessageInfo:
        walk, frame = ["publish"], sys._getframe(1)
        while frame.f_code.co_name != "offer":
            walk.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        walks.append(walk)
        return MQTTMessageInfo(len(walks))

    monkeypatch.setattr(Client, "publish", publish)
    member = Member(tmp_path)
    session = MqttSession("mqtt://127.0.0.1:1", "c1", on_message=lambda *_: None)
    session._connection = Connection(session._plan, list, lambda *_: None, session._wake, lambda _: None)
    session._connected = True
    store = DiskBlobStore(tmp_path / "blobs")
    blob = store.put(b"parameters" * 1000)
    records = StateStore(tmp_path)
    entry = BlobEntry("task", blob, 10_000)
    records.commit_training(TrainingCommit(3, 5, "agreed", (), b"", (entry,), b"facts", 1.0, 40, 1), SPEC)
    links = SimpleNamespace(control=session, data=session)
    parts: Any = SimpleNamespace(
        client_id="c1",
        gate=Gate("fleet", "c1"),
        records=records,
        courier=FleetCourier("client", "fleet", links, store, member.voices, own_id="c1"),
    )
    UploadDesk(parts).offer("e1", None, 0.0)
    assert len(walks) == 2, "the offer, and the one block"
    assert max(map(len, walks)) <= 6, walks
