"""Asks a broker what it allows, and tries it: its announcement, a round trip, a large and a retained message.

A connection of its own, beside ``MqttSession``, for that one hides what it need not know.
"""

from __future__ import annotations

import os
import queue
import ssl
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials
from replayfleet.federation.wire.transport.courier import BLOCK_BYTES, PAYLOAD_RESERVE_BYTES
from replayfleet.federation.wire.transport.mqtt_connection import (
    CONNECT_TIMEOUT_S,
    USUAL_PACKET_BYTES,
    describe_failure,
    new_client,
)
from replayfleet.federation.wire.transport.refusals import (
    UNSAID,
    UNSUPPORTED_VERSION,
    certificate_refused,
    closed_unanswered,
    entry_refused,
)

ANSWER_S = 5.0
LARGE_ANSWER_S = 75.0
"""A block to the broker and back at 64 kbit/s, over which transfers go too."""
NUM_ROUND_TRIPS = 5
_PROPERTY_RESERVE_BYTES = 1 << 10
"""Room for topic and headers within the broker's packet limit, as a session leaves it."""


class BrokerProblem(ReplayfleetError):
    """The broker can't be used for something; says what."""


class BrokerSilent(BrokerProblem):
    """Nothing came back in time: the line may be as much to blame as the broker."""


class BrokerForbids(BrokerProblem):
    """Its access rules know nobody of this name who may."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a broker said when it accepted us.

    Attributes:
        protocol: ``5`` or ``3.1.1``.
        connect_s: from opening the connection to the broker's yes.
        max_packet_bytes: the largest packet it takes; None: it announces none.
        receive_maximum: messages that it takes unacknowledged; None: it announces none, and MQTT's 65,535 holds.
        retains: whether it keeps retained messages.
        max_qos: the highest quality of service.
        certificate_ends_at: Unix time at which the broker's certificate expires; None without TLS.
    """

    protocol: Literal["5", "3.1.1"]
    connect_s: float
    max_packet_bytes: int | None = None
    receive_maximum: int | None = None
    retains: bool = True
    max_qos: int = 2
    certificate_ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    kind: Literal["connected", "subscribed", "published", "gone"]
    reason: str = ""
    code: int = 0
    properties: Properties | None = None


_Item: TypeAlias = "_Event | MQTTMessage"


