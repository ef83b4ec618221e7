"""A fleet's members at a real mosquitto, with the files that `aggregator enroll` writes for both."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayfleet.aggregator.cli import cli
from replayfleet.federation.service.credentials.identity import tls_of
from replayfleet.federation.wire.protocol.topics import aggregator_subscriptions, client_subscriptions, topic_of
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.broker_address import TlsSettings
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.ports import answers, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
FLEET = "fleet"
DEBIAN = """\
pid_file {place}/mosquitto.pid
persistence true
persistence_location {place}/
log_dest file {place}/mosquitto.log
include_dir {place}/conf.d
"""
"""/etc/mosquitto/mosquitto.conf of Debian 12 but for its paths: ours is read after it."""


def command(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


class Broker:
    """A mosquitto with our files; where it listens, and what it accepts."""

    def __init__(self, place: Path) -> None:
        self.place, self.data_dir = place, place / "aggregator"
        self.port = free_port()
        for name in ("cam-1", "cam-2", "operator"):
            hosts = ("--host", "localhost", "--host", "127.0.0.1", "--broker-dir", place / "replayfleet")
            command("enroll", name, "--data-dir", self.data_dir, *hosts)
        (place / "conf.d").mkdir()
        self.copy()
        text = DEBIAN.format(place=place) + ("user root\n" if os.geteuid() == 0 else "")
        (place / "mosquitto.conf").write_text(text, encoding="utf-8")
        self.process = subprocess.Popen([str(find_mosquitto()), "-c", place / "mosquitto.conf"])
        until(lambda: answers(self.port))
        self._sessions: list[MqttSession] = []
        self.heard: dict[str, list[tuple[str, bytes]]] = {}

    def copy(self) -> None:
        """What an operator does: copy the folder; its configuration goes into conf.d."""
        shutil.copytree(self.data_dir / "broker", self.place / "replayfleet", dirs_exist_ok=True)
        ours = (self.place / "replayfleet" / "replayfleet.conf").read_text(encoding="utf-8")
        ours = ours.replace("listener 8883", f"listener {self.port} 127.0.0.1")
        (self.place / "conf.d" / "replayfleet.conf").write_text(ours, encoding="utf-8")

    def reload(self) -> None:
        self.copy()
        self.process.send_signal(signal.SIGHUP)

    def tls(self, name: str) -> TlsSettings:
        folder = self.data_dir / ("identity" if name == "aggregator" else f"members/{name}")
        return tls_of(folder, TlsSettings())

    def session(self, name: str, topics: tuple[str, ...] = (), tls: TlsSettings | None = None) -> MqttSession:
        heard = self.heard.setdefault(name, [])
        session = MqttSession(
            f"mqtts://localhost:{self.port}",
            f"{name}-{len(self._sessions)}",
            on_message=lambda *message: heard.append(message),
            tls=tls or self.tls(name),
        )
        session.subscribe(topics)
        session.start()
        self._sessions.append(session)
        return session

    def end(self) -> None:
        for session in self._sessions:
            session.stop()
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    found = Broker(tmp_path_factory.mktemp("broker"))
    yield found
    found.end()


def test_every_message_of_a_fleet_passes_and_no_other(broker: Broker) -> None:
    everything = (f"replayfleet/v1/{FLEET}/#", "$SYS/#")
    subscriptions = aggregator_subscriptions(FLEET)
    aggregator = broker.session("aggregator", topics=(*subscriptions.control, *subscriptions.data))
    own = client_subscriptions(FLEET, "cam-1")
    cam_1 = broker.session("cam-1", topics=(*own.control, *own.data, topic_of(FLEET, "doctor", "cam-1")))
    operator = broker.session("operator", topics=everything)
    spy = broker.session("cam-2", topics=everything)
    until(lambda: all(session.connected for session in (aggregator, cam_1, operator, spy)))

    allowed_up = [topic_of(FLEET, channel, "cam-1") for channel in ("state", "up", "control")]
    forbidden = [topic_of(FLEET, channel, "cam-2") for channel in ("state", "up", "control", "down")]
    forbidden += [topic_of(FLEET, "round"), topic_of(FLEET, "down"), topic_of(FLEET, "down", "cam-1")]
    for topic in (*forbidden, *allowed_up, topic_of(FLEET, "doctor", "cam-1")):
        cam_1.publish(topic, b"from cam-1")
    shared = [topic_of(FLEET, "round"), topic_of(FLEET, "down")]
    down = [*shared, topic_of(FLEET, "down", "cam-1"), topic_of(FLEET, "control", "cam-1")]
    for topic in down:
        aggregator.publish(topic, b"from the aggregator")
    operator.publish(topic_of(FLEET, "round"), b"from the operator")
    operator.publish(topic_of(FLEET, "feedback", "cam-1"), b"from the operator")

    expected = {*((topic, b"from the aggregator") for topic in down)}
    expected.add((topic_of(FLEET, "feedback", "cam-1"), b"from the operator"))
    until(lambda: len(broker.heard["cam-1"]) >= len(expected) and len(broker.heard["aggregator"]) >= len(allowed_up))
    time.sleep(0.5)  # for what must not come
    assert set(broker.heard["cam-1"]) - {(topic_of(FLEET, "doctor", "cam-1"), b"from cam-1")} == expected
    assert set(broker.heard["aggregator"]) == {(topic, b"from cam-1") for topic in allowed_up}
    assert {topic for topic, _ in broker.heard["cam-2"]} == set(shared)
    assert broker.heard["operator"] == []


def test_nobody_enters_without_a_certificate_of_this_fleet(broker: Broker, tmp_path: Path) -> None:
    command("enroll", "cam-1", "--data-dir", tmp_path / "other", "--out", tmp_path / "cam-1")
    for pair in (None, (tmp_path / "cam-1" / "member.crt", tmp_path / "cam-1" / "member.key")):
        context = ssl.create_default_context(cafile=broker.data_dir / "broker" / "ca.crt")
        if pair is not None:
            context.load_cert_chain(*pair)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            enter(broker.port, context)


def test_the_brokers_certificate_is_no_members(broker: Broker, tmp_path: Path) -> None:
    """Who broke into the broker's machine can't be a member, and a member can't be the broker."""
    files = broker.data_dir / "broker"
    context = ssl.create_default_context(cafile=files / "ca.crt")
    context.load_cert_chain(files / "broker.crt", files / "broker.key")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        enter(broker.port, context)


