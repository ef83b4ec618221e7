from __future__ import annotations

import logging
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from amqtt.errors import ProtocolHandlerError

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport import broker as broker_module
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, TlsSettings, redacted
from replayfleet.federation.wire.transport.embedded import EmbeddedBroker
from replayfleet.federation.wire.transport.mqtt import MqttSession

log = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://127.0.0.1", "mqtt://127.0.0.1:1883"),
        ("mqtts://broker.example", "mqtts://broker.example:8883"),
        ("mqtt://localhost:4000/", "mqtt://localhost:4000"),
        ("mqtt://[::1]:4000", "mqtt://[::1]:4000"),
        ("broker.example", "mqtts://broker.example:8883"),
        ("192.0.2.7:8884", "mqtts://192.0.2.7:8884"),
        ("localhost", "mqtt://localhost:1883"),
        ("127.0.0.1:1884", "mqtt://127.0.0.1:1884"),
        ("[::1]", "mqtt://[::1]:1883"),
    ],
)
def test_a_url_gets_its_default_port(url: str, expected: str) -> None:
    assert str(BrokerAddress.parse(url)) == expected


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1", "expected mqtts://host:port"),
        ("", "names no host"),
        ("cam:secret@127.0.0.1", "credentials don't belong into a URL"),
        ("mqtt://", "names no host"),
        ("mqtt://127.0.0.1:99999", "not a URL"),
        ("::1", r"not a URL .*IPv6 as \[::1\]"),
        ("mqtt://127.0.0.1:0", "names no host and port"),
        ("mqtt://127.0.0.1/topic", "more than host and port"),
        ("mqtt://broker.example", "not encrypted; use mqtts://"),
        ("mqtt://10.0.0.5", "not encrypted"),
        ("mqtt://cam:secret@127.0.0.1", "credentials don't belong into a URL"),
        ("mqtts://cam:of/secret@host:1", "credentials don't belong into a URL"),
        ("mqtts://cam:secret/of?it@host", "credentials don't belong into a URL"),
        ("//cam:secret@host", "credentials don't belong into a URL"),
    ],
)
def test_a_url_that_can_not_be_used_is_one_clear_error(url: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        BrokerAddress.parse(url)
    assert "secret" not in str(caught.value)


def test_plaintext_to_another_machine_needs_the_operators_word() -> None:
    assert not BrokerAddress.parse("mqtt://10.0.0.5", insecure=True).encrypted


@pytest.mark.parametrize(
    "url",
    ["mqtt://cam:secret@host:1/x", "cam:secret@host:1/x", "mqtt://a@secret@host:1/x", "mqtt://a:se/secret@host:1/x"],
)
def test_no_secret_stands_in_a_log(url: str) -> None:
    assert "secret" not in redacted(url)
    assert "host:1/x" in redacted(url)


def test_credentials_come_from_a_file_or_the_environment_and_never_show(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("cam-1\nsecret\n")
    assert Credentials.load(file) == Credentials("cam-1", "secret")
    file.write_bytes(b"\xef\xbb\xbfcam-1\r\nsecret\r\n")  # as Notepad writes it
    assert Credentials.load(file) == Credentials("cam-1", "secret")
    environment = {"REPLAYFLEET_MQTT_USER": "cam-2", "REPLAYFLEET_MQTT_PASSWORD": "secret"}
    assert Credentials.load(None, environment) == Credentials("cam-2", "secret")
    assert Credentials.load(None, {}) is None
    assert "secret" not in repr(Credentials("cam-1", "secret"))


def test_half_given_credentials_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("cam-1\n")
    with pytest.raises(SettingsError, match="the password on its second"):
        Credentials.load(file)
    with pytest.raises(SettingsError, match="can't be read"):
        Credentials.load(tmp_path / "absent")
    with pytest.raises(SettingsError, match="set both"):
        Credentials.load(None, {"REPLAYFLEET_MQTT_USER": "cam"})


def test_tls_files_are_checked_before_anything_starts(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    with pytest.raises(SettingsError, match="does not exist"):
        TlsSettings(ca_file=tmp_path / "absent.pem").context()
    with pytest.raises(SettingsError, match="needs its key file"):
        TlsSettings(certificate_file=garbage).context()
    with pytest.raises(SettingsError, match="holds no PEM certificate"):
        TlsSettings(ca_file=garbage).context()
    with pytest.raises(SettingsError, match="don't fit"):
        TlsSettings(certificate_file=garbage, key_file=garbage).context()


def test_tls_files_without_tls_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="use mqtts://"):
        MqttSession("mqtt://localhost", "cam", on_message=print, tls=TlsSettings(ca_file=tmp_path / "ca.pem"))


def test_a_named_binary_that_is_no_mosquitto_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSQUITTO_BIN", "/bin/true")
    with pytest.raises(SettingsError, match="is not a mosquitto"):
        find_mosquitto()


@pytest.mark.parametrize(("version", "found"), [("1.6.9", False), ("2.0.11", True), ("2.1.0", True)])
def test_a_mosquitto_off_the_path_is_found_if_it_is_new_enough(
    version: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "mosquitto"
    binary.write_text(f"#!/bin/sh\necho mosquitto version {version}\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.delenv("MOSQUITTO_BIN", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(broker_module, "_FOLDERS", (str(tmp_path),))
    assert find_mosquitto() == (binary if found else None)


def test_a_binary_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "mosquitto"
    binary.write_text('#!/bin/sh\n[ "$1" = -h ] && echo mosquitto version 2.0.1\necho "Error: no luck" >&2\nexit 1\n')
    binary.chmod(0o755)
    monkeypatch.setenv("MOSQUITTO_BIN", str(binary))
    with (
        pytest.raises(SettingsError, match=r"does not start \(Error: no luck\)"),
        open_broker(log=log),
    ):
        pass


@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_nobody_is_given_the_port_of_a_broker_that_is_yet_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that chose the same one, one took the other's broker for its own."""
    start, tried = subprocess.Popen, []

    def late(command: Any, *more: Any, **how: Any) -> Any:
        if "-c" in command:
            port = int(Path(command[-1]).read_text().split()[1])
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            tried.append(port)
        return start(command, *more, **how)

    monkeypatch.setattr(subprocess, "Popen", late)
    with open_broker(log=log) as handle:
        assert handle.url.endswith(f":{tried[0]}")


def test_without_any_broker_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "find_mosquitto", lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "replayfleet.federation.wire.transport.embedded", None)
    with pytest.raises(SettingsError, match="apt install mosquitto"), open_broker(log=log):
        pass


def test_the_embedded_broker_stops_quietly_whoever_is_still_connected(caplog: pytest.LogCaptureFixture) -> None:
    broker = EmbeddedBroker()
    port = broker.start()
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"\x10\x0c\x00\x04MQTT")
        time.sleep(0.1)
        broker.stop()
    assert caplog.messages == []


def test_the_embedded_broker_stops_quietly_under_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    broker = EmbeddedBroker()
    with socket.create_connection(("127.0.0.1", broker.start())) as floods:
        floods.sendall(b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a" + b"\x32\x06\x00\x01a\x00\x01x" * 2000)
        floods.recv(4)
        broker.stop()
    assert caplog.messages == []


def test_the_embedded_broker_tells_of_no_message_whose_connection_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    broker = EmbeddedBroker()
    broker.start()
    assert broker._loop is not None
    for error in (ProtocolHandlerError("Packet handling was cancelled"), ValueError("of ours")):
        broker._loop.call_exception_handler({"message": str(error), "exception": error})
    broker.stop()
    assert caplog.messages == ["of ours"]


def test_a_session_that_never_started_queues_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    session = MqttSession("mqtt://localhost:1", "cam", on_message=print)
    for _ in range(10_001):
        session.publish("t", b"x")
    assert session.num_dropped == 1
    assert "messages wait already" in caplog.text
    with pytest.raises(ValueError, match="the broker takes"):
        session.publish("t", bytes(200_000))
    session.stop()
