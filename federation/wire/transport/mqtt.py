"""A session with a real broker: connects, reconnects, and keeps what the broker has not acknowledged.

Each attempt is a ``Connection`` of its own; undelivered messages live here and move to the next one. MQTT 5 where the
broker speaks it, else 3.1.1.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from replayfleet.federation.backoff import fleet_backoff
from replayfleet.federation.errors import SettingsError, told
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, TlsSettings
from replayfleet.federation.wire.transport.interfaces import OnMessage, Will
from replayfleet.federation.wire.transport.mqtt_connection import Connection, ConnectionPlan, describe_failure
from replayfleet.federation.wire.transport.refusals import OF_ACCEPTED, PERHAPS_TAKEN

ANSWER_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 2.0
MAX_OUTBOX_BYTES = 256 << 20
MAX_OUTBOX_MESSAGES = 10_000
PACKET_RESERVE_BYTES = 1 << 10
"""Room for topic and headers within the broker's packet limit."""
REFUSAL_SHOWN_S = 60.0
"""What the broker had against us counts for so long after it said so last."""
STEADY_S = 10.0
"""A connection that lived so long wasn't ended by another process that takes our session whenever we have it."""
SHORT_LIVES = 3
OPEN_LIMIT_S = 120.0
"""Looking up a name and shaking hands may take so long where the network is away; beyond it, the thread hangs."""
GUESSED_PACKET_BYTES = 128 << 10
"""Before the broker has spoken: the smallest limit among the common ones (AWS IoT Core)."""

log = logging.getLogger(__name__)


