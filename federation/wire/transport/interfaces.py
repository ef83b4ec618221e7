"""What moves messages, and what a courier tells its service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from replayfleet.federation.wire.protocol.messages import Manifest, Message, Offer, Verdict
from replayfleet.federation.wire.protocol.topics import Address

OnMessage: TypeAlias = Callable[[str, bytes], None]
"""(topic, payload), called on a network thread: it may only enqueue."""


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker says in our name when we vanish without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class Session(Protocol):
    """One connection to a broker; reconnects by itself with back-off and subscribes again."""

    def start(self) -> None:
        """Connect in the background; returns at once. Install handlers before."""

    def stop(self) -> None:
        """Flush, say goodbye, join the thread. Idempotent."""

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe now and after every reconnect."""

    def unsubscribe(self, topics: Sequence[str], *, discard: bool = False) -> None:
        """Hear no more of these topics.

        Args:
            topics: as they were subscribed to.
            discard: connect anew, so that the broker forgets what it has queued for us.
        """

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: int = 0) -> None:
        """Queue for sending with QoS 1.

        Args:
            topic: whose subscribers get it.
            payload: what is said.
            retain: the broker keeps it for who subscribes later.
            expires_s: after so many seconds it isn't sent, nor kept for who is away (MQTT 5); 0: it doesn't expire.

        Raises:
            ValueError: The payload is larger than the broker takes; it is refused here, for paho would loop for ever.
        """

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted us and subscriptions are in place."""

    @property
    def state(self) -> str:
        """One line for operators: ``connected``, ``connecting (attempt 3, next in 4 s): connection refused``."""

    @property
    def problem(self) -> str:
        """What the broker has against us, in words, with what to do: not authorized, session taken over; else empty."""

    @property
    def num_connections(self) -> int:
        """How often the broker has accepted us; when it rises, the service calls ``Courier.resume``."""

    @property
    def turns(self) -> int:
        """Changes within seconds while the session's threads do what they should, waiting for a broker included."""

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload the broker takes; known after the first connection, a safe guess before."""


class Seals(Protocol):
    """Signs what leaves, and says what counts of what comes."""

    def seal(self, topic: str, frame: bytes) -> bytes:
        """Return a frame as it travels on one topic."""

    def open(self, address: Address, topic: str, payload: bytes, now: float) -> bytes | None:
        """Return the frame inside, or None for what is to be passed over.

        Raises:
            MalformedMessage: Nobody whose word is taken here said so.
        """


class Links(Protocol):
    """The two connections of a member of the fleet, so that blocks delay no command."""

    @property
    def control(self) -> Session:
        """Of presence, announcements, progress and verdicts."""

    @property
    def data(self) -> Session:
        """Of offers and blocks."""


class Connect(Protocol):
    """Makes the sessions of a service; they differ in their MQTT client ids."""

    def __call__(self, client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        """Return a session that connects when started."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A peer wants to send; the service decides with ``accept`` or ``refuse``. Nothing was written yet."""

    peer: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class Arrived:
    """All blobs of the manifest are verified and in the store; the service ends it with ``Courier.conclude``."""

    peer: str
    transfer_id: str
    manifest: Manifest
    bytes_on_wire: int


@dataclass(frozen=True, slots=True)
class Concluded:
    """The peer's verdict on what we sent."""

    peer: str
    manifest: Manifest
    verdict: Verdict
    bytes_on_wire: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A transfer ended without a verdict: bytes that don't verify (after retries), or a peer that broke the rules."""

    peer: str
    transfer_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Received:
    """A message that is not part of a transfer: presence, report, announcement."""

    peer: str
    message: Message


Event: TypeAlias = Offered | Arrived | Concluded | Failed | Received
