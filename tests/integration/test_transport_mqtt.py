"""Sessions and transfers over real brokers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from support.authority import Authority

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest
from replayfleet.federation.wire.transport import broker as broker_module
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Offered, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.federation.wire.transport.mqtt_connection import Connection, _CountingClient
from tests.support.ports import answers, free_port
from tests.support.processes import is_gone
from tests.support.voices import Plain
from tests.support.waiting import until

log = logging.getLogger(__name__)
needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
FLEET = "yard"
Inbox = SimpleQueue[tuple[str, bytes]]


class Member:
    """One process of a fleet on its own thread: session, queue, courier, and a service that accepts everything."""

    def __init__(self, url: str, root: Path, client: str | None = None) -> None:
        self.client = client
        self.store = DiskBlobStore(root)
        self.inbox: Inbox = SimpleQueue()
        self.events: list[Event] = []
        name = client or "aggregator"
        self.session = MqttSession(url, name, on_message=lambda *message: self.inbox.put(message))
        wanted = (
            topics.aggregator_subscriptions(FLEET) if client is None else topics.client_subscriptions(FLEET, client)
        )
        self.session.subscribe((*wanted.control, *wanted.data))
        self.courier = FleetCourier(
            "aggregator" if client is None else "client",
            FLEET,
            SimpleNamespace(control=self.session, data=self.session),
            self.store,
            Plain(),
            own_id=client,
        )
        self.num_handled = 0
        self.crash_after: int | None = None
        self._halt = threading.Event()
        self.session.start()
        until(lambda: self.session.connected)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        connections = self.session.num_connections
        while not self._halt.is_set():
            try:
                message = self.inbox.get(timeout=0.05)
            except Empty:
                self._act(self.courier.tick(time.monotonic()))
            else:
                self.num_handled += 1
                self._act(self.courier.handle(*message, time.monotonic()))
                if self.num_handled == self.crash_after:
                    return
            if self.session.num_connections != connections:
                connections = self.session.num_connections
                self.courier.resume(time.monotonic())

    def _act(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, Offered):
                self._act(self.courier.accept(event.peer, event.offer, time.monotonic()))
            elif isinstance(event, Arrived):
                self.courier.conclude(event.peer, event.manifest, event.transfer_id, accepted=True)

    def offer(self, peer: str, blob: bytes) -> Manifest:
        digest = self.store.put(blob)
        direction = "down" if self.client is None else "up"
        manifest = Manifest(direction, FLEET, peer, 0, 1, (BlobEntry("task", digest, len(blob)),))  # type: ignore[arg-type]
        self.courier.send(peer, manifest, [digest], time.monotonic())
        return manifest

    def concluded(self) -> bool:
        return any(isinstance(event, Concluded) and event.verdict.accepted for event in self.events)

    def stop(self) -> None:
        self._halt.set()
        self._thread.join()
        self.session.stop()


@pytest.fixture
def broker_url() -> Iterator[str]:
    with open_broker(log=log) as handle:
        yield handle.url


@needs_mosquitto
def test_blobs_travel_up_and_down_over_mosquitto(broker_url: str, tmp_path: Path) -> None:
    aggregator, cam = Member(broker_url, tmp_path / "a"), Member(broker_url, tmp_path / "c", "cam-1")
    try:
        up = cam.offer("cam-1", os.urandom(3_000_000))
        until(cam.concluded)
        down = aggregator.offer("cam-1", os.urandom(3_000_000))
        until(aggregator.concluded)
    finally:
        cam.stop()
        aggregator.stop()
    assert aggregator.store.has(up.blobs[0].digest)
    assert cam.store.has(down.blobs[0].digest)
    assert cam.session.protocol == "5"


@needs_mosquitto
@pytest.mark.parametrize("crash_after", [1, 2, 9, 20])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_crash_at_any_block_only_costs_a_window(broker_url: str, tmp_path: Path, who: str, crash_after: int) -> None:
    blob = os.urandom(6_000_000)
    aggregator, cam = Member(broker_url, tmp_path / "a"), Member(broker_url, tmp_path / "c", "cam-1")
    (cam if who == "sender" else aggregator).crash_after = crash_after
    try:
        manifest = cam.offer("cam-1", blob)
        dying = cam if who == "sender" else aggregator
        until(lambda: dying.num_handled >= crash_after or cam.concluded())
        dying.stop()
        if who == "sender":
            cam = Member(broker_url, tmp_path / "c", "cam-1")
            cam.offer("cam-1", blob)
        else:
            aggregator = Member(broker_url, tmp_path / "a")
            cam.courier.resume(time.monotonic())
        until(lambda: cam.concluded())
        assert aggregator.store.read(manifest.blobs[0].digest) == blob
    finally:
        cam.stop()
        aggregator.stop()


def test_blobs_travel_over_the_embedded_broker_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("amqtt")
    monkeypatch.setattr(broker_module, "find_mosquitto", lambda: None)
    with open_broker(log=log) as handle:
        assert "amqtt" in handle.description
        aggregator, cam = Member(handle.url, tmp_path / "a"), Member(handle.url, tmp_path / "c", "cam-1")
        try:
            manifest = cam.offer("cam-1", os.urandom(2_000_000))
            until(cam.concluded)
        finally:
            cam.stop()
            aggregator.stop()
        assert aggregator.store.has(manifest.blobs[0].digest)
        assert cam.session.protocol == "3.1.1"


def listen(url: str, client_id: str, *topics_: str, **settings: object) -> tuple[MqttSession, Inbox]:
    inbox: Inbox = SimpleQueue()
    session = MqttSession(url, client_id, on_message=lambda *message: inbox.put(message), **settings)  # type: ignore[arg-type]
    session.subscribe(topics_)
    session.start()
    return session, inbox


@needs_mosquitto
def test_a_broker_that_appears_later_gets_what_was_said_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    session, inbox = listen(f"mqtt://127.0.0.1:{port}", "cam-1", "t")
    other, _ = listen(f"mqtt://127.0.0.1:{port}", "cam-2")
    try:
        until(lambda: "connection refused" in session.state)
        assert session.state.startswith("connecting (attempt ")
        other.publish("t", b"old", retain=True)
        other.publish("t", b"new", retain=True)
        with open_broker(log=log, port=port):
            until(lambda: session.connected)
            assert inbox.get(timeout=60) == ("t", b"new")
            assert session.state == "connected"
        until(lambda: not session.connected)
        with open_broker(log=log, port=port):
            until(lambda: session.num_connections == 2)
    finally:
        session.stop()
        other.stop()
    assert caplog.text.count("nothing listens on") <= 4


@needs_mosquitto
def test_what_paho_fails_of_is_told_and_tried_again(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, fails = Connection.open, [True]

    def fails_at_first(connection: Connection) -> None:
        if fails:
            raise struct.error("'H' format requires 0 <= number <= 65535")
        opened(connection)

    monkeypatch.setattr(Connection, "open", fails_at_first)
    session, _ = listen(broker_url, "cam-1", "t")
    try:
        until(lambda: session.state.endswith("'H' format requires 0 <= number <= 65535"))
        fails.clear()
        until(lambda: session.connected)
    finally:
        session.stop()


@needs_mosquitto
def test_what_expired_is_not_kept_for_who_was_away(broker_url: str) -> None:
    heard: list[bytes] = []
    away = MqttSession(broker_url, "away", on_message=lambda topic, payload: heard.append(payload), clean=False)
    away.subscribe(("yard/words",))
    away.start()
    until(lambda: away.connected)
    away.stop()
    speaker = MqttSession(broker_url, "speaker", on_message=lambda *_: None)
    speaker.start()
    speaker.publish("yard/words", b"soon", expires_s=1)
    speaker.publish("yard/words", b"ever")
    time.sleep(2.5)
    away.start()
    until(lambda: b"ever" in heard)
    away.stop()
    speaker.stop()
    assert heard == [b"ever"]


@needs_mosquitto
@pytest.mark.parametrize("lost", [False, True])
def test_what_expired_while_there_was_no_connection_is_not_sent(
    broker_url: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hearer, inbox = listen(broker_url, "hearer", "yard/words")
    speaker = MqttSession(broker_url, "speaker", on_message=lambda *_: None)
    try:
        if lost:
            numbers = itertools.count(1)
            monkeypatch.setattr(Connection, "publish", lambda *_: next(numbers))  # nothing gets through
            speaker.start()
            until(lambda: speaker.connected)
        speaker.publish("yard/words", b"soon", expires_s=1)
        speaker.publish("yard/words", b"ever")
        time.sleep(1.1)
        speaker.stop()
        monkeypatch.undo()
        speaker.start()
        assert inbox.get(timeout=60) == ("yard/words", b"ever")
    finally:
        speaker.stop()
        hearer.stop()
    assert inbox.empty()


@needs_mosquitto
def test_an_oversized_publish_is_refused_here_and_the_connection_lives(broker_url: str) -> None:
    session, inbox = listen(broker_url, "cam-1", "t")
    other, _ = listen(broker_url, "cam-2")
    try:
        until(lambda: session.connected and other.connected)
        assert other.max_payload_bytes == (1 << 20) - 1024
        with pytest.raises(ValueError, match="the broker takes 1047552"):
            other.publish("t", bytes(1 << 20))
        other.publish("t", bytes(other.max_payload_bytes))
        assert len(inbox.get(timeout=60)[1]) == other.max_payload_bytes
        assert other.num_connections == 1
    finally:
        session.stop()
        other.stop()


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"\x30\xff\xff\xff\x7f", "packet not read bytes=268435455"),
        (b"\x34\xff\xff\x7f", "message not read reason=it is of QoS 2"),
    ],
)
def test_what_a_broker_may_not_send_is_not_read(caplog: pytest.LogCaptureFixture, head: bytes, told: str) -> None:
    """Paho reads a packet whole, and keeps those of QoS 2: a broker took more than a gigabyte of a device's memory."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        session, inbox = listen(f"mqtt://127.0.0.1:{listening.getsockname()[1]}", "cam-1", "t")
        try:
            listening.settimeout(30)
            broker, _ = listening.accept()
            with broker:
                broker.settimeout(30)
                assert broker.recv(1000)[0] >> 4 == 1, "CONNECT"
                broker.sendall(b"\x20\x03\x00\x00\x00")
                subscribe = broker.recv(1000)
                broker.sendall(b"\x90\x04" + subscribe[2:4] + b"\x00\x01")
                until(lambda: session.connected)
                broker.sendall(head + b"\x00\x01t\x00" + bytes(1000))
                with contextlib.suppress(ConnectionResetError):
                    while broker.recv(1000):
                        pass
        finally:
            session.stop()
    assert inbox.empty()
    assert told in caplog.text


