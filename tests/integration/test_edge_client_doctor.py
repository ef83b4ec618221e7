"""``edge-client doctor`` as operators meet it, and what it says about real brokers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnxruntime
import pytest
from paho.mqtt.client import MQTTMessage
from support.authority import Authority
from support.linked import linked_library
from support.mosquitto import mosquitto, password_file

from replayfleet.devices.installing import DRIVER
from replayfleet.devices.shared_libraries import is_missing
from replayfleet.edge_client.doctor.broker import LINE, BrokerTarget, look_at_broker
from replayfleet.edge_client.doctor.findings import Finding, Status
from replayfleet.federation.wire.transport.broker import find_mosquitto
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, TlsSettings
from replayfleet.federation.wire.transport.broker_probe import BrokerProbe, BrokerProblem, BrokerSilent, _Event
from replayfleet.federation.wire.transport.embedded import EmbeddedBroker
from tests.support.ports import free_port

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
OPEN = ("allow_anonymous true", "set_tcp_nodelay true", "max_packet_size 1048576")
RULES = """\
pattern write replayfleet/v1/fleet/clients/%u/state
pattern readwrite replayfleet/v1/fleet/clients/%u/doctor
user cam-2
topic deny replayfleet/v1/fleet/clients/cam-2/doctor
"""


def asked(port: int, **more: Any) -> dict[str, Finding]:
    options = {"fleet": "fleet", "client_id": "cam-1", "tls": TlsSettings(), "credentials": None} | more
    target = BrokerTarget(url=f"mqtt{'s' if options['tls'].given else ''}://127.0.0.1:{port}", **options)
    return {finding.check: finding for finding in look_at_broker(target)}


def statuses(found: dict[str, Finding]) -> dict[str, str]:
    return {name.removeprefix("broker."): finding.status.value for name, finding in found.items()}


@needs_mosquitto
def test_a_broker_that_fits_lets_everything_through_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    with mosquitto(tmp_path, *OPEN) as port:
        found = asked(port)
        again = asked(port)
    fine = dict.fromkeys(("connection", "limits", "round-trip", "large", "retained"), "ok")
    assert statuses(found) == statuses(again) == fine
    limits = found["broker.limits"].facts
    assert (limits["max_packet_bytes"], limits["receive_maximum"], limits["max_qos"]) == (1 << 20, 20, 2)
    assert found["broker.large"].facts["bytes"] == 260 << 10
    assert found["broker.round-trip"].facts["topic"] == "replayfleet/v1/fleet/clients/cam-1/doctor"
    assert "MQTT 5" in found["broker.connection"].found


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[int, Authority]]:
    """A mosquitto that wants TLS, a user and its password, with rules."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("broker", days=10)
    (tmp_path / "rules").write_text(RULES)
    lines = (
        f"cafile {authority.ca}\ncertfile {certificate}\nkeyfile {key}",
        f"allow_anonymous false\npassword_file {password_file(tmp_path, cam_1='secret', cam_2='secret')}",
        f"acl_file {tmp_path / 'rules'}",
    )
    with mosquitto(tmp_path, *lines) as port:
        yield port, authority


@needs_mosquitto
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")  # paho's, after a failed handshake
def test_tls_and_password_and_rules_are_those_of_start(guarded: tuple[int, Authority]) -> None:
    port, authority = guarded
    tls, right = TlsSettings(authority.ca), Credentials("cam-1", "secret")
    found = asked(port, tls=tls, credentials=right)
    assert statuses(found) == {
        "connection": "ok",
        "certificate": "warning",
        "limits": "ok",
        "round-trip": "ok",
        "large": "ok",
        "retained": "ok",
    }
    assert found["broker.certificate"].facts["days_left"] == pytest.approx(10, abs=0.2)
    wrong = asked(port, tls=tls, credentials=Credentials("cam-1", "guess"))["broker.connection"]
    assert wrong.status == Status.FAILURE
    assert "not authorized" in wrong.found
    assert "guess" not in str(wrong)
    certificate, key = authority.issue("stranger")
    untrusted = asked(port, tls=TlsSettings(None, certificate, key), credentials=right)["broker.connection"]
    assert "not trusted" in untrusted.found


@needs_mosquitto
def test_rules_that_forbid_the_trial_name_the_line_to_add(guarded: tuple[int, Authority], tmp_path: Path) -> None:
    port, authority = guarded
    found = asked(port, client_id="cam-2", tls=TlsSettings(authority.ca), credentials=Credentials("cam-2", "secret"))
    assert statuses(found)["round-trip"] == "warning"
    assert statuses(found)["large"] == statuses(found)["retained"] == "skipped"
    assert "pattern readwrite replayfleet/v1/fleet/clients/%u/doctor" in found["broker.round-trip"].advice


