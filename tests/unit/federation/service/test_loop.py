"""The one loop of both services: what waits is dealt with, what fails is counted or ends the service."""

from __future__ import annotations

import queue
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service import loop
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.inbox import OVERHEAD_BYTES, FairInbox
from replayfleet.federation.service.jobs import Jobs, Outcome
from replayfleet.federation.service.loop import Loop
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.wire.protocol.topics import client_subscriptions
from replayfleet.federation.wire.transport.interfaces import Will
from replayfleet.federation.wire.transport.seal import Signer


class Session:
    def __init__(self, name: str, on_message: Callable[[str, bytes], None], will: Will | None) -> None:
        self.name, self.on_message, self.will = name, on_message, will
        self.connected, self.num_connections, self.turns, self.state = False, 0, 0, "connecting"
        self.problem = ""
        self.topics: list[str] = []
        self.published: list[str] = []

    def subscribe(self, topics: tuple[str, ...]) -> None:
        self.topics += topics

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: int = 0) -> None:
        self.published.append(topic)

    def accepted(self) -> None:
        self.connected, self.num_connections = True, self.num_connections + 1


class Stingy(Session):
    """Of a broker that takes next to nothing at once."""

    takes = 10

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: int = 0) -> None:
        if len(payload) > self.takes:
            raise ValueError(f"payload of {len(payload)} bytes on {topic}, the broker takes {self.takes}")
        super().publish(topic, payload)


class Service:
    """Notes what its loop tells it."""

    turns: ClassVar[dict[str, int]] = {}
    ready = True
    summary = "all is well"

    def __init__(self, session: type[Session] = Session) -> None:
        self.now, self.errors, self.heard = 0.0, 0, []
        self.loop = Loop(
            self,
            lambda: self.now,
            inbox=FairInbox(frozenset({"cam"}), max_bytes=4 * OVERHEAD_BYTES),
            count_error=self.count,
            fatal=(SettingsError,),
            disk=Disk(Path("/tmp"), "training waits", 0.0),
            signer=Signer(Ed25519PrivateKey.generate()),
        )
        self.loop.connect(session, "fleet-cam", client_subscriptions("fleet", "cam"), Will("t", b""))
        self.fails: Exception | None = None

    def count(self) -> None:
        self.errors += 1

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        if self.fails is not None:
            raise self.fails
        self.heard.append((topic, payload, now))

    def on_connected(self, now: float) -> None:
        self.heard.append("connected")

    def on_tick(self, now: float) -> None:
        self.heard.append("tick")


def test_messages_come_in_their_order_and_then_time_passes():
    service = Service()
    service.now = 5.0
    for number in range(2):
        service.loop.control.on_message("t", bytes([number]))
    service.loop.pump(0)
    assert service.heard == [("t", b"\0", 5.0), ("t", b"\1", 5.0), "tick"]


def test_a_flood_is_dropped_and_told_in_one_line_while_the_services_own_work_always_fits(
    caplog: pytest.LogCaptureFixture,
):
    service, done = Service(), []
    for _ in range(500):
        service.loop.data.on_message("replayfleet/v1/fleet/clients/cam/down", b"")
    service.loop.put("job", done.append)
    service.loop.pump(0)
    service.loop.pump(0)
    assert service.loop.inbox.num_dropped == 497
    assert service.heard.count("tick") == 2
    assert len(service.heard) == 3 + 2
    assert done == [0.0]
    (told,) = [record for record in caplog.records if record.message == "too many messages"]
    assert (told.fields["client"], told.fields["dropped"]) == ("cam", 497)


def test_an_unexpected_error_is_counted_and_the_loop_goes_on():
    service = Service()
    service.fails = KeyError("bug")
    service.loop.control.on_message("t", b"")
    service.loop.pump(0)
    assert (service.errors, service.heard) == (1, ["tick"])


def test_a_setting_that_does_not_fit_ends_the_service():
    service = Service()
    service.fails = SettingsError("bad")
    service.loop.control.on_message("t", b"")
    with pytest.raises(SettingsError, match="bad"):
        service.loop.pump(0)


def test_what_is_not_guarded_ends_the_service_whatever_it_raises():
    service = Service()
    service.loop.put("job", lambda now: 1 // 0, guarded=False)
    with pytest.raises(ZeroDivisionError):
        service.loop.pump(0)


def test_what_the_broker_has_against_us_is_what_operators_see() -> None:
    loop = Service().loop
    loop.control.accepted()
    assert (loop.refusal, loop.broker) == ("", "connecting"), "the other one isn't there yet"
    loop.data.accepted()
    assert (loop.refusal, loop.broker) == ("", "connected")
    loop.data.problem = "not authorized"
    assert (loop.refusal, loop.broker) == ("not authorized", "not authorized")


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), sqlite3.OperationalError("database or disk is full")], ids=repr
)
def test_a_disk_that_takes_nothing_is_a_state_and_the_service_goes_on(error: Exception, guarded: bool):
    service = Service()
    service.loop.put("job", Mock(side_effect=error), guarded=guarded)
    service.loop.pump(0)
    assert "disk full" in service.loop.disk.problem
    assert (service.errors, service.heard) == (0, ["tick"]), "known, so it is no unexpected error"


def test_a_damaged_database_ends_the_service_with_one_line():
    for guarded in (True, False):
        service = Service()
        service.loop.put(
            "job", Mock(side_effect=sqlite3.DatabaseError("database disk image is malformed")), guarded=guarded
        )
        with pytest.raises(ReplayfleetError, match=r"is damaged \(.* malformed\); restore a backup"):
            service.loop.pump(0)


