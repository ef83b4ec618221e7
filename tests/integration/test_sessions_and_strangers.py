"""Whose session is whose at a real broker, and what a member says that the broker doesn't want."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode
from support.authority import Authority
from support.mosquitto import mosquitto, password_file

from replayfleet.federation.wire.transport import mqtt
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, TlsSettings
from replayfleet.federation.wire.transport.broker_probe import BrokerProbe, BrokerProblem
from replayfleet.federation.wire.transport.connecting import Connector, secret_id
from replayfleet.federation.wire.transport.interfaces import Session, Will
from replayfleet.federation.wire.transport.mqtt import MqttSession
from replayfleet.federation.wire.transport.mqtt_connection import Connection
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
WILL = Will("t/will", b"gone")


class Yard:
    """A broker with TLS that knows each member by its certificate; its members."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.url = folder, f"mqtts://127.0.0.1:{port}"
        self.opened: list[Session] = []

    def tls(self, name: str) -> TlsSettings:
        return TlsSettings(self.folder / "ca.pem", self.folder / f"{name}.pem", self.folder / f"{name}.key")

    def member(self, name: str, mqtt_id: str, secret: bytes) -> Session:
        """One as the programs make it."""
        connect = Connector(self.tls(name), None, insecure=False).to(self.url, secret)
        return self._started(connect(mqtt_id, lambda topic, payload: None, WILL))

    def stranger(self, name: str, mqtt_id: str) -> Session:
        """One that asks for whatever id it likes."""
        return self._started(MqttSession(self.url, mqtt_id, on_message=lambda topic, payload: None, tls=self.tls(name)))

    def _started(self, session: Session) -> Session:
        session.start()
        self.opened.append(session)
        return session


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    authority = Authority(tmp_path)
    for name in ("broker", "aggregator", "cam-1", "cam-2"):
        authority.issue(name)
    (tmp_path / "acl").write_text("user aggregator\ntopic readwrite t/#\nuser cam-1\ntopic readwrite t/#\n")
    lines = (f"cafile {authority.ca}", f"certfile {tmp_path}/broker.pem", f"keyfile {tmp_path}/broker.key")
    rules = ("require_certificate true", "use_identity_as_username true", f"acl_file {tmp_path}/acl")
    with mosquitto(tmp_path, *lines, *rules) as port:
        found = Yard(tmp_path, port)
        try:
            yield found
        finally:
            for session in found.opened:
                session.stop()


def test_no_certificate_takes_another_ones_session(yard: Yard) -> None:
    own = secrets.token_bytes(32)
    names = ("fleet-aggregator-0a1b2c3d-control", "fleet-cam-1-control", "fleet-cam-1-data")
    owners = ("aggregator", "cam-1", "cam-1")
    members = [yard.member(owner, name, secrets.token_bytes(32)) for owner, name in zip(owners, names, strict=True)]
    until(lambda: all(member.connected for member in members))
    # all that cam-2 can know: the ids' readable parts, and its own secret
    thieves = [yard.stranger("cam-2", mqtt_id) for name in names for mqtt_id in (name, secret_id(name, own))]
    until(lambda: all(thief.connected for thief in thieves))
    for member in members:
        member.publish("t/alive", b"")
    until(lambda: all(member.num_connections == 1 and member.connected for member in members))
    assert [member.problem for member in members] == [""] * 3


def test_a_restarted_member_finds_its_session_again(yard: Yard) -> None:
    key = secrets.token_bytes(32)
    first = yard.member("cam-1", "fleet-cam-1-control", key)
    first.subscribe(("t/x",))
    until(lambda: first.connected)
    first.stop()
    heard: list[bytes] = []
    other = yard.member("aggregator", "fleet-aggregator-control", secrets.token_bytes(32))
    until(lambda: other.connected)
    other.publish("t/x", b"meanwhile")
    connect = Connector(yard.tls("cam-1"), None, insecure=False).to(yard.url, key)
    yard._started(connect("fleet-cam-1-control", lambda topic, payload: heard.append(payload), WILL))
    until(lambda: heard == [b"meanwhile"])


def test_a_copy_of_a_member_is_said_on_both_ends(yard: Yard) -> None:
    key = secrets.token_bytes(32)
    copies = [yard.member("cam-1", "fleet-cam-1-control", key) for _ in range(2)]
    until(lambda: all("taken over" in copy.problem for copy in copies))
    copies[1].stop()
    until(lambda: copies[0].connected)
    assert "taken over" in copies[0].problem, "it stays for a while: they took it by turns"


SUCCESS, REFUSED, TAKEN_OVER = b"\x20\x03\x00\x00\x00", b"\x90\x04%b\x00\x87", b"\xe0\x01\x8e"
"""CONNACK, SUBACK (not authorized) and DISCONNECT of MQTT 5."""


