"""A broker in memory, for tests and for fleets in one process: MQTT's behaviour, and its faults at will.

It keeps what the protocol relies on (order per topic, retained messages, last wills, sessions that outlive a
connection) and loses, repeats and reorders on request.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replayfleet.federation.wire.transport.interfaces import OnMessage, Will

_MAX_QUEUED = 10_000


@dataclass(slots=True)
class Faults:
    """What goes wrong with messages on their way to a subscriber.

    Attributes:
        rng: decides; seeded by the test.
        drop: probability that a message is lost.
        duplicate: probability that it is delivered twice.
        reorder: topics overtake each other (within one topic the order always holds, as in MQTT).
    """

    rng: random.Random
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False


class MemoryBroker:
    """Delivers at once (``automatic``), or when the test calls ``deliver``."""

    def __init__(
        self, *, automatic: bool = True, max_payload_bytes: int = 1 << 20, faults: Faults | None = None
    ) -> None:
        self.faults = faults
        self.max_payload_bytes = max_payload_bytes
        self.retained: dict[str, bytes] = {}
        self.num_delivered = 0
        self._automatic = automatic
        self._sessions: dict[str, MemorySession] = {}
        self._routes: dict[str, list[MemorySession]] = {}  # topic -> who gets it, until a session or a filter changes
        self._lock = threading.RLock()
        self._waiting: dict[tuple[str, str], deque[bytes]] = {}
        self._turns: deque[tuple[str, str]] = deque()
        self._delivering = False

    def session(
        self, client_id: str, *, on_message: OnMessage, will: Will | None = None, clean: bool = True
    ) -> MemorySession:
        """Return a session that connects when it is started."""
        return MemorySession(self, client_id, on_message, will, clean)

    def deliver(self, limit: int | None = None) -> int:
        """Deliver waiting messages, and those that their handlers publish meanwhile; returns how many."""
        with self._lock:
            if self._delivering:
                return 0
            self._delivering = True
            count = 0
            try:
                while self._turns and (limit is None or count < limit):
                    self._deliver_one()
                    count += 1
            finally:
                self._delivering = False
            return count

    def kill(self, client_id: str) -> None:
        """The client's process dies, or its link breaks: its last will fires. ``start`` connects it again."""
        with self._lock:
            session = self._sessions.get(client_id)
            if session is not None and session.connected:
                self._leave(session, gracefully=False)
        self._pump()

    @property
    def num_waiting(self) -> int:
        """Messages not delivered yet."""
        return len(self._turns)

    def _join(self, session: MemorySession) -> None:
        with self._lock:
            earlier = self._sessions.get(session.client_id)
            if earlier is not None and earlier is not session:
                if earlier.connected:
                    self._leave(earlier, gracefully=False)
                if session.clean:
                    self._forget(session.client_id)
                else:
                    session.filters.update(earlier.filters)
            self._sessions[session.client_id] = session
            self._routes.clear()
            session.joined()
        self._pump()

    def _leave(self, session: MemorySession, *, gracefully: bool) -> None:
        with self._lock:
            session.left()
            self._routes.clear()
            if session.clean:
                self._forget(session.client_id)
            if session.will is not None and not gracefully:
                self._publish(session.will.topic, session.will.payload, retain=session.will.retain)

    def _subscribed(self, session: MemorySession, topics: Sequence[str]) -> None:
        with self._lock:
            self._routes.clear()
            for topic, payload in self.retained.items():
                if any(matches(pattern, topic) for pattern in topics):
                    self._enqueue(session.client_id, topic, payload)
        self._pump()

    def _publish(self, topic: str, payload: bytes, *, retain: bool, expires: bool = False) -> None:
        with self._lock:
            if retain and payload:
                self.retained[topic] = payload
            elif retain:
                self.retained.pop(topic, None)
            if topic not in self._routes:
                every = self._sessions.values()
                self._routes[topic] = [one for one in every if any(matches(pattern, topic) for pattern in one.filters)]
            for session in self._routes[topic]:
                if expires and not session.connected:
                    continue  # no clock: who is away is away for long
                self._enqueue(session.client_id, topic, payload)
        self._pump()

    def _enqueue(self, client_id: str, topic: str, payload: bytes) -> None:
        times = 1
        if self.faults is not None:
            if self.faults.rng.random() < self.faults.drop:
                return
            times += self.faults.rng.random() < self.faults.duplicate
        if len(self._turns) >= _MAX_QUEUED:
            return  # a real broker drops silently too when a queue is full
        for _ in range(times):
            self._waiting.setdefault((client_id, topic), deque()).append(payload)
            self._turns.append((client_id, topic))

    def _deliver_one(self) -> None:
        turn = 0
        if self.faults is not None and self.faults.reorder:
            turn = self.faults.rng.randrange(len(self._turns))
        key = self._turns[turn]
        del self._turns[turn]
        queue = self._waiting[key]
        payload = queue.popleft()
        if not queue:
            del self._waiting[key]
        session = self._sessions.get(key[0])
        if session is None:
            return
        if session.connected:
            self.num_delivered += 1
            session.on_message(key[1], payload)
        else:
            session.missed.append((key[1], payload))

    def _forget(self, client_id: str) -> None:
        for key in [key for key in self._waiting if key[0] == client_id]:
            del self._waiting[key]
        self._turns = deque(key for key in self._turns if key[0] != client_id)
        session = self._sessions.pop(client_id, None)
        self._routes.clear()
        if session is not None:
            session.missed.clear()

    def _pump(self) -> None:
        if self._automatic:
            self.deliver()


