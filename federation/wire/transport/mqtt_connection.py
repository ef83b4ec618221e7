"""One connection to a broker: a paho client, and what its callbacks told us.

The callbacks only note and wake: paho's loop thread dies of an exception while ``is_connected()`` stays true.
Neither paho nor mosquitto sets TCP_NODELAY; without it a small request and its reply take 80 ms instead of one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paho.mqtt.client import (
    MQTT_CLEAN_START_FIRST_ONLY,
    Client,
    ConnectFlags,
    DisconnectFlags,
    MQTTMessage,
)
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from replayfleet.federation.wire.protocol.limits import MAX_BLOCK_BYTES
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials
from replayfleet.federation.wire.transport.interfaces import OnMessage, Will
from replayfleet.federation.wire.transport.refusals import (
    NO_TLS,
    SESSION_TAKEN,
    TAKEN_OVER,
    TOO_LARGE,
    UNSUPPORTED_VERSION,
    certificate_refused,
    closed_unanswered,
    connection_ended,
    entry_refused,
    topic_refused,
)

_OTHER_NAME, _TIMES = frozenset({62, 64}), frozenset({9, 10})
"""OpenSSL's codes: neither the host's name nor its address is in the certificate; it isn't valid yet, or any more."""
CONNECT_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 1.0
WILL_DELAY_S = 5
MAX_INFLIGHT = 20
"""What mosquitto announces as its receive maximum; a broker that announces less gets less."""
TOPICS_AT_ONCE = 64
"""In a packet that asks for topics, so that it fits at any broker whose packets hold a block."""
USUAL_PACKET_BYTES = 1 << 20
"""For brokers that announce no limit: MQTT 3.1.1 can't, MQTT 5 means "none" by it."""
LARGEST_PACKET_BYTES = MAX_BLOCK_BYTES + (64 << 10)
"""A broker that speaks MQTT 5 sends us no more at once: paho would read it whole before anybody looks at it. From one
that does all the same, or speaks 3.1.1, nothing larger is read."""

_KIND_AND_QOS, _PUBLISH_QOS_2 = 0xF6, 0x34
"""Of a packet's first byte."""

C = TypeVar("C", bound=Client)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """What a connection is made of; the same for every attempt but for the protocol version.

    Attributes:
        address: of the broker.
        client_id: the MQTT client id.
        context: for TLS.
        credentials: user and password.
        will: published by the broker when we vanish.
        keepalive_s: of MQTT.
        session_expiry_s: 0 starts clean.
        modern: MQTT 5, else 3.1.1.
        fresh: whatever the broker keeps of an earlier connection is to be forgotten.
    """

    address: BrokerAddress
    client_id: str
    context: ssl.SSLContext | None
    credentials: Credentials | None
    will: Will | None
    keepalive_s: int
    session_expiry_s: int
    modern: bool = True
    fresh: bool = False


class _CountingClient(Client):
    """A paho client whose loop is seen to turn: a thread that lives may still hang."""

    turns = 0

    def loop_misc(self) -> MQTTErrorCode:
        """Called by paho's thread at the end of every turn."""
        self.turns += 1
        return super().loop_misc()

    def heed(self, receive_maximum: int) -> None:
        """Have no more unacknowledged than the broker announced, which may end a connection for it (MQTT 5, 4.9)."""
        self._max_inflight_messages = min(MAX_INFLIGHT, receive_maximum)  # paho's setter takes none once connected

    def _sock_recv(self, bufsize: int) -> bytes:
        """Called for what is left of a packet; one that is too large, or that nobody asked for, ends the connection."""
        # paho would keep it until the broker says more
        if self._in_packet["command"] & _KIND_AND_QOS == _PUBLISH_QOS_2:
            log.warning("message not read reason=it is of QoS 2, which nobody asked for next=connecting anew")
            raise ConnectionError("a message of QoS 2")
        if bufsize > LARGEST_PACKET_BYTES:
            log.warning("packet not read bytes=%d at_most=%d next=connecting anew", bufsize, LARGEST_PACKET_BYTES)
            raise ConnectionError(f"a packet of {bufsize} bytes")
        return super()._sock_recv(bufsize)