@needs_mosquitto
def test_a_small_request_and_its_reply_take_no_nagle_delay(broker_url: str) -> None:
    answering: list[MqttSession] = []
    server = MqttSession(broker_url, "server", on_message=lambda _, payload: answering[0].publish("reply", payload))
    answering.append(server)
    server.subscribe(["request"])
    server.start()
    client, inbox = listen(broker_url, "client", "reply")

    def median_s() -> float:
        times = []
        for _ in range(15):
            started = time.perf_counter()
            client.publish("request", bytes(200))
            inbox.get(timeout=60)
            times.append(time.perf_counter() - started)
        return sorted(times)[7]

    try:
        until(lambda: server.connected and client.connected)
        assert any(median_s() < 0.03 for _ in range(40)), (
            "0.083 without TCP_NODELAY, 0.0006 with; or others have the cores"
        )
    finally:
        server.stop()
        client.stop()


@needs_mosquitto
def test_a_handler_that_raises_does_not_end_the_session(broker_url: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes] = []

    def broken(_topic: str, payload: bytes) -> None:
        seen.append(payload)
        raise RuntimeError("a bug in the service")

    session = MqttSession(broker_url, "cam-1", on_message=broken)
    session.subscribe(["t"])
    session.start()
    other, _ = listen(broker_url, "cam-2")
    try:
        until(lambda: session.connected)
        other.publish("t", b"1")
        other.publish("t", b"2")
        until(lambda: seen == [b"1", b"2"])
        assert session.connected
        assert "a bug in the service" in caplog.text
    finally:
        session.stop()
        other.stop()