class MemorySession:
    """One connection to a ``MemoryBroker``; made by ``MemoryBroker.session``."""

    def __init__(
        self, broker: MemoryBroker, client_id: str, on_message: OnMessage, will: Will | None, clean: bool
    ) -> None:
        self.client_id = client_id
        self.on_message = on_message
        self.will = will
        self.clean = clean
        self.filters: dict[str, None] = {}
        self.missed: deque[tuple[str, bytes]] = deque(maxlen=_MAX_QUEUED)
        self.problem = ""
        self._broker = broker
        self._topics: dict[str, None] = {}
        self._outbox: deque[tuple[str, bytes, bool]] = deque(maxlen=_MAX_QUEUED)
        self._connected = False
        self._num_connections = 0
        self._turns = 0

    def start(self) -> None:
        """Connect, subscribe again, flush what was published meanwhile."""
        if self._connected:
            return
        self._broker._join(self)
        self.subscribe(tuple(self._topics))
        while self._outbox and self.connected:
            topic, payload, retain = self._outbox.popleft()
            self._broker._publish(topic, payload, retain=retain)

    def stop(self) -> None:
        """Say goodbye: the last will does not fire. Idempotent."""
        if self._connected:
            self._broker._leave(self, gracefully=True)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe now and after every reconnect."""
        self._topics.update(dict.fromkeys(topics))
        if self._connected and topics:
            self.filters.update(dict.fromkeys(topics))
            self._broker._subscribed(self, topics)

    def unsubscribe(self, topics: Sequence[str], *, discard: bool = False) -> None:
        """Hear no more of these topics; with ``discard`` of nothing that waits either."""
        for topic in topics:
            self._topics.pop(topic, None)
            self.filters.pop(topic, None)
        self._broker._routes.clear()
        if discard and self._connected:
            self.stop()
            self.start()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: int = 0) -> None:
        """Publish; while disconnected, queue.

        Raises:
            ValueError: Larger than the broker takes.
        """
        if len(payload) > self.max_payload_bytes:
            raise ValueError(f"payload of {len(payload)} bytes, the broker takes {self.max_payload_bytes}")
        if self._connected:
            self._broker._publish(topic, payload, retain=retain, expires=expires_s > 0)
        else:
            self._outbox.append((topic, payload, retain))

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted us."""
        return self._connected

    @property
    def state(self) -> str:
        """One line for operators."""
        return "connected" if self._connected else "not connected"

    @property
    def num_connections(self) -> int:
        """How often the broker has accepted us."""
        return self._num_connections

    @property
    def turns(self) -> int:
        """Rises with every look: there is no thread that could hang."""
        self._turns += 1
        return self._turns

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload the broker takes."""
        return self._broker.max_payload_bytes

    def joined(self) -> None:
        """Called by the broker: accepted; a kept session gets what it missed."""
        self._connected = True
        self._num_connections += 1
        missed, self.missed = self.missed, deque(maxlen=_MAX_QUEUED)
        for topic, payload in missed:
            self._broker._enqueue(self.client_id, topic, payload)

    def left(self) -> None:
        """Called by the broker: the connection is gone."""
        self._connected = False
        if self.clean:
            self.filters.clear()


def matches(pattern: str, topic: str) -> bool:
    """Whether a subscription with ``+`` and ``#`` covers a topic."""
    wanted, given = pattern.split("/"), topic.split("/")
    for place, level in enumerate(wanted):
        if level == "#":
            return True
        if place >= len(given) or level not in {"+", given[place]}:
            return False
    return len(wanted) == len(given)