class Connection:
    """One attempt to connect and the connection that may come of it.

    Its attributes are written by paho's thread and read by the session's, one word each.

    Args:
        plan: how to connect.
        topics: returns what to subscribe to as soon as the broker accepts us.
        on_message: gets (topic, payload) on paho's thread.
        wake: set whenever there is news.
        tell: gets what the broker has against us, in words, on paho's thread.
    """

    def __init__(
        self,
        plan: ConnectionPlan,
        topics: Callable[[], list[str]],
        on_message: OnMessage,
        wake: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        self.accepted = False
        self.ready = False
        self.ended = False
        self.renewed = False
        self.unsupported = False
        self.session_kept = False
        self.problem = ""
        self.taken_over = self.explained = False
        self.max_packet_bytes = USUAL_PACKET_BYTES
        self.num_answers = 0
        self.acknowledged: deque[int] = deque()
        self._opened = self._refused = False
        self._alert = ""
        self._gone = threading.Event()
        self._asked: set[int | None] = set()
        self._answered: set[int | None] = set()
        self._sent_on: dict[int, str] = {}
        self._forbidden: set[str] = set()
        self._plan = plan
        self._topics = topics
        self._on_message = on_message
        self._wake = wake
        self._tell = tell
        self._client: _CountingClient = self._make_client()

    def open(self) -> None:
        """Connect and start paho's thread; the broker's answer comes later.

        Raises:
            OSError: No connection, or no TLS on it.
        """
        properties: Properties | None = None
        clean_start: bool | int = MQTT_CLEAN_START_FIRST_ONLY
        if self._plan.modern:
            clean_start = self._plan.fresh or self._plan.session_expiry_s == 0
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.MaximumPacketSize = LARGEST_PACKET_BYTES
            if self._plan.session_expiry_s:
                properties.SessionExpiryInterval = self._plan.session_expiry_s
        self._client.connect(
            self._plan.address.host,
            self._plan.address.port,
            self._plan.keepalive_s,
            clean_start=clean_start,  # type: ignore[arg-type]  # paho's annotation forgets bool
            properties=properties,
        )
        try:
            self._client.loop_start()
        except Exception:  # no thread or no descriptor is left: its own would stay until they happen to be collected
            self._client._reset_sockets()
            raise
        self._opened = True

    def close(self) -> None:
        """Say goodbye and join paho's thread; a peer that no longer reads can't hold us up."""
        self._client.disconnect()
        if not self.dead and not self._gone.wait(GOODBYE_TIMEOUT_S):
            sock: Any = self._client.socket()
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def subscribe(self, topics: Sequence[str]) -> None:
        """Ask for more topics; own messages don't come back where the broker can do that."""
        options: Any = SubscribeOptions(qos=1, noLocal=True) if self._plan.modern else 1
        for some in _packets_of(topics):
            _, mid = self._client.subscribe([(topic, options) for topic in some])
            self._asked.add(mid)  # perhaps after its answer, for topics are asked for on several threads

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """End subscriptions."""
        for some in _packets_of(topics):
            self._client.unsubscribe(some)

    def publish(self, topic: str, payload: bytes, retain: bool, expires_s: int) -> int | None:
        """Hand a message to paho; returns its id, which turns up in ``acknowledged``, or None if paho refuses it."""
        properties: Properties | None = None
        if self._plan.modern and expires_s:
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.MessageExpiryInterval = expires_s
        info = self._client.publish(topic, payload, qos=1, retain=retain, properties=properties)
        if info.rc in {MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_NO_CONN}:
            self._sent_on[info.mid] = topic
            return info.mid
        log.warning("message dropped topic=%s error=%s", topic, info.rc.name)
        return None

    @property
    def dead(self) -> bool:
        """Whether it ended, said so or not."""
        thread: threading.Thread | None = getattr(self._client, "_thread", None)
        return self.ended or (thread is not None and not thread.is_alive())

    @property
    def turns(self) -> int:
        """How often paho's loop came round; it does so at least once a second."""
        return self._client.turns

    @property
    def speechless(self) -> bool:
        """Whether the broker took the connection and answered nothing."""
        return self._opened and not (self.accepted or self._refused or self._alert)

    def _make_client(self) -> _CountingClient:
        plan = self._plan
        clean = plan.fresh or plan.session_expiry_s == 0
        client = new_client(
            _CountingClient, plan.client_id, plan.context, plan.credentials, modern=plan.modern, clean=clean
        )
        client.max_inflight_messages_set(MAX_INFLIGHT)
        client.max_queued_messages_set(0)
        if plan.will is not None:
            properties: Properties | None = None
            if plan.modern and plan.session_expiry_s:
                properties = Properties(PacketTypes.WILLMESSAGE)  # type: ignore[no-untyped-call]
                properties.WillDelayInterval = min(WILL_DELAY_S, plan.session_expiry_s)
            client.will_set(plan.will.topic, plan.will.payload, 1, plan.will.retain, properties)
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_disconnect = self._disconnected
        client.on_publish = self._published
        client.on_message = self._received
        if plan.context is not None:
            client.on_log = self._logged  # until the broker accepts us
        return client

    def _connected(
        self, client: Client, _data: Any, flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self.unsupported = self._plan.modern and reason.value == UNSUPPORTED_VERSION
            self.problem = entry_refused(reason.value, str(reason))
            self._refused = True
            if not self.unsupported:
                self._tell(self.problem)
            return
        self.accepted = True
        self.num_answers += 1
        client.on_log = None
        self.session_kept = flags.session_present
        self.max_packet_bytes = int(getattr(properties, "MaximumPacketSize", 0)) or USUAL_PACKET_BYTES
        self._client.heed(int(getattr(properties, "ReceiveMaximum", MAX_INFLIGHT)))
        topics = self._topics()  # after ``accepted`` is set: a topic added meanwhile is asked for here or by its adder
        if topics:
            self.subscribe(topics)
        else:
            self.ready = True
            self._wake.set()

    def _subscribed(
        self, _client: Client, _data: Any, mid: int, reasons: list[ReasonCode], _properties: Properties | None
    ) -> None:
        self.num_answers += 1
        self._answered.add(mid)
        refused = next((reason for reason in reasons if reason.is_failure), None)
        if refused is not None:
            self.problem = topic_refused(refused.value, str(refused), _in_short(self._topics()), to_hear=True)
            self._tell(self.problem)
            self.ended = True
        elif self._asked <= self._answered:
            self.ready = True
        self._wake.set()

    def _disconnected(
        self, _client: Client, _data: Any, flags: DisconnectFlags, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        self.taken_over = self.accepted and reason.value == TAKEN_OVER
        if self.taken_over:
            self.problem = SESSION_TAKEN
            self._tell(self.problem)
        elif not self.problem and self.accepted:
            self.explained = flags.is_disconnect_packet_from_server or reason.value in TOO_LARGE
            self.problem = connection_ended(reason.value, str(reason))
        elif not self.problem:
            self.problem = f"broker: {closed_unanswered(encrypted=self._plan.context is not None)}"
            if self._alert:
                self.problem = self._alert
                self._tell(self._alert)
        self.ended = True
        self._gone.set()
        self._wake.set()

    def _published(
        self, _client: Client, _data: Any, mid: int, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        topic = self._sent_on.pop(mid, "a topic")  # the broker may answer before it is noted
        if reason.is_failure:
            self._forbidden.add(_of_any_client(topic))
            self._tell(topic_refused(reason.value, str(reason), " ".join(sorted(self._forbidden)), to_hear=False))
        self.acknowledged.append(mid)

    def _logged(self, _client: Client, _data: Any, _level: int, text: str) -> None:
        """With TLS 1.3 the broker's no to our certificate comes after the handshake, where paho only logs it."""
        self._alert = self._alert or certificate_refused(text)

    def _received(self, _client: Client, _data: Any, message: MQTTMessage) -> None:
        try:
            self._on_message(message.topic, bytes(message.payload))
        except Exception:  # root of what paho's thread calls, which one bad message must not end
            log.exception("message handler failed bytes=%d", len(message.payload))


def new_client(
    kind: type[C],
    client_id: str,
    context: ssl.SSLContext | None,
    credentials: Credentials | None,
    *,
    modern: bool,
    clean: bool = True,
) -> C:
    """Return a paho client that connects once; with MQTT 5 ``connect`` says whether it starts clean."""
    client = kind(
        CallbackAPIVersion.VERSION2,
        client_id,
        clean_session=None if modern else clean,
        protocol=MQTTProtocolVersion.MQTTv5 if modern else MQTTProtocolVersion.MQTTv311,
        reconnect_on_failure=False,
    )
    client.connect_timeout = CONNECT_TIMEOUT_S
    if context is not None:
        client.tls_set_context(context)
    if credentials is not None:
        client.username_pw_set(credentials.user, credentials.password)
    client.on_socket_open = _without_delay
    return client


def describe_failure(error: Exception, address: BrokerAddress) -> str:
    """Return why no connection came about, so that an operator can act on it."""
    if isinstance(error, (ssl.SSLEOFError, ConnectionResetError)) and address.encrypted:
        return "TLS failure: it closed the connection in the handshake; perhaps it doesn't speak TLS there"
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error)
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused: nothing listens on {address.place}"
    if isinstance(error, socket.gaierror):
        return f"unknown host {address.host!r}"
    if isinstance(error, TimeoutError):
        return f"no answer from {address.place} in {CONNECT_TIMEOUT_S:.0f} s"
    return str(error)


def _tls_failure(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS failure: the broker's certificate is not trusted: {error.verify_message}; {_next(error)}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return NO_TLS
    return certificate_refused(error) or f"TLS failure: {error.reason or error}"


def _next(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return "connect by a name that it has, or give it this one (aggregator enroll ... --host NAME)"
    if error.verify_code in _TIMES:
        return "look at this machine's clock, or give the broker the new one that aggregator renew makes"
    return "name the authority that signed it with --identity or --tls-ca"


def _of_any_client(topic: str) -> str:
    return re.sub("/clients/[^/]+/", "/clients/+/", topic)  # an aggregator's are a thousand


def _in_short(topics: Sequence[str]) -> str:
    """Return a client's topics as they are, for whoever writes its rules, and one for all of an aggregator's."""
    short = {*map(_of_any_client, topics)}
    return " ".join(sorted(short if len(short) < len(topics) else topics))


def _packets_of(topics: Sequence[str]) -> Iterator[list[str]]:
    for begin in range(0, len(topics), TOPICS_AT_ONCE):
        yield list(topics[begin : begin + TOPICS_AT_ONCE])


def _without_delay(_client: Client, _data: Any, sock: Any) -> None:
    """Set TCP_NODELAY on a socket that paho opened."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        log.warning("TCP_NODELAY not set, small messages will be slow error=%s", error)