@needs_mosquitto
def test_a_client_that_the_broker_knows_by_another_name_fails(guarded: tuple[int, Authority]) -> None:
    """Its uploads would be refused just so."""
    port, authority = guarded
    found = asked(port, client_id="cam-3", tls=TlsSettings(authority.ca), credentials=Credentials("cam-1", "secret"))
    assert statuses(found)["round-trip"] == "failure"
    assert statuses(found)["large"] == "skipped"
    assert "client id is 'cam-3', but the broker knows us as 'cam-1'" in found["broker.round-trip"].found


@needs_mosquitto
def test_a_certificate_of_another_client_fails_with_both_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("broker", days=10)
    mine, my_key = authority.issue("cam-1", days=10)
    (tmp_path / "rules").write_text(RULES)
    lines = (
        f"cafile {authority.ca}\ncertfile {certificate}\nkeyfile {key}",
        f"require_certificate true\nuse_identity_as_username true\nacl_file {tmp_path / 'rules'}",
    )
    with mosquitto(tmp_path, *lines) as port:
        words = ["--tls-ca", authority.ca, "--tls-cert", mine, "--tls-key", my_key, "--broker"]
        right, wrong = (
            command("doctor", "--json", *map(str, words), f"mqtts://127.0.0.1:{port}", "--client-id", name)
            for name in ("cam-1", "cam-3")
        )
    assert (right.returncode, wrong.returncode) == (0, 1)
    (row,) = [row for row in json.loads(wrong.stdout)["checks"] if row["check"] == "broker.round-trip"]
    assert "'cam-3'" in row["found"]
    assert "'cam-1'" in row["found"]


@needs_mosquitto
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("allow_anonymous true", "max_packet_size 900"), {"limits": "failure", "large": "ok", "retained": "ok"}),
        (("allow_anonymous true", "max_packet_size 8192"), {"limits": "failure", "large": "ok"}),
        (("allow_anonymous true", "max_packet_size 65536"), {"limits": "warning", "large": "ok"}),
        (("allow_anonymous true", "max_inflight_messages 5"), {"limits": "warning", "large": "ok"}),
        ((*OPEN, "message_size_limit 4096"), {"limits": "ok", "large": "failure", "retained": "skipped"}),
        ((*OPEN, "retain_available false"), {"large": "ok", "retained": "failure"}),
        ((*OPEN, "max_qos 0"), {"limits": "failure", "round-trip": "skipped", "large": "skipped"}),
    ],
)
def test_what_a_broker_does_not_allow_is_found(
    lines: tuple[str, ...], expected: dict[str, str], tmp_path: Path
) -> None:
    with mosquitto(tmp_path, *lines) as port:
        found = statuses(asked(port))
    assert {name: found[name] for name in expected} == expected


@needs_mosquitto
@pytest.mark.parametrize(
    ("trial", "row", "problem", "status", "advice"),
    [
        ("round_trip", "round-trip", BrokerSilent("no answer in time"), Status.WARNING, f"{LINE}; or add to the"),
        (
            "round_trip",
            "round-trip",
            BrokerProblem("it ended the connection"),
            Status.FAILURE,
            "look at the broker's log, and at the line; or add to the broker's rules",
        ),
        ("large_message", "large", BrokerSilent("no answer in time"), Status.FAILURE, f"{LINE}, large packets first"),
        ("large_message", "large", BrokerProblem("it ended the connection"), Status.FAILURE, "raise the broker's"),
    ],
)
def test_a_bad_line_isn_t_taken_for_rules_or_for_a_limit(
    trial: str,
    row: str,
    problem: BrokerProblem,
    status: Status,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BrokerProbe, trial, Mock(side_effect=problem))
    with mosquitto(tmp_path, *OPEN) as port:
        found = asked(port)[f"broker.{row}"]
    assert found.status == status
    assert found.advice.startswith(advice)


def test_a_broker_of_the_old_protocol_announces_no_limits_and_is_tried_all_the_same() -> None:
    broker = EmbeddedBroker(0)
    port = broker.start()
    try:
        found = asked(port)
    finally:
        broker.stop()
    assert statuses(found) == {
        "connection": "ok",
        "limits": "warning",
        "round-trip": "ok",
        "large": "ok",
        "retained": "ok",
    }
    assert found["broker.connection"].facts["protocol"] == "3.1.1"