def enter(port: int, context: ssl.SSLContext) -> None:
    """Shake hands with the broker; with TLS 1.3 its refusal comes with the first read."""
    with (
        socket.create_connection(("localhost", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        if not encrypted.recv(1):
            raise ConnectionError


@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
def test_renewing_and_revoking_reach_the_broker_with_a_reload_and_end_nobody_elses_connection(broker: Broker) -> None:
    command("enroll", "cam-7", "--data-dir", broker.data_dir)
    former = broker.place / "former"
    shutil.copytree(broker.data_dir / "members" / "cam-7", former)
    broker.reload()
    kept = broker.session("cam-2")
    old = broker.session("cam-7", tls=tls_of(former, TlsSettings()))
    until(lambda: kept.connected and old.connected)

    command("renew", "cam-7", "--data-dir", broker.data_dir, "--overlap-days", 1)
    broker.reload()
    new = broker.session("cam-7")
    again = broker.session("cam-7", tls=tls_of(former, TlsSettings()))
    until(lambda: new.connected and again.connected)  # both certificates count for a while

    command("renew", "cam-7", "--data-dir", broker.data_dir, "--overlap-days", 0)
    broker.reload()
    until(lambda: not refused(broker, "cam-7", None))
    until(lambda: refused(broker, "cam-7", former))

    assert "reload" in command("revoke", "cam-7", "--data-dir", broker.data_dir, "--yes")
    broker.reload()
    until(lambda: refused(broker, "cam-7", None))
    new.publish(topic_of(FLEET, "up", "cam-7"), b"")
    until(lambda: "not authorized" in new.problem)  # its live connection may say nothing more
    assert kept.num_connections == 1


def refused(broker: Broker, name: str, folder: Path | None) -> bool:
    context = (broker.tls(name) if folder is None else tls_of(folder, TlsSettings())).context()
    try:
        with (
            socket.create_connection(("localhost", broker.port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as encrypted,
        ):
            encrypted.sendall(b"\x10\x10\x00\x04MQTT\x05\x02\x00\x0a\x00\x00\x03" + b"try")  # CONNECT of MQTT 5
            return not encrypted.recv(1)
    except (ssl.SSLError, ConnectionError):
        return True


def test_the_settings_that_decide_speed_and_memory_are_in_force(broker: Broker) -> None:
    assert broker.session("cam-2").max_payload_bytes < 1 << 20
    session = broker.session("cam-1")
    until(lambda: session.connected)
    assert session.max_payload_bytes == (1 << 20) - 1024
    text = (broker.data_dir / "broker" / "replayfleet.conf").read_text(encoding="utf-8")
    assert "\nset_tcp_nodelay true\n" in text
    assert "message_size_limit" not in text, "clients would send a refused message for ever"


@pytest.mark.parametrize("name", ["replayfleet.conf", "replayfleet-2.1.conf"])
def test_every_group_of_lines_has_a_comment_above(broker: Broker, name: str) -> None:
    text = (broker.data_dir / "broker" / name).read_text(encoding="utf-8")
    longest = max(re.split(r"(?m)^#.*\n", text), key=lambda group: group.count("\n"))
    assert longest.count("\n") <= 6, f"{name}: nothing explains these lines:\n{longest}"


def test_both_styles_differ_in_the_rules_alone(broker: Broker) -> None:
    both = [(broker.data_dir / "broker" / name).read_text() for name in ("replayfleet.conf", "replayfleet-2.1.conf")]
    lines = [{line for line in text.splitlines() if line and not line.startswith("#")} for text in both]
    rules = broker.place / "replayfleet" / "rules.acl"
    assert lines[0] - lines[1] == {f"acl_file {rules}"}
    plugin = {"global_plugin /usr/lib/mosquitto_acl_file.so", f"plugin_opt_acl_file {rules}"}
    assert lines[1] - lines[0] == plugin