@pytest.mark.parametrize(
    ("word", "clients", "said"),
    [
        (TAKEN_OVER, ["cam-1"], "session taken over"),
        (REFUSED, ["cam-1", "cam-2"], "not authorized to subscribe to t/clients/+/up t/x: "),
        (REFUSED, ["cam-1"], "not authorized to subscribe to t/clients/cam-1/up t/x: "),
    ],
)
def test_what_brokers_say_that_mosquitto_doesn_t_is_understood_too(word: bytes, clients: list[str], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        session = MqttSession(f"mqtt://127.0.0.1:{port}", "a", on_message=lambda topic, payload: None)
        session.subscribe(["t/x", *(f"t/clients/{client}/up" for client in clients)])
        session.start()
        link, _ = server.accept()
        with link:
            link.recv(1024)
            link.sendall(SUCCESS)
            number = link.recv(1024)[2:4]
            assert session._connection.num_answers == 1, "to subscribing it has as long again"
            link.sendall(word.replace(b"%b", number))
            until(lambda: said in session.state)
        assert said in session.problem
        session.stop()


def test_a_broker_that_hangs_up_on_mqtt_5_is_asked_for_the_older_one_without_an_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        url = f"mqtt://127.0.0.1:{server.getsockname()[1]}"
        session = MqttSession(url, "a", on_message=lambda topic, payload: None)
        session.start()
        server.accept()[0].close()
        link, _ = server.accept()
        with link:
            assert b"MQTT\x04" in link.recv(1024), "3.1.1"
            link.sendall(b"\x20\x02\x00\x00")
            until(lambda: session.connected)
            session.stop()
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_no_more_is_on_its_way_than_the_broker_announced() -> None:
    """One that announces 2 and means it ends the connection at the third message (MQTT 5, 4.9)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        session = MqttSession(
            f"mqtt://127.0.0.1:{server.getsockname()[1]}", "a", on_message=lambda topic, payload: None
        )
        session.start()
        link, _ = server.accept()
        with link:
            link.settimeout(30)
            link.recv(1024)
            link.sendall(b"\x20\x06\x00\x00\x03\x21\x00\x02")
            until(lambda: session.connected)
            for _ in range(6):
                session.publish("t/x", b"")
            seen, answered = b"", 0
            while answered < 6:
                while len(numbers := [part[:2] for part in seen.split(b"\x00\x03t/x")[1:]]) <= answered:
                    seen += link.recv(1024)
                assert len(numbers) <= answered + 2
                link.sendall(b"\x40\x02" + numbers[answered])
                answered += 1
            session.stop()


@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
@pytest.mark.parametrize("reset", [False, True])
def test_who_closes_in_the_handshake_may_not_speak_tls(reset: bool) -> None:
    """As newer brokers do to what isn't MQTT: some say nothing more, some don't even read."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close_one() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 if reset else 1 << 16)

        threading.Thread(target=close_one, daemon=True).start()
        address = BrokerAddress.parse(f"mqtts://127.0.0.1:{server.getsockname()[1]}")
        with (
            BrokerProbe(address, "b", "t/x", TlsSettings().context()) as probe,
            pytest.raises(BrokerProblem, match="handshake; perhaps it doesn't speak TLS there"),
        ):
            probe.connect()


@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
def test_the_port_of_the_other_listener_is_guessed(yard: Yard, tmp_path: Path) -> None:
    """One with TLS, and one without."""
    (tmp_path / "plain").mkdir()
    with mosquitto(tmp_path / "plain", "allow_anonymous true") as port:
        for url, expected in (
            (yard.url.replace("mqtts", "mqtt"), "before it answered (does it speak TLS there"),
            (f"mqtts://127.0.0.1:{port}", "it doesn't speak TLS there"),
        ):
            session = yard._started(MqttSession(url, "a", on_message=lambda topic, payload: None))
            until(lambda session=session, expected=expected: expected in session.state)  # type: ignore[misc]
            address = BrokerAddress.parse(url)
            context = TlsSettings().context() if address.encrypted else None
            with (
                BrokerProbe(address, "b", "t/x", context) as probe,
                pytest.raises(BrokerProblem, match="speak TLS there"),
            ):
                probe.connect()


def test_a_message_too_large_for_the_broker_isn_t_taken_for_a_thief(tmp_path: Path) -> None:
    with mosquitto(tmp_path, "allow_anonymous true", "message_size_limit 4096") as port:
        session = MqttSession(f"mqtt://127.0.0.1:{port}", "a", on_message=lambda topic, payload: None)
        session.start()
        session.publish("t/x", bytes(8192))
        until(lambda: "lost: Protocol error; a message of ours may be larger" in session.problem)
        before = session.num_connections
        until(lambda: session.num_connections > before)
        assert "may be larger" in session.problem, "being accepted again is no answer to it"
        session.stop()


def test_the_topics_of_hundreds_of_clients_fit_at_a_broker_of_small_packets(tmp_path: Path) -> None:
    """As an aggregator that starts again asks for them, all at once."""
    topics = [f"t/{number:03d}/{'x' * 100}" for number in range(200)]
    heard: list[str] = []
    with mosquitto(tmp_path, "allow_anonymous true", "max_packet_size 16384") as port:
        session = MqttSession(f"mqtt://127.0.0.1:{port}", "a", on_message=lambda topic, payload: heard.append(topic))
        other = MqttSession(f"mqtt://127.0.0.1:{port}", "b", on_message=lambda topic, payload: None)
        session.subscribe(topics)
        session.start()
        until(lambda: session.connected)
        other.start()
        for topic in topics:
            other.publish(topic, b"")
        until(lambda: heard == topics)
        session.unsubscribe(topics[1:])
        session.subscribe(["t/end"])
        other.publish("t/end", b"1", retain=True)
        until(lambda: heard[-1] == "t/end")  # so the broker has read what came before that subscription
        for topic in (*topics, "t/end"):
            other.publish(topic, b"")
        until(lambda: len(heard) > 202)
        assert heard == [*topics, "t/end", topics[0], "t/end"]
        assert session.num_connections == 1
        session.stop()
        other.stop()


class AnswersSlowly:
    """A connection whose broker takes its time for each packet of topics, and falls silent after the tenth."""

    accepted, looks, turns = True, 0, 0
    renewed = dead = ready = False

    @property
    def num_answers(self) -> int:
        self.looks += 1
        return min(self.looks, 10)


def test_a_broker_that_goes_on_answering_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = MqttSession("mqtt://127.0.0.1:1", "a", on_message=lambda topic, payload: None)
    session._wake = Mock()
    monkeypatch.setattr(mqtt, "time", Mock(monotonic=itertools.count(step=6.0).__next__))
    connection: Any = AnswersSlowly()
    assert session._watch(connection) == "no answer to SUBSCRIBE in 10 s"
    assert connection.looks == 11, "12 s after the last answer"


def test_a_topic_that_is_added_while_a_connection_asks_for_others_keeps_it_from_nothing() -> None:
    """Its packet is the first, and its answer there before the thread that asked goes on."""
    session = MqttSession("mqtt://127.0.0.1:1", "a", on_message=lambda topic, payload: None)
    connection = Connection(session._plan, list, lambda *_: None, session._wake, lambda _: None)

    def answered(mid: int) -> None:
        connection._subscribed(Mock(), None, mid, [ReasonCode(PacketTypes.SUBACK, identifier=1)], None)

    def asked(topics: list[tuple[str, object]]) -> tuple[int, int]:
        if topics[0][0] == "t/others":
            return 0, 2
        connection.subscribe(["t/others"])
        answered(1)
        return 0, 1

    connection._client = Mock(subscribe=asked)
    connection.subscribe(["t/added"])
    assert not connection.ready
    answered(2)
    assert connection.ready


def test_a_member_without_rules_is_told_so(yard: Yard) -> None:
    session = yard.stranger("cam-2", "a")
    until(lambda: session.connected)
    session.publish("t/x", b"")
    session.publish("t/clients/cam-7/up", b"")
    until(lambda: "not authorized to publish on t/clients/+/up t/x: " in session.problem)
    assert session.connected


@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
def test_a_certificate_that_the_broker_refuses_is_said_in_words(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")
    certificate, key = stranger.issue("cam-1")
    tls = TlsSettings(yard.folder / "ca.pem", certificate, key)
    session = yard._started(MqttSession(yard.url, "a", on_message=lambda topic, payload: None, tls=tls))
    until(lambda: "another authority signed it" in session.problem)
    probe = BrokerProbe(BrokerAddress.parse(yard.url), "b", "t/x", tls.context())
    with probe, pytest.raises(BrokerProblem, match="another authority"):
        probe.connect()
    bare = yard._started(
        MqttSession(yard.url, "c", on_message=lambda topic, payload: None, tls=TlsSettings(tls.ca_file))
    )
    until(lambda: "there is none; name one with --identity" in bare.problem)


def test_a_wrong_password_is_said_in_words(tmp_path: Path) -> None:
    passwords = password_file(tmp_path, cam_1="secret")
    with mosquitto(tmp_path, "allow_anonymous false", f"password_file {passwords}") as port:
        session = MqttSession(
            f"mqtt://127.0.0.1:{port}",
            "a",
            on_message=lambda topic, payload: None,
            credentials=Credentials("cam-1", "guess"),
        )
        session.start()
        until(lambda: "not authorized: the broker doesn't know this member" in session.problem)
        session.stop()