class TellsNewSubscriptionsAlone(Mock):
    """A client of a broker that sends what it retains once in a subscription's life, however often it is asked for."""

    kept, subscribed, probe = b"", False, Mock()

    def publish(self, topic: str, payload: bytes, *, qos: int, retain: bool) -> Mock:
        self.kept = payload
        self.hear(payload, retain=False)
        return Mock()

    def subscribe(self, topic: str, *, qos: int) -> None:
        self.probe._inbox.put(_Event("subscribed"))
        if self.kept and not self.subscribed:
            self.hear(self.kept, retain=True)
        self.subscribed = True

    def unsubscribe(self, topic: str) -> None:
        self.subscribed = False

    def hear(self, payload: bytes, *, retain: bool) -> None:
        message = MQTTMessage()
        message.payload, message.retain = payload, retain
        self.probe._inbox.put(message)


def test_a_broker_that_tells_new_subscriptions_alone_what_it_retains_does_retain_it() -> None:
    probe = BrokerProbe(BrokerAddress.parse("mqtt://127.0.0.1"), "b", "t/x")
    probe._client = client = TellsNewSubscriptionsAlone(probe=probe, subscribed=True)
    probe.retained_message()
    assert client.kept == b"", "removed again"


def test_nobody_there_is_a_failure_that_says_so() -> None:
    (found,) = asked(free_port()).values()
    assert found.status == Status.FAILURE
    assert "nothing listens" in found.found


GPU_BUILD = """\
__version__ = "0.0"
class SessionOptions:
    def add_session_config_entry(self, key, value): pass
def get_available_providers():
    return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
def set_default_logger_severity(level): pass
def InferenceSession(*args, providers, **options):
    raise RuntimeError(f"{providers[0]} can't be loaded")
"""


@pytest.fixture
def gpu_build(tmp_path: Path) -> str:
    """What PYTHONPATH must say to get ``onnxruntime-gpu``: nothing where that is installed, else a stand-in.

    The stand-in's providers are real libraries that need libraries which aren't there.
    """
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return ""
    capi = tmp_path / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    (capi.parent / "__init__.py").write_text(GPU_BUILD)
    for name in ("cuda", "tensorrt"):
        lacking = linked_library(tmp_path, f"onnxruntime_providers_{name}", f"{name}-absent")
        lacking.rename(capi / lacking.name)
    return str(tmp_path)


@pytest.mark.skipif(not is_missing(DRIVER), reason="this machine has NVIDIA's driver")
def test_gpu_providers_without_a_gpu_are_listed_but_not_usable_and_say_what_is_missing(gpu_build: str) -> None:
    done = command("doctor", "--json", "--device", "cpu", environment={"PYTHONPATH": gpu_build} if gpu_build else {})
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    for name in ("cuda", "tensorrt"):
        row = rows[f"provider.{name}"]
        assert (row["status"], row["facts"]["listed"], row["facts"]["works"]) == ("warning", True, False)
        assert row["found"].startswith("listed, but not usable: lib")
        assert DRIVER in row["facts"]["missing"]
        assert all(library in row["found"] for library in row["facts"]["missing"])
        assert len(row["facts"]["missing"]) > 1 or not gpu_build
        assert "NVIDIA's driver" in row["advice"]


def command(
    *words: str, without: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    absent = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {absent}from replayfleet.edge_client.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(environment or {})},
    )


@needs_mosquitto
def test_a_device_that_fits_exits_0_and_prints_a_table(tmp_path: Path) -> None:
    with mosquitto(tmp_path, *OPEN) as port:
        done = command("doctor", "--device", "cpu", "--broker", f"mqtt://127.0.0.1:{port}", "--data-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    assert rows["provider.cpu"] == rows["broker.retained"] == rows["package.onnxruntime"] == "ok"
    assert rows["disk.speed"] in {"ok", "warning"}


def test_without_onnxruntime_opencv_and_torch_it_still_runs_and_exits_1() -> None:
    done = command("doctor", "--json", without=("onnxruntime", "cv2", "torch"))
    assert done.returncode == 1, done.stdout
    found = json.loads(done.stdout)
    assert found["status"] == "failure"
    status = {each["check"]: each["status"] for each in found["checks"]}
    assert status["package.onnxruntime"] == status["provider.cpu"] == "failure"
    assert status["package.torch"] == status["package.opencv"] == "warning"
    assert status["cameras.backends"] == "skipped"
    assert status["board"] == "ok"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "jetsen"), "did you mean 'jetson'"),
        (("--require-provider", "tensor"), "takes one of tensorrt, cuda, cpu"),
        (("--broker", "http://x"), "expected mqtts://host:port"),
        (("--colour",), "(edge-client doctor --help lists all options)"),
    ],
)
def test_bad_usage_exits_2_with_one_line(words: tuple[str, ...], message: str) -> None:
    done = command("doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