@needs_mosquitto
def test_the_last_will_speaks_for_the_dead_and_not_for_who_said_goodbye(broker_url: str) -> None:
    watcher, inbox = listen(broker_url, "watcher", "state/#")
    polite, _ = listen(broker_url, "polite", will=Will("state/polite", b"offline"))
    script = (
        "import sys, os, time; from replayfleet.federation.wire.transport.mqtt import MqttSession; "
        "from replayfleet.federation.wire.transport.interfaces import Will\n"
        f"s = MqttSession({broker_url!r}, 'dying', on_message=print, will=Will('state/dying', b'offline'))\n"
        "s.start()\nwhile not s.connected: time.sleep(0.01)\nos.kill(os.getpid(), 9)"
    )
    try:
        until(lambda: watcher.connected and polite.connected)
        polite.stop()
        subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
        assert inbox.get(timeout=60) == ("state/dying", b"offline")
    finally:
        watcher.stop()
        polite.stop()


@needs_mosquitto
def test_what_a_dying_broker_did_not_acknowledge_goes_to_the_next_one() -> None:
    port = free_port()
    talker, _ = listen(f"mqtt://127.0.0.1:{port}", "talker")
    try:
        with open_broker(log=log, port=port) as handle:
            assert handle.pid is not None
            until(lambda: talker.connected)
            os.kill(handle.pid, signal.SIGSTOP)
            talker.publish("t", b"1", retain=True)
            time.sleep(0.1)
            os.kill(handle.pid, signal.SIGKILL)
        with open_broker(log=log, port=port) as handle:
            _, inbox = watcher = listen(handle.url, "watcher", "t")
            assert inbox.get(timeout=60) == ("t", b"1")
            watcher[0].stop()
    finally:
        talker.stop()


