"""The broker's files as an operator gets them: a real mosquitto with them, and certificates from the script."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replayfleet.federation.wire.protocol.topics import aggregator_subscriptions, client_subscriptions, topic_of
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.broker_address import TlsSettings
from replayfleet.federation.wire.transport.mqtt import MqttSession

FOLDER = Path(__file__).parents[2] / "scripts" / "broker"
FLEET = "fleet"
DEBIAN = """\
pid_file {place}/mosquitto.pid
persistence true
persistence_location {place}/
log_dest file {place}/mosquitto.log
include_dir {place}/conf.d
"""
"""/etc/mosquitto/mosquitto.conf of Debian 12 but for its paths: ours is read after it."""


def certificates(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [FOLDER / "certificates.sh", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def wait(done: Callable[[], bool], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


class Broker:
    """A mosquitto with our files; where it listens, and what it accepts."""

    def __init__(self, place: Path) -> None:
        self.certs = place / "certs"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        made = certificates(self.certs, "broker", "localhost", "127.0.0.1")
        made = (
            made if made.returncode else certificates(self.certs, "client", "cam-1", "cam-2", "aggregator", "operator")
        )
        assert made.returncode == 0, made.stderr
        (place / "conf.d").mkdir()
        shutil.copy(FOLDER / "replayfleet.acl", place)
        ours = (FOLDER / "replayfleet.conf").read_text(encoding="utf-8")
        ours = ours.replace("/etc/mosquitto/", f"{place}/").replace("listener 8883", f"listener {self.port} 127.0.0.1")
        (place / "conf.d" / "replayfleet.conf").write_text(ours, encoding="utf-8")
        text = DEBIAN.format(place=place) + ("user root\n" if os.geteuid() == 0 else "")
        (place / "mosquitto.conf").write_text(text, encoding="utf-8")
        binary = find_mosquitto()
        assert binary is not None
        self.process = subprocess.Popen([binary, "-c", place / "mosquitto.conf"])
        self._sessions: list[MqttSession] = []
        self.heard: dict[str, list[tuple[str, bytes]]] = {}

    def session(self, name: str, certificate: str | None = None, topics: tuple[str, ...] = ()) -> MqttSession:
        own = certificate or name
        tls = TlsSettings(self.certs / "ca.pem", self.certs / f"{own}.pem", self.certs / f"{own}.key")
        heard = self.heard.setdefault(name, [])
        session = MqttSession(
            f"mqtts://localhost:{self.port}", f"{name}-test", on_message=lambda *message: heard.append(message), tls=tls
        )
        session.subscribe(topics)
        session.start()
        self._sessions.append(session)
        return session

    def end(self) -> None:
        for session in self._sessions:
            session.stop()
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    if find_mosquitto() is None or shutil.which("openssl") is None:
        pytest.skip("no mosquitto or no openssl on this machine")
    found = Broker(tmp_path_factory.mktemp("broker"))
    yield found
    found.end()


def test_every_message_of_a_fleet_passes_and_no_other(broker: Broker) -> None:
    everything = (f"replayfleet/v1/{FLEET}/#",)
    subscriptions = aggregator_subscriptions(FLEET)
    aggregator = broker.session("aggregator", topics=(*subscriptions.control, *subscriptions.data))
    own = client_subscriptions(FLEET, "cam-1")
    cam_1 = broker.session("cam-1", topics=(*own.control, *own.data, topic_of(FLEET, "doctor", "cam-1")))
    operator = broker.session("operator", topics=everything)
    spy = broker.session("cam-2", topics=everything)
    assert wait(lambda: all(session.connected for session in (aggregator, cam_1, operator, spy)))

    allowed_up = [topic_of(FLEET, channel, "cam-1") for channel in ("state", "up", "control")]
    forbidden = [topic_of(FLEET, channel, "cam-2") for channel in ("state", "up", "control", "down")]
    forbidden += [topic_of(FLEET, "round"), topic_of(FLEET, "down"), topic_of(FLEET, "down", "cam-1")]
    for topic in (*forbidden, *allowed_up, topic_of(FLEET, "doctor", "cam-1")):
        cam_1.publish(topic, b"from cam-1")
    down = [
        topic_of(FLEET, "down", "cam-1"),
        topic_of(FLEET, "round"),
        topic_of(FLEET, "down"),
        topic_of(FLEET, "control", "cam-1"),
    ]
    for topic in down:
        aggregator.publish(topic, b"from the aggregator")
    operator.publish(topic_of(FLEET, "round"), b"from the operator")
    operator.publish(topic_of(FLEET, "feedback", "cam-1"), b"from the operator")

    expected = {*((topic, b"from the aggregator") for topic in down)}
    expected.add((topic_of(FLEET, "feedback", "cam-1"), b"from the operator"))
    assert wait(
        lambda: len(broker.heard["cam-1"]) >= len(expected) and len(broker.heard["aggregator"]) >= len(allowed_up)
    )
    time.sleep(0.5)  # for what must not come
    assert set(broker.heard["cam-1"]) - {(topic_of(FLEET, "doctor", "cam-1"), b"from cam-1")} == expected
    assert set(broker.heard["aggregator"]) == {(topic, b"from cam-1") for topic in allowed_up}
    for name in ("cam-2", "operator"):
        assert {topic for topic, _ in broker.heard[name]} == {topic_of(FLEET, "round"), topic_of(FLEET, "down")}


def test_nobody_enters_without_a_certificate_of_this_fleet(broker: Broker, tmp_path: Path) -> None:
    assert certificates(tmp_path / "other", "client", "cam-1").returncode == 0
    stranger = tmp_path / "other"
    for pair in (None, (stranger / "cam-1.pem", stranger / "cam-1.key")):
        context = ssl.create_default_context(cafile=broker.certs / "ca.pem")
        if pair is not None:
            context.load_cert_chain(*pair)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            enter(broker.port, context)


def enter(port: int, context: ssl.SSLContext) -> None:
    """Shake hands with the broker; with TLS 1.3 its refusal comes with the first read."""
    with (
        socket.create_connection(("localhost", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        if not encrypted.recv(1):
            raise ConnectionError


def test_the_settings_that_decide_speed_and_memory_are_in_force(broker: Broker) -> None:
    assert broker.session("cam-2").max_payload_bytes < 1 << 20
    session = broker.session("cam-1")
    assert wait(lambda: session.connected)
    assert session.max_payload_bytes == (1 << 20) - 1024
    text = (FOLDER / "replayfleet.conf").read_text(encoding="utf-8")
    assert "\nset_tcp_nodelay true\n" in text
    assert "message_size_limit" not in text, "clients would send a refused message for ever"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("client", "a/b"), "characters other than"),
        (("client", "+"), "characters other than"),
        (("client", "x" * 65), "longer than 64"),
        (("client", "broker"), "is taken"),
        (("broker", "a b"), "neither a name nor an address"),
        (("server", "a"), "'server' is unknown; expected broker or client"),
        ((), "expected FOLDER broker"),
    ],
)
def test_the_script_refuses_what_would_be_a_hole(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = certificates(tmp_path / "certs", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.rglob("*.key")) == []


def test_the_script_replaces_nothing_and_keeps_keys_to_itself(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    assert certificates(tmp_path, "client", "cam-1").returncode == 0
    before = (tmp_path / "cam-1.key").read_bytes()
    again = certificates(tmp_path, "client", "cam-1")
    assert (again.returncode, (tmp_path / "cam-1.key").read_bytes()) == (2, before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem", "cam-1.key", "cam-1.pem"]
