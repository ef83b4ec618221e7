"""The three things that services build on; implementations stand beside this file.

``Session`` moves messages, ``Courier`` moves bundles over sessions, ``BlobStore`` keeps what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from replayfleet.federation.wire.protocol.messages import Manifest, Message, Offer, Verdict

OnMessage: TypeAlias = Callable[[str, bytes], None]
"""(topic, payload), called on a network thread: it may only enqueue."""

Send: TypeAlias = Callable[[str, bytes], None]
"""(topic, payload): publish with QoS 1."""


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

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue for sending with QoS 1.

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
    def num_connections(self) -> int:
        """How often the broker has accepted us; when it rises, the service calls ``Courier.resume``."""

    @property
    def turns(self) -> int:
        """Changes within seconds while the session's threads do what they should, waiting for a broker included."""

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload the broker takes; known after the first connection, a safe guess before."""


class Connect(Protocol):
    """Makes the sessions of a service; they differ in their MQTT client ids."""

    def __call__(self, client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        """Return a session that connects when started."""


class BlobStore(Protocol):
    """Content-addressed files: ``<root>/<first two hex digits>/<digest>``, written atomically, fsynced."""

    def has(self, digest: str) -> bool:
        """Whether the blob is there, complete and verified."""

    def put(self, data: bytes) -> str:
        """Store decoded bytes durably; returns their digest. Idempotent."""

    def read(self, digest: str) -> bytes:
        """Return the bytes, verified again.

        Raises:
            KeyError: Not there.
            ArtefactRejected: The file was damaged; it is removed, so it will be fetched again.
        """

    def path(self, digest: str) -> Path:
        """Where the blob lies (or would)."""

    def collect(self, keep: set[str]) -> int:
        """Delete every blob not in ``keep``; returns how many."""


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


class Courier(Protocol):
    """All transfers of one process. Not thread-safe: one thread calls it; it never blocks on the network.

    ``peer`` is the client's id on both sides (a client's own id names its link to the aggregator);
    ``"*"`` is everybody, for offers on the shared topic.
    """

    def handle(self, topic: str, payload: bytes, now: float) -> list[Event]:
        """Take one message from the session. Malformed bytes are counted and dropped, never raised."""

    def tick(self, now: float) -> list[Event]:
        """Re-send after stalls, report progress, give up on the dead. Call at least every 0.2 s."""

    def send(self, peer: str, manifest: Manifest, presumed_missing: Sequence[str], now: float) -> str:
        """Offer the manifest with a bundle of the blobs ``presumed_missing`` (digests, read from the store).

        Encodes each blob once (cached in the store's spool), pushes the first window at once, and re-offers after a
        reconnect until a verdict comes. A newer manifest to the same peer replaces an unfinished older one.
        Returns the transfer id.
        """

    def accept(self, peer: str, offer: Offer, now: float) -> list[Event]:
        """Receive what was ``Offered``: resumes from a part file if there is one; asks for blobs the bundle lacks."""

    def refuse(self, peer: str, offer: Offer, reason: str, detail: str, now: float) -> None:
        """Send a negative verdict; blocks that still come are dropped."""

    def conclude(
        self, peer: str, manifest: Manifest, transfer_id: str, *, accepted: bool, reason: str = "", detail: str = ""
    ) -> None:
        """Send the verdict on what ``Arrived``, after it is durable. Repeated if the peer offers the same again."""

    def resume(self, now: float) -> None:
        """The session reconnected, or the peer restarted: offer again all that has no verdict."""

    @property
    def counters(self) -> Mapping[str, int]:
        """``bytes_sent``, ``bytes_received``, ``blocks_resent``, ``malformed``, ``duplicates``."""