class MqttSession:
    """Implements ``Session`` with a background thread.

    Args:
        url: ``mqtts://host:port``, or ``mqtt://`` on this machine (elsewhere only with ``insecure``).
        client_id: the MQTT client id, unique at the broker.
        on_message: called on a network thread with (topic, payload); it may only enqueue.
        will: published by the broker when we vanish.
        tls: certificates, for ``mqtts://``.
        credentials: user and password.
        keepalive_s: the broker notices a dead link after about twice this.
        session_expiry_s: how long the broker keeps our subscriptions and missed messages, if not ``clean``.
        clean: start with an empty session: right for block traffic, which resumes by itself.
        insecure: allow plaintext to other machines.

    Raises:
        SettingsError: The URL, the TLS files or their combination can't be used.
    """

    def __init__(  # noqa: PLR0913  # a connection has that many independent settings; all but three have defaults
        self,
        url: str,
        client_id: str,
        *,
        on_message: OnMessage,
        will: Will | None = None,
        tls: TlsSettings | None = None,
        credentials: Credentials | None = None,
        keepalive_s: int = 20,
        session_expiry_s: int = 3600,
        clean: bool = True,
        insecure: bool = False,
    ) -> None:
        address = BrokerAddress.parse(url, insecure=insecure)
        tls = tls or TlsSettings()
        if tls.given and not address.encrypted:
            raise SettingsError(f"TLS files are given but {address} is not encrypted; use mqtts://")
        context = tls.context() if address.encrypted else None
        expiry_s = 0 if clean else session_expiry_s
        self._plan = ConnectionPlan(address, client_id, context, credentials, will, keepalive_s, expiry_s)
        self._on_message = on_message
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._topics: dict[str, None] = {}
        self._outbox: deque[tuple[str, bytes, bool, float]] = deque()
        self._unacknowledged: dict[int, tuple[str, bytes, bool, float]] = {}
        self._waiting_bytes = 0
        self._connection: Connection | None = None
        self._connected = False
        self._num_connections = 0
        self._num_dropped = 0
        self._turns = 0
        self._opening_since: float | None = None
        self._state = "not started"
        self._refusal, self._refused_at, self._welcomed_at = "", float("-inf"), float("-inf")
        self._max_packet_bytes = GUESSED_PACKET_BYTES

    def start(self) -> None:
        """Connect in the background; returns at once."""
        if self._thread is None:
            self._stopping.clear()
            self._state = f"connecting to {self._plan.address}"
            self._thread = threading.Thread(target=self._run, name=f"mqtt-{self._plan.client_id}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Flush for at most two seconds, say goodbye, join the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while self._connected and self._num_waiting() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._stopping.set()
        self._wake.set()
        thread.join()
        self._state = "stopped"

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe now and after every reconnect."""
        with self._lock:
            fresh = [topic for topic in topics if topic not in self._topics]
            self._topics.update(dict.fromkeys(topics))
            if self._connection is not None and self._connection.accepted and fresh:
                self._connection.subscribe(fresh)

    def unsubscribe(self, topics: Sequence[str], *, discard: bool = False) -> None:
        """Hear no more of these topics; with ``discard`` connect anew, so that the broker has nothing queued for us."""
        with self._lock:
            ended = [topic for topic in topics if topic in self._topics]
            for topic in ended:
                del self._topics[topic]
            connection = self._connection
            if connection is None or not connection.accepted or not ended:
                return
            if discard:
                connection.renewed = True
                self._wake.set()
            else:
                connection.unsubscribe(ended)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: int = 0) -> None:
        """Queue for sending with QoS 1; kept over reconnects until the broker has it, or it has expired.

        While disconnected, a retained message replaces an earlier one on its topic. The queue is bounded: what does not
        fit is dropped and counted, for everything that matters is acknowledged end to end.

        Raises:
            ValueError: The payload is larger than the broker takes; paho would send it again and again for ever.
        """
        if len(payload) > self.max_payload_bytes:
            takes = max(0, self.max_payload_bytes)
            raise ValueError(f"payload of {len(payload)} bytes on {topic}, the broker takes {takes}")
        with self._lock:
            self._forget_acknowledged()
            if retain and not self._connected:
                self._remove_earlier(topic)
            count = len(self._outbox) + len(self._unacknowledged)
            if self._waiting_bytes + len(payload) > MAX_OUTBOX_BYTES or count >= MAX_OUTBOX_MESSAGES:
                self._drop(topic, f"{count} messages wait already")
                return
            self._waiting_bytes += len(payload)
            over_at = time.monotonic() + expires_s if expires_s else math.inf
            self._outbox.append((topic, payload, retain, over_at))
            if self._connected:
                self._flush()

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def state(self) -> str:
        return self._state

    @property
    def problem(self) -> str:
        return self._refusal if time.monotonic() - self._refused_at < REFUSAL_SHOWN_S else ""

    @property
    def num_connections(self) -> int:
        return self._num_connections

    @property
    def turns(self) -> int:
        """Rises while the session's thread turns, and paho's while there is a connection."""
        since = self._opening_since
        waited_s = 0.0 if since is None else min(time.monotonic() - since, OPEN_LIMIT_S)
        return self._turns + int(waited_s)

    @property
    def num_dropped(self) -> int:
        """Messages that never reached the broker because the outbox was full or they were too large for it."""
        return self._num_dropped

    @property
    def max_payload_bytes(self) -> int:
        return self._max_packet_bytes - PACKET_RESERVE_BYTES

    @property
    def protocol(self) -> str:
        """``5`` or ``3.1.1``: what is spoken, or tried next."""
        return "5" if self._plan.modern else "3.1.1"

    def _run(self) -> None:
        backoff, told, short_lives, fresh = fleet_backoff(), "", 0, False
        while not self._stopping.is_set():
            with self._lock:
                connection = Connection(
                    replace(self._plan, fresh=fresh),
                    lambda: list(self._topics),
                    self._on_message,
                    self._wake,
                    self._tell,
                )
                self._connection = connection
            problem = self._serve(connection)
            fresh = connection.renewed or (fresh and not connection.accepted)
            if connection.renewed:
                continue
            if connection.ready:
                short_lives = short_lives + 1 if time.monotonic() - self._welcomed_at < STEADY_S else 0
                if short_lives >= SHORT_LIVES and not (connection.taken_over or self._stopping.is_set()):
                    problem = problem if connection.explained else PERHAPS_TAKEN
                    self._tell(problem)
            if connection.unsupported:
                log.info("broker speaks no MQTT 5, using 3.1.1 broker=%s", self._plan.address)
            if connection.unsupported or connection.speechless:  # not all that speak 3.1.1 alone say so: RabbitMQ
                self._plan = replace(self._plan, modern=not self._plan.modern)
                if not self._plan.modern:
                    continue
            if connection.ready and short_lives < SHORT_LIVES and not connection.taken_over:
                backoff.reset()
            delay_s = backoff.next_s()
            self._state = f"connecting (attempt {backoff.attempts + 1}, next in {delay_s:.0f} s): {problem}"
            if problem != told and not self._stopping.is_set():
                log.warning("broker not reached broker=%s problem=%s; keeps trying", self._plan.address, problem)
            told = problem
            self._pause(delay_s)

    def _tell(self, refusal: str) -> None:
        """The broker has this against us; called on any of the session's threads."""
        self._refusal, self._refused_at = refusal, time.monotonic()

    def _pause(self, delay_s: float) -> None:
        until = time.monotonic() + delay_s
        while not self._stopping.wait(min(1.0, max(0.0, until - time.monotonic()))) and time.monotonic() < until:
            self._turns += 1

    def _serve(self, connection: Connection) -> str:
        """Connect, and stay until the connection ends; returns why it did."""
        self._opening_since = time.monotonic()
        try:
            connection.open()
        except Exception as error:  # paho's too: a session whose thread has ended would never connect again
            return describe_failure(error, self._plan.address)
        finally:
            self._turns = self.turns + 1
            self._opening_since = None
        try:
            return self._watch(connection)
        except Exception as error:  # as above: for one, no memory for what waits
            log.exception("session failed; connecting anew")
            connection.explained = True
            return told(error)
        finally:
            with self._lock:
                self._connected = False
                self._forget_acknowledged()
                self._outbox.extendleft(reversed(self._unacknowledged.values()))
                self._unacknowledged.clear()
            connection.close()

    def _watch(self, connection: Connection) -> str:
        started, answers = time.monotonic(), 0
        seen = -1
        while not self._stopping.is_set():
            self._wake.wait(0.5)
            self._wake.clear()
            if connection.turns != seen:
                seen = connection.turns
                self._turns += 1
            if connection.renewed:
                return "connecting anew"
            if connection.dead:
                return connection.problem or "network thread ended"
            if connection.ready and not self._connected:
                self._welcome(connection)
            if (answered := connection.num_answers) > answers:  # RabbitMQ takes seconds for a thousand topics
                started, answers = time.monotonic(), answered
            if not connection.ready and time.monotonic() - started > ANSWER_TIMEOUT_S:
                return f"no answer to {'SUBSCRIBE' if connection.accepted else 'CONNECT'} in {ANSWER_TIMEOUT_S:.0f} s"
        return "stopping"

    def _welcome(self, connection: Connection) -> None:
        with self._lock:
            self._max_packet_bytes = connection.max_packet_bytes
            self._connected = True
            self._welcomed_at = time.monotonic()
            if not self._refusal.startswith(OF_ACCEPTED):
                self._refusal = ""
            self._num_connections += 1
            self._state = "connected"
            self._flush()
        log.info(
            "broker connected broker=%s protocol=%s session_kept=%s",
            self._plan.address,
            self.protocol,
            connection.session_kept,
        )

    def _flush(self) -> None:
        """Hand the outbox to the connection; called with the lock held."""
        connection = self._connection
        while self._outbox and connection is not None:
            message = self._outbox.popleft()
            topic, payload, retain, over_at = message
            self._waiting_bytes -= len(payload)
            left_s = over_at - time.monotonic()
            if left_s <= 0:  # the connection was lost, or slow
                continue
            if len(payload) > self.max_payload_bytes:
                self._drop(topic, f"{len(payload)} bytes, the broker takes {self.max_payload_bytes}")
                continue
            expires_s = 0 if left_s == math.inf else math.ceil(left_s)
            number = connection.publish(topic, payload, retain, expires_s)
            if number is None:
                self._num_dropped += 1
            else:
                self._waiting_bytes += len(payload)
                self._unacknowledged[number] = message

    def _forget_acknowledged(self) -> None:
        acknowledged = self._connection.acknowledged if self._connection is not None else deque[int]()
        while acknowledged:
            message = self._unacknowledged.pop(acknowledged.popleft(), None)
            if message is not None:
                self._waiting_bytes -= len(message[1])

    def _remove_earlier(self, topic: str) -> None:
        for message in [message for message in self._outbox if message[0] == topic and message[2]]:
            self._outbox.remove(message)
            self._waiting_bytes -= len(message[1])

    def _drop(self, topic: str, why: str) -> None:
        self._num_dropped += 1
        log.warning("message dropped topic=%s reason=%s dropped=%d", topic, why, self._num_dropped)

    def _num_waiting(self) -> int:
        with self._lock:
            self._forget_acknowledged()
            return len(self._outbox) + len(self._unacknowledged)