@needs_mosquitto
def test_a_session_that_lacks_memory_for_what_waits_connects_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = Connection.publish, [MemoryError("none left")]

    def publish(self: Connection, topic: str, payload: bytes, retain: bool, expires_s: int) -> int | None:
        if failures:
            raise failures.pop()
        return real(self, topic, payload, retain, expires_s)

    monkeypatch.setattr(Connection, "publish", publish)
    with open_broker(log=log) as handle:
        watcher, inbox = listen(handle.url, "watcher", "t")
        until(lambda: watcher.connected)
        session = MqttSession(handle.url, "talker", on_message=lambda topic, payload: None)
        session.publish("t", b"1")
        session.publish("t", b"2")
        session.start()
        try:
            assert inbox.get(timeout=60) == ("t", b"2")
            until(lambda: not session._num_waiting())
            assert session._waiting_bytes == 0  # nothing of the one that is lost counts on
        finally:
            session.stop()
            watcher.stop()


@needs_mosquitto
def test_an_attempt_for_which_no_thread_is_left_keeps_no_socket_and_says_nothing_of_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sockets: list[Any] = []
    spoken: list[str] = []

    def no_thread(client: _CountingClient) -> None:
        spoken.append(session.protocol)
        sockets.append(client.socket())
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_CountingClient, "loop_start", no_thread)
    with open_broker(log=log) as handle:
        session = MqttSession(handle.url, "cam-1", on_message=lambda topic, payload: None)
        session.start()
        try:
            until(lambda: len(sockets) > 1)
            assert sockets[0].fileno() == -1
            assert spoken[:2] == ["5", "5"]
        finally:
            session.stop()


