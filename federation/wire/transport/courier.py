"""All transfers of one process: takes messages and time, gives messages and events.

It owns no socket, thread or clock. ``Outgoing`` and ``Incoming`` are its halves; here messages find their way to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.codec import decode
from replayfleet.federation.wire.protocol.limits import EVERYBODY, check, check_id
from replayfleet.federation.wire.protocol.messages import (
    Announcement,
    Block,
    Manifest,
    Message,
    Offer,
    Presence,
    Progress,
    Report,
    Role,
    RolledBack,
    Verdict,
    Want,
)
from replayfleet.federation.wire.protocol.topics import Address, parse_topic
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.incoming import Incoming
from replayfleet.federation.wire.transport.interfaces import Event, Received, Send
from replayfleet.federation.wire.transport.outgoing import Outgoing
from replayfleet.federation.wire.transport.wire import TransferLimits, Wire

DEFAULT_CREDIT = 8
DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20

log = logging.getLogger(__name__)


class FleetCourier:
    """Implements ``Courier`` over any ``Send``.

    Args:
        role: which end this is.
        fleet: fleet name; messages of other fleets are dropped.
        send: publishes with QoS 1; may be called at any moment of any method.
        store: where blobs come from and go to; its spool holds part files and encoded blobs.
        own_id: a client's id; the aggregator has none.
        max_payload_bytes: what the broker takes, or a function that says so (``lambda: session.max_payload_bytes``).
        credit: blocks in flight per transfer, both ways.
        limits: what we are willing to receive.
    """

    def __init__(  # noqa: PLR0913  # all but four have defaults
        self,
        role: Role,
        fleet: str,
        send: Send,
        store: DiskBlobStore,
        *,
        own_id: str | None = None,
        max_payload_bytes: int | Callable[[], int] = DEFAULT_MAX_PAYLOAD_BYTES,
        credit: int = DEFAULT_CREDIT,
        limits: TransferLimits | None = None,
    ) -> None:
        if (own_id is None) != (role == "aggregator"):
            raise ValueError(f"a client needs own_id, the aggregator has none; got {own_id!r} for the {role}")
        if own_id is not None:
            check_id(own_id, "client id")
        self._wire = Wire(role, check_id(fleet, "fleet"), own_id, send)
        payload = max_payload_bytes if callable(max_payload_bytes) else lambda: max_payload_bytes
        self._outgoing = Outgoing(self._wire, store, max_payload_bytes=payload, credit=credit)
        self._incoming = Incoming(self._wire, store, credit=credit, limits=limits or TransferLimits())

    def handle(self, topic: str, payload: bytes, now: float) -> list[Event]:
        """Take one message from the session. Malformed bytes are counted and dropped, never raised."""
        try:
            address = parse_topic(topic)
            check(
                address.fleet == self._wire.fleet, f"message of fleet {address.fleet!r}, expected {self._wire.fleet!r}"
            )
            if not payload:
                return []  # a retained message was cleared
            message = decode(payload)
            self._check_origin(address, message)
        except MalformedMessage as error:
            self._wire.counters["malformed"] += 1
            log.warning("message dropped topic=%s bytes=%d error=%s", topic[:200], len(payload), error)
            return []
        self._wire.counters["bytes_received"] += len(payload)
        return self._dispatch(address.peer, message, now)

    def tick(self, now: float) -> list[Event]:
        """Re-send after stalls, report progress, give up on the dead. Call at least every 0.2 s."""
        return self._outgoing.tick(now) + self._incoming.tick(now)

    def send(self, peer: str, manifest: Manifest, presumed_missing: Sequence[str], now: float) -> str:
        """Offer the manifest with a bundle of the blobs ``presumed_missing``; returns the transfer id.

        Raises:
            KeyError: A blob is not in the store.
            ArtefactRejected: A blob is damaged on our own disk.
            MalformedMessage: The offer breaks a limit of the protocol or of the broker.
        """
        return self._outgoing.send(peer, manifest, presumed_missing, now)

    def accept(self, peer: str, offer: Offer, now: float) -> list[Event]:
        """Receive what was ``Offered``: resumes from a part file if there is one; asks for blobs the bundle lacks."""
        return self._incoming.accept(peer, offer, now)

    def refuse(self, peer: str, offer: Offer, reason: str, detail: str, now: float) -> None:
        """Send a negative verdict; blocks that still come are dropped. Repeated, unless the reason is ``busy``."""
        self._incoming.refuse(peer, offer, reason, detail)

    def conclude(
        self, peer: str, manifest: Manifest, transfer_id: str, *, accepted: bool, reason: str = "", detail: str = ""
    ) -> None:
        """Send the verdict on what ``Arrived``, after it is durable. Repeated if the peer offers the same again."""
        self._incoming.conclude(peer, manifest, transfer_id, accepted=accepted, reason=reason, detail=detail)

    def resume(self, now: float) -> None:
        """The session reconnected, or the peer restarted: offer again all that has no verdict."""
        self._outgoing.resume(now)
        self._incoming.resume(now)

    @property
    def counters(self) -> Mapping[str, int]:
        """``bytes_sent``, ``bytes_received``, ``blocks_resent``, ``malformed``, ``duplicates``."""
        return self._wire.counters

    def _check_address(self, address: Address) -> None:
        wire = self._wire
        check(address.fleet == wire.fleet, f"message of fleet {address.fleet!r}, expected {wire.fleet!r}")
        if wire.own_id is not None:
            check(address.peer in {wire.own_id, EVERYBODY}, f"message for {address.peer!r} reached {wire.own_id!r}")

    def _check_origin(self, address: Address, message: Message | Block) -> None:
        """A message must stand on a topic of its kind and speak for the client whose topic it is.

        Raises:
            MalformedMessage: It doesn't.
        """
        expected = _CHANNELS[type(message)]
        check(address.channel in expected, f"{type(message).__name__} on a topic that ends in {address.channel!r}")
        if isinstance(message, Offer):
            manifest = message.manifest
            found = (manifest.direction, manifest.fleet, manifest.client_id)
            wanted = (address.channel, address.fleet, address.peer)
            check(found == wanted, f"manifest of (direction, fleet, client) {found} on a topic of {wanted}")
            sender = "client" if address.channel == "up" else "aggregator"
            check(message.sender == sender, f"offer of the {message.sender} on topic {address.channel!r}")
        elif isinstance(message, (Presence, Report, RolledBack)):
            check(message.client_id == address.peer, f"word of {message.client_id!r} on a topic of {address.peer!r}")

    def _dispatch(self, peer: str, message: Message | Block, now: float) -> list[Event]:
        if isinstance(message, (Presence, Report, RolledBack)):
            return [Received(peer, message)] if self._wire.role == "aggregator" else []
        if isinstance(message, Announcement):
            return [Received(peer, message)] if self._wire.role == "client" else []
        if isinstance(message, Block):
            return self._incoming.on_block(peer, message, now)
        if message.sender == self._wire.role:
            return []  # our own words, echoed: both ends subscribe to the control topic
        if isinstance(message, Offer):
            return self._incoming.on_offer(peer, message, now)
        return self._answered(peer, message, now)

    def _answered(self, peer: str, message: Progress | Want | Verdict, now: float) -> list[Event]:
        if isinstance(message, Progress):
            return self._outgoing.on_progress(peer, message, now)
        if isinstance(message, Want):
            return self._outgoing.on_want(peer, message, now)
        return self._outgoing.on_verdict(peer, message)


_DATA = frozenset({"up", "down"})
_CHANNELS: Mapping[type, frozenset[str]] = {
    Block: _DATA,
    Offer: _DATA,
    Progress: frozenset({"control"}),
    Want: frozenset({"control"}),
    Verdict: frozenset({"control"}),
    Report: frozenset({"control"}),
    RolledBack: frozenset({"control"}),
    Presence: frozenset({"state"}),
    Announcement: frozenset({"round"}),
}