def test_it_says_that_it_is_connected_once_for_every_time_both_sessions_are():
    service = Service()
    control, data = service.loop.control, service.loop.data
    control.accepted()
    service.loop.pump(0)
    assert "connected" not in service.heard
    data.accepted()
    service.loop.pump(0)
    service.loop.pump(0)
    assert service.heard.count("connected") == 1
    data.connected = False
    service.loop.pump(0)
    data.accepted()
    service.loop.pump(0)
    assert service.heard.count("connected") == 2


def test_blocks_and_messages_have_a_session_each_and_the_will_goes_with_the_messages():
    loop = Service().loop
    assert (loop.control.name, loop.data.name) == ("fleet-cam-control", "fleet-cam-data")
    assert (loop.control.will is None, loop.data.will) == (False, None)


def test_it_turns_until_it_is_over_or_stopped_and_tells_systemd():
    service, told = Service(), []
    manager: Any = SimpleNamespace(report=lambda turns, **fields: told.append(fields["status"]))
    service.loop.put("job", lambda now: None)
    service.loop.run(threading.Event(), lambda now: bool(told), manager)
    assert told == ["all is well; broker connecting"]
    stopped = threading.Event()
    stopped.set()
    service.loop.run(stopped, lambda now: False, ServiceManager())


def test_a_broker_that_is_away_is_logged_once_however_often_it_is_tried(caplog: pytest.LogCaptureFixture):
    service, away = Service(), "connection refused: nothing listens on broker.example:8883"
    states = [f"connecting (attempt {number}, next in 3 s): {away}" for number in range(2, 90)]
    states += [
        "connected",
        f"connecting (attempt 2, next in 0 s): {away}",
        "connecting (attempt 3, next in 1 s): unknown host 'b'",
    ]
    service.loop.pump = lambda wait_s: setattr(service.loop.control, "state", states.pop(0))  # type: ignore[method-assign]
    service.loop.run(threading.Event(), lambda now: not states, ServiceManager())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 3, "again when it was there meanwhile, and when it is another problem"


def test_jobs_run_off_the_loops_thread_and_their_ends_on_it():
    outcomes: queue.Queue[Outcome] = queue.Queue()
    heard: list[Any] = []
    jobs = Jobs(outcomes.put, lambda: heard.append("prepared"))
    here = threading.get_ident()
    try:
        jobs.submit(threading.get_ident, lambda found, now: heard.append((found != here, now)), lambda *_: None)
        jobs.submit(lambda: [][1], lambda *_: None, lambda error, now: heard.append(str(error)))
        jobs.submit(lambda: sys.exit(3), lambda *_: None, lambda error, now: heard.append(str(error)))
        assert not jobs.idle
        for now in (1.0, 2.0, 3.0):
            outcomes.get(timeout=60)(now)
        assert heard[:2] == ["prepared", (True, 1.0)]
        assert heard[2:] == ["list index out of range", "it would end the process (SystemExit: 3)"]
        assert jobs.idle
    finally:
        jobs.stop()


def test_jobs_that_wait_are_dropped_at_the_end():
    outcomes: queue.Queue[Outcome] = queue.Queue()
    jobs, begun, goes_on = Jobs(outcomes.put), threading.Event(), threading.Event()
    jobs.submit(lambda: begun.set() or goes_on.wait(), lambda *_: None, lambda *_: None)
    jobs.submit(lambda: None, lambda *_: None, lambda *_: None)
    assert begun.wait(60)
    threading.Timer(0.1, goes_on.set).start()
    jobs.stop()
    assert outcomes.qsize() == 1


def test_what_a_message_takes_is_charged_to_the_client_that_sent_it(monkeypatch: pytest.MonkeyPatch):
    service, spent = Service(), 0.0
    service.loop.inbox = FairInbox(frozenset({"cam", "calm"}), work=(0.5, 3.0))

    def takes_long(topic: str, payload: bytes, now: float) -> None:
        nonlocal spent
        spent += 4.0 if "/cam/" in topic else 0.1
        service.heard.append(topic)

    monkeypatch.setattr(service, "on_message", takes_long)
    monkeypatch.setattr(loop.time, "thread_time", lambda: spent)
    for client in ("cam", "calm") * 3:
        service.loop.inbox.put(f"replayfleet/v1/fleet/clients/{client}/up", b"\1", 0.0)
    service.loop.pump(0.0)
    assert [topic.split("/")[4] for topic in service.heard if topic != "tick"] == ["cam", *["calm"] * 3]
    assert service.loop.flooding == {"cam"}


def test_a_will_that_mqtt_has_no_room_for_is_refused_and_not_tried_for_ever() -> None:
    with pytest.raises(SettingsError, match=r"takes 65... bytes, and MQTT 65535 at most; shorten the names of classes"):
        Service().loop.connect(Session, "fleet-cam", client_subscriptions("fleet", "cam"), Will("t", bytes(65_500)))


def test_a_broker_that_takes_no_message_of_ours_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A device ended with a traceback, and served no more, as its presence was larger than the broker's limit."""
    service = Service(Stingy)
    service.loop.say("t/state", b"here", retain=True)
    assert "the broker takes 10; raise its packet limit" in service.loop.refusal
    assert "the broker takes 10" in service.loop.broker
    before = service.loop.broker
    service.loop.say("t/state", b"here, and more", retain=True)
    assert (service.loop.broker, caplog.text.count("message not sent")) == (before, 1), "a line for as long as it lasts"
    service.loop.control.takes = 1 << 20  # type: ignore[attr-defined]
    service.loop.say("t/state", b"here", retain=True)
    assert (service.loop.refusal, service.errors) == ("", 0)
