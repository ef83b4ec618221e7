"""The broker: whether it lets this client in, what it allows, and whether that is true."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from replayfleet.edge_client.doctor.findings import Finding, failure, ok, skipped, warning
from replayfleet.edge_client.doctor.keys import expiry
from replayfleet.edge_client.operator.status import read_status, stale
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings
from replayfleet.federation.wire.transport.broker_probe import (
    BrokerForbids,
    BrokerProbe,
    BrokerProblem,
    BrokerSilent,
    Welcome,
)
from replayfleet.federation.wire.transport.connecting import Connector, secret_id
from replayfleet.federation.wire.transport.mqtt_connection import MAX_INFLIGHT

LEAST_PACKET_BYTES = 16 << 10
SMALL_PACKET_BYTES = 128 << 10
"""What the smallest of the common brokers takes (AWS IoT Core)."""

SLOW_ROUND_TRIP_S = 0.5
LINE = "see whether the line is slow or loses packets"
CHECKS = ("broker.limits", "broker.round-trip", "broker.large", "broker.retained")


@dataclass(frozen=True, slots=True)
class BrokerTarget:
    """Who is asked, and as whom.

    Attributes:
        url: as the operator wrote it.
        fleet: fleet name.
        client_id: this client; empty: the broker's user.
        tls: certificates.
        credentials: user and password, if any.
        insecure: allow plaintext to other machines.
        insist_on_tls: the operator named TLS files.
        certificate_name: common name of the client certificate; empty: none, or not readable.
    """

    url: str
    fleet: str
    client_id: str
    tls: TlsSettings
    credentials: Credentials | None
    insecure: bool = False
    insist_on_tls: bool = False
    certificate_name: str = ""

    @property
    def client(self) -> str:
        return self.client_id or (self.credentials.user if self.credentials else "") or "doctor"

    @property
    def known_as(self) -> str:
        """What the broker's rules may call us, if that isn't ``client``; empty: nothing, or just that."""
        names = [name for name in (self.certificate_name, self.credentials.user if self.credentials else "") if name]
        return "" if self.client in names else " or ".join(repr(name) for name in names)


def look_at_broker(target: BrokerTarget | None) -> list[Finding]:
    """Connect beside a client that may be running, and try what a client needs."""
    if target is None:
        return [skipped("broker", "not asked", "name it with --broker URL, and the options that start takes")]
    connector = Connector(target.tls, target.credentials, target.insecure, insist_on_tls=target.insist_on_tls)
    try:
        address = connector.check(target.url)
        context = target.tls.context() if address.encrypted else None
        topic = topic_of(target.fleet, "doctor", target.client)
    except SettingsError as error:
        return [failure("broker.connection", str(error), "see the rows about keys")]
    own_id = secret_id(f"{target.fleet}-{target.client}-doctor", secrets.token_bytes(16))
    with BrokerProbe(address, own_id, topic, context, target.credentials) as probe:
        try:
            welcome = probe.connect()
        except BrokerProblem as problem:
            advice = "check URL, certificates, user and password, and that port and firewall let it through"
            return [failure("broker.connection", f"{address}: {problem}", advice)]
        connected = f"{address}, MQTT {welcome.protocol}, connected in {1000 * welcome.connect_s:.0f} ms"
        facts = {"protocol": welcome.protocol, "connect_s": round(welcome.connect_s, 6)}
        findings = [ok("broker.connection", connected, **facts)]
        if welcome.certificate_ends_at is not None:
            certificate = f"certificate of {address.host}"
            findings.append(expiry("broker.certificate", certificate, None, welcome.certificate_ends_at, time.time()))
        return [*findings, _limits(welcome), *_tried(probe, welcome, target)]


def look_at_session(data_dir: Path | None) -> list[Finding]:
    """Return what a client that runs here says about its own sessions; no other connection can know that."""
    try:
        status = read_status(data_dir) if data_dir is not None else {}
    except SettingsError:
        return []  # none has run here
    if not status.get("running"):
        return []
    if problem := stale(status):
        return [failure("broker.session", problem)]
    said = str(status.get("broker", ""))
    if said == "connected":
        return [ok("broker.session", "the client that runs here is connected")]
    return [failure("broker.session", f"the client that runs here says: {said}")]


def _limits(welcome: Welcome) -> Finding:
    packet, receive = welcome.max_packet_bytes, welcome.receive_maximum
    facts = {
        "max_packet_bytes": packet,
        "receive_maximum": receive,
        "retains": welcome.retains,
        "max_qos": welcome.max_qos,
    }
    if welcome.protocol != "5":
        found = "MQTT 3.1.1 announces none; 1 MiB is assumed"
        return warning(
            "broker.limits", found, "use a broker with MQTT 5, or make sure it takes packets of 1 MiB", **facts
        )
    found = f"packets of {f'{packet:,} bytes' if packet else 'any size'}, {receive or 65_535:,} unacknowledged"
    if welcome.max_qos < 1:
        return failure("broker.limits", f"{found}, quality of service 0 only", "use a broker with QoS 1", **facts)
    if packet is not None and packet < LEAST_PACKET_BYTES:
        return failure("broker.limits", found, f"allow packets of at least {SMALL_PACKET_BYTES:,} bytes", **facts)
    if packet is not None and packet < SMALL_PACKET_BYTES:
        return warning("broker.limits", found, "transfers are slow in such small blocks: allow 1 MiB", **facts)
    if receive is not None and receive < MAX_INFLIGHT:
        advice = f"transfers are slow with so few on their way: allow {MAX_INFLIGHT} (mosquitto: max_inflight_messages)"
        return warning("broker.limits", found, advice, **facts)
    return ok("broker.limits", found, **facts)


def _tried(probe: BrokerProbe, welcome: Welcome, target: BrokerTarget) -> list[Finding]:
    """Return round trip, large and retained message; without the first, the others can't be tried."""
    if welcome.max_qos < 1:
        return [skipped(check, "not tried: see broker.limits") for check in CHECKS[1:]]
    try:
        seconds = probe.round_trip()
    except BrokerProblem as problem:
        rest = [skipped(check, "not tried: see broker.round-trip") for check in CHECKS[2:]]
        return [_failed(problem, probe.topic, target), *rest]
    found = f"{1000 * seconds:.1f} ms on {probe.topic}, median of five"
    facts = {"round_trip_s": round(seconds, 6), "topic": probe.topic}
    slow = seconds > SLOW_ROUND_TRIP_S
    advice = "the line or the broker is slow; mosquitto needs set_tcp_nodelay true" if slow else ""
    findings = [(warning if slow else ok)("broker.round-trip", found, advice, **facts)]
    try:
        size, took_s = probe.large_message()
        found = f"{size:,} bytes came back whole in {1000 * took_s:.0f} ms"
        findings.append(ok("broker.large", found, bytes=size, seconds=round(took_s, 6)))
    except BrokerProblem as problem:
        advice = "raise the broker's packet limit (mosquitto: max_packet_size, and never message_size_limit)"
        if isinstance(problem, BrokerSilent):
            advice = f"{LINE}, large packets first of all where a tunnel's MTU is too small; or {advice}"
        findings.append(failure("broker.large", str(problem), advice))
        return [*findings, skipped("broker.retained", "not tried: the connection may be gone")]
    return [*findings, _retained(probe, welcome)]