@dataclass(slots=True)
class BrokerProbe:
    """One connection to a broker. Use as a context manager; ``connect`` first.

    Attributes:
        address: of the broker.
        client_id: the MQTT client id; no other connection may use it.
        topic: own topic, on which nobody else listens.
        context: for TLS.
        credentials: user and password.
    """

    address: BrokerAddress
    client_id: str
    topic: str
    context: ssl.SSLContext | None = None
    credentials: Credentials | None = None
    _client: Client | None = None
    _inbox: queue.Queue[_Item] = field(default_factory=queue.Queue)
    _early: list[MQTTMessage] = field(default_factory=list)
    _welcome: Welcome | None = None
    _alert: str = ""

    def __enter__(self) -> BrokerProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.disconnect()
            client.loop_stop()

    def connect(self) -> Welcome:
        """Connect with MQTT 5, else 3.1.1, and return what the broker announces.

        Raises:
            BrokerProblem: It can't be reached, or refuses.
        """
        for modern in (True, False):
            began = time.monotonic()
            client = self._open(modern)
            event = self._next_event("connected", CONNECT_TIMEOUT_S)
            if modern and event.kind == "gone" and not self._alert:  # an old broker may close instead of refusing
                self.close()
                continue
            if modern and event.code == UNSUPPORTED_VERSION:
                self.close()
                continue
            if event.kind == "gone":
                raise BrokerProblem(self._alert or closed_unanswered(encrypted=self.context is not None))
            if event.reason:
                raise BrokerProblem(entry_refused(event.code, event.reason))
            self._welcome = _welcome(client, event.properties, time.monotonic() - began, modern=modern)
            return self._welcome
        raise BrokerProblem("it speaks neither MQTT 5 nor 3.1.1")

    def round_trip(self) -> float:
        """Return the median seconds from publishing a small message to getting it back.

        Raises:
            BrokerProblem: The broker's rules forbid it, or it gets lost.
        """
        self._subscribe()
        return statistics.median(self._echo(os.urandom(32)) for _ in range(NUM_ROUND_TRIPS))

    def large_message(self) -> tuple[int, float]:
        """Send what a transfer sends, a block of model parameters, and return its bytes and the seconds that it took.

        Raises:
            BrokerProblem: It gets lost or damaged; the broker takes less than it announces.
        """
        announced = (self._welcome.max_packet_bytes if self._welcome else None) or USUAL_PACKET_BYTES
        taken = max(announced - _PROPERTY_RESERVE_BYTES, announced // 2)
        size = min(BLOCK_BYTES + PAYLOAD_RESERVE_BYTES, taken)
        try:
            return size, self._echo(os.urandom(size), LARGE_ANSWER_S)
        except BrokerProblem as problem:
            raise type(problem)(f"a message of {size} bytes doesn't come back: {problem}") from problem

    def retained_message(self) -> None:
        """Publish a retained message, ask for it again, and remove it.

        Raises:
            BrokerProblem: The broker doesn't keep it.
        """
        payload = os.urandom(32)
        try:
            self._publish(payload, retain=True)
            self._message(payload)
            if self._client is not None:  # rumqttd sends what it retains to a new subscription alone
                self._client.unsubscribe(self.topic)
            self._subscribe()
            self._message(payload, retained=True)
        finally:
            if self._client is not None:
                self._client.publish(self.topic, b"", qos=1, retain=True).wait_for_publish(ANSWER_S)

    def _open(self, modern: bool) -> Client:
        client = new_client(Client, self.client_id, self.context, self.credentials, modern=modern)
        inbox: queue.Queue[_Item] = queue.Queue()
        self._inbox = inbox
        client.on_connect = lambda _c, _d, _f, reason, properties: inbox.put(_event("connected", reason, properties))
        client.on_subscribe = lambda _c, _d, _mid, reasons, _p: inbox.put(_event("subscribed", reasons[0]))
        client.on_publish = lambda _c, _d, _mid, reason, _p: inbox.put(_event("published", reason))
        client.on_disconnect = lambda _c, _d, _f, reason, _p: inbox.put(_Event("gone", _ending(reason)))
        client.on_message = lambda _c, _d, message: inbox.put(message)
        client.on_log = lambda _c, _d, _level, text: self._logged(text)
        try:
            client.connect(self.address.host, self.address.port)
        except (OSError, ValueError) as error:
            raise BrokerProblem(describe_failure(error, self.address)) from error
        client.loop_start()
        self._client = client
        return client

    def _logged(self, text: str) -> None:
        self._alert = self._alert or certificate_refused(text)

    def _subscribe(self) -> None:
        if self._client is None:
            raise BrokerProblem("there is no connection")
        self._client.subscribe(self.topic, qos=1)
        event = self._next_event("subscribed", ANSWER_S)
        if event.kind == "gone":
            raise BrokerProblem(f"it ended the connection: {event.reason}")
        if event.reason:
            raise BrokerForbids(f"its access rules refuse a subscription to {self.topic}: {event.reason}")

    def _echo(self, payload: bytes, patience_s: float = ANSWER_S) -> float:
        began = time.monotonic()
        self._publish(payload)
        self._message(payload, patience_s=patience_s)
        return time.monotonic() - began

    def _publish(self, payload: bytes, *, retain: bool = False) -> None:
        if self._client is None:
            raise BrokerProblem("there is no connection")
        self._client.publish(self.topic, payload, qos=1, retain=retain)

    def _message(self, payload: bytes, *, retained: bool = False, patience_s: float = ANSWER_S) -> None:
        """Wait for a message of that payload; what is delivered twice is skipped where a retained one is expected."""
        deadline = time.monotonic() + patience_s
        while True:
            item = self._early.pop(0) if self._early else self._next(deadline)
            if isinstance(item, MQTTMessage):
                if item.payload == payload and item.retain == retained:
                    return
            elif item.kind == "gone":
                raise BrokerProblem(f"it ended the connection: {item.reason}")
            elif item.kind == "published" and item.reason:
                raise BrokerForbids(f"its access rules refuse a message on {self.topic}: {item.reason}")

    def _next_event(self, kind: str, timeout_s: float) -> _Event:
        deadline = time.monotonic() + timeout_s
        while True:
            item = self._next(deadline)
            if isinstance(item, MQTTMessage):
                self._early.append(item)  # a broker may send what it retained before it confirms the subscription
            elif item.kind in {kind, "gone"}:
                return item

    def _next(self, deadline: float) -> _Item:
        try:
            return self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BrokerSilent("no answer in time") from None


def _ending(reason: ReasonCode) -> str:
    return "without a word" if reason.value == UNSAID else str(reason)


def _event(kind: Any, reason: ReasonCode, properties: Properties | None = None) -> _Event:
    return _Event(kind, str(reason) if reason.is_failure else "", reason.value, properties)


def _welcome(client: Client, properties: Properties | None, connect_s: float, *, modern: bool) -> Welcome:
    sock: Any = client.socket()
    ends: float | None = None
    if isinstance(sock, ssl.SSLSocket):
        certificate = sock.getpeercert() or {}
        ends = float(ssl.cert_time_to_seconds(str(certificate["notAfter"]))) if "notAfter" in certificate else None
    if not modern:
        return Welcome("3.1.1", connect_s, certificate_ends_at=ends)
    return Welcome(
        "5",
        connect_s,
        max_packet_bytes=getattr(properties, "MaximumPacketSize", None),
        receive_maximum=getattr(properties, "ReceiveMaximum", None),
        retains=bool(getattr(properties, "RetainAvailable", 1)),
        max_qos=int(getattr(properties, "MaximumQoS", 2)),
        certificate_ends_at=ends,
    )