@needs_mosquitto
def test_stopping_does_not_wait_for_a_broker_that_no_longer_reads() -> None:
    with open_broker(log=log) as handle:
        assert handle.pid is not None
        session, _ = listen(handle.url, "cam-1", "t")
        until(lambda: session.connected)
        os.kill(handle.pid, signal.SIGSTOP)
        try:
            for _ in range(30):
                session.publish("t", bytes(1_000_000))
            started = time.monotonic()
            session.stop()
            assert time.monotonic() - started < 30
        finally:
            os.kill(handle.pid, signal.SIGCONT)


@pytest.fixture
def tls_broker(tmp_path: Path) -> Iterator[tuple[str, Authority]]:
    """A mosquitto that wants TLS, a client certificate, and user and password."""
    authority, port = Authority(tmp_path), free_port()
    certificate, key = authority.issue("broker")
    passwords = tmp_path / "passwords"
    passwords.write_text("cam-1:secret\n")
    tool = shutil.which("mosquitto_passwd") or "/usr/bin/mosquitto_passwd"
    subprocess.run([tool, "-U", passwords], check=True)
    config = tmp_path / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\ncafile {authority.ca}\ncertfile {certificate}\nkeyfile {key}\n"
        f"require_certificate true\nallow_anonymous false\npassword_file {passwords}\nuser root\nlog_type error\n"
    )
    process = subprocess.Popen([str(find_mosquitto()), "-c", config], stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(port))
        yield f"mqtts://127.0.0.1:{port}", authority
    finally:
        process.terminate()
        process.wait()


@needs_mosquitto
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
def test_tls_with_certificates_and_password_and_what_happens_without(tls_broker: tuple[str, Authority]) -> None:
    url, authority = tls_broker
    certificate, key = authority.issue("cam-1")
    good = TlsSettings(authority.ca, certificate, key)
    right, wrong = Credentials("cam-1", "secret"), Credentials("cam-1", "guess")
    session, _ = listen(url, "good", tls=good, credentials=right)
    expected = {  # that there is no certificate isn't always heard: the broker may close before its alert is read
        "with --identity or --tls-ca": listen(url, "a", tls=TlsSettings(None, certificate, key), credentials=right),
        "--host NAME": listen(url.replace("127.0.0.1", "localhost"), "d", tls=good, credentials=right),
        "client certificate": listen(url, "b", tls=TlsSettings(authority.ca), credentials=right),
        "not authorized": listen(url, "c", tls=good, credentials=wrong),
    }
    try:
        until(lambda: session.connected)
        for text, (refused, _) in expected.items():
            until(lambda text=text, refused=refused: text in refused.state)  # type: ignore[misc]
            assert not refused.connected
            assert "guess" not in refused.state
    finally:
        for each in (session, *(refused for refused, _ in expected.values())):
            each.stop()


@needs_mosquitto
def test_a_port_in_use_is_one_clear_error() -> None:
    with open_broker(log=log) as handle:
        port = int(handle.url.rpartition(":")[2])
        with (
            pytest.raises(SettingsError, match=f"broker port {port} can't be used"),
            open_broker(log=log, port=port),
        ):
            pass


@needs_mosquitto
def test_a_private_broker_ends_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import logging, time; from replayfleet.federation.wire.transport.broker import open_broker\n"
        "with open_broker(log=logging.getLogger()) as handle:\n    print(handle.pid, flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: is_gone(pid))


@needs_mosquitto
def test_a_private_broker_ends_with_its_block() -> None:
    with open_broker(log=log) as handle:
        pid = handle.pid
        assert pid is not None
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