def _failed(problem: BrokerProblem, topic: str, target: BrokerTarget) -> Finding:
    """Rules that only lack the doctor's line do a client no harm; rules for another name do, and so does a bad line."""
    if target.known_as:
        found = f"{problem}; the client id is {target.client!r}, but the broker knows us as {target.known_as}"
        advice = "the certificate's common name, or the user of the password file, must be the client id"
        return failure("broker.round-trip", found, advice, topic=topic)
    parts = topic.split("/")
    pattern = "/".join([*parts[:4], "%u", *parts[5:]])
    rule = f"add to the broker's rules: pattern readwrite {pattern} (see docs/doctor.md)"
    if isinstance(problem, BrokerForbids):
        return warning("broker.round-trip", str(problem), rule, topic=topic)
    if isinstance(problem, BrokerSilent):  # rules may forbid silently too: to hear, or all with MQTT 3.1.1
        return warning("broker.round-trip", str(problem), f"{LINE}; or {rule}", topic=topic)
    # MQTT 3.1.1 has no word for what rules forbid; RabbitMQ then ends the connection
    advice = f"look at the broker's log, and at the line; or {rule}"
    return failure("broker.round-trip", str(problem), advice, topic=topic)


def _retained(probe: BrokerProbe, welcome: Welcome) -> Finding:
    advice = "allow retained messages (mosquitto: retain_available true): rounds and presence are such"
    if not welcome.retains:
        return failure("broker.retained", "the broker announces that it keeps none", advice)
    try:
        probe.retained_message()
    except BrokerProblem as problem:
        return failure("broker.retained", f"a retained message isn't kept: {problem}", advice)
    return ok("broker.retained", "kept, and removed again")
