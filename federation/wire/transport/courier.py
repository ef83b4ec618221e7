"""All transfers of one process: takes messages and time, gives messages and events.

It owns no socket, thread or clock. One unfinished bundle per peer is offered until its verdict comes; what arrives is
``Incoming``'s. Topics are parsed once, where a message enters; what leaves goes straight to its connection.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

import msgspec

from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol import topics
from replayfleet.federation.wire.protocol.codec import decode, encode
from replayfleet.federation.wire.protocol.limits import EVERYBODY, MIN_BLOCK_BYTES, check, check_id
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
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.claims import MIN_BYTES, WAIT_S, ClaimStore
from replayfleet.federation.wire.transport.incoming import Incoming, TransferLimits
from replayfleet.federation.wire.transport.interfaces import Concluded, Event, Failed, Links, Received, Seals
from replayfleet.federation.wire.transport.seal import OVERHEAD_BYTES
from replayfleet.federation.wire.transport.sending import Bundle, Sending

BLOCK_BYTES = 256 << 10
PAYLOAD_RESERVE_BYTES = 4 << 10
DEFAULT_CREDIT = 16
"""4 MB in flight: a model of 2.8 MB goes at once, and each end says once what it has."""
COUNTERS = ("bytes_sent", "bytes_received", "blocks_resent", "malformed", "duplicates")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outgoing:
    offer: Offer
    bundle: Bundle
    sending: Sending
    bytes_on_wire: int = 0
    packs: bool = False
    storing: Future[None] | None = None
    began_at: float = 0.0


class FleetCourier:
    """All transfers of one process. Not thread-safe: one thread calls it; it never blocks on the network.

    ``peer`` is the client's id on both sides (a client's own id names its link to the aggregator);
    ``"*"`` is everybody, for offers on the shared topic.

    Args:
        role: which end this is.
        fleet: fleet name; messages of other fleets are dropped.
        links: publish with QoS 1; asked at any moment of any method.
        store: where blobs come from and go to; its spool holds part files and encoded blobs.
        voices: seals what leaves, and opens what others sealed.
        own_id: a client's id; the aggregator has none.
        credit: blocks in flight per transfer, both ways.
        limits: what we are willing to receive.
        claims: a store that peers may reach too; None: everything goes over the links.

    Attributes:
        counters: ``COUNTERS``, since the start.
    """

    def __init__(  # noqa: PLR0913  # the last three have defaults
        self,
        role: Role,
        fleet: str,
        links: Links,
        store: DiskBlobStore,
        voices: Seals,
        *,
        own_id: str | None = None,
        credit: int = DEFAULT_CREDIT,
        limits: TransferLimits | None = None,
        claims: ClaimStore | None = None,
    ) -> None:
        if (own_id is None) != (role == "aggregator"):
            raise ValueError(f"a client needs own_id, the aggregator has none; got {own_id!r} for the {role}")
        if own_id is not None:
            check_id(own_id, "client id")
        self._role = role
        self._fleet = check_id(fleet, "fleet")
        self._own_id = own_id
        self._links = links
        self._store = store
        self._voices = voices
        self._credit = credit
        self._claims = claims
        self._open: dict[str, _Outgoing] = {}
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._followed = ""
        self._incoming = Incoming(
            role, self._answer, self.counters, store, credit=credit, limits=limits or TransferLimits(), claims=claims
        )

    def handle(self, topic: str, payload: bytes, now: float) -> list[Event]:
        """Take one message from the session. Malformed bytes are counted and dropped, never raised."""
        try:
            address = topics.parse_topic(topic)
            self._check_address(address)
            if not payload:
                return []  # a retained message was cleared
            frame = self._voices.open(address, topic, payload, now)
            if frame is None:
                return []
            message = decode(frame)
            _check_origin(address, message)
        except MalformedMessage as error:
            self.counters["malformed"] += 1
            log.warning("message dropped topic=%s bytes=%d error=%s", topic[:200], len(payload), error)
            return []
        self.counters["bytes_received"] += len(payload)
        events = self._dispatch(address.peer, message, now)
        return self._incoming.turns() + events  # who waits comes before whoever offers now

    def follow(self, instance: str) -> None:
        """Name the aggregator's process: its verdicts carry that name, and a client counts those of no other."""
        self._followed = instance
        if self._role == "aggregator":
            self._incoming.instance = instance

    def forget(self, peer: str | None = None, *, for_good: bool = False) -> None:
        """Let go of every transfer, both ways, or of those with one peer.

        Args:
            peer: whose; None: everybody's.
            for_good: of this peer nothing is kept; else what arrived stays for later offers.
        """
        for link in [peer] if peer is not None else list(self._open):
            self.withdraw(link)
        self._incoming.forget(peer, for_good=for_good)

    def withdraw(self, peer: str) -> None:
        """Offer a peer nothing more of what is on its way to it; what it asks of that from now on is ignored."""
        current = self._open.pop(peer, None)
        if current is not None:
            self._unstore(current)

    def take_useless(self) -> Counter[str]:
        """Return how many blocks of each peer belonged to nothing or had come before, since the last call."""
        useless, self._incoming.useless = self._incoming.useless, Counter()
        return useless

    def advanced_at(self, peer: str) -> float:
        """When a peer last said that it received something new of what we send it; minus infinity for never."""
        current = self._open.get(peer)
        return float("-inf") if current is None else current.sending.advanced_at

    def tick(self, now: float) -> list[Event]:
        """Re-send after stalls, report progress, give up on the dead. Call at least every 0.2 s."""
        return self._push_all(now) + self._incoming.tick(now)

    def resume(self, now: float) -> None:
        """The session reconnected, or the peer restarted: offer again all that has no verdict."""
        for current in self._open.values():
            current.sending.offer_again()
        self._push_all(now)
        self._incoming.resume(now)

    def send(  # the last two have defaults
        self,
        peer: str,
        manifest: Manifest,
        presumed_missing: Sequence[str],
        now: float,
        answers: str = "",
        bases: Collection[str] | None = None,
    ) -> str:
        """Offer the manifest with a bundle of the blobs that the peer is presumed to lack; returns the transfer's id.

        Encodes each blob once (cached in the store's spool), pushes a first window at once (a client no more than a
        block, until it is asked) and re-offers after a reconnect until a verdict comes. A newer manifest to the same
        peer replaces an unfinished older one; ``answers`` is the boot of the client that it is made for, ``bases`` the
        digests that the peer is presumed to hold, so that a difference from them will do, or None for a peer that takes
        no packed blobs.

        Raises:
            KeyError: A blob is not in the store.
            ArtefactRejected: A blob is damaged on our own disk.
            MalformedMessage: The offer breaks a limit of the protocol or of the broker.
            OSError: Our disk refuses.
        """
        max_payload = self._links.data.max_payload_bytes
        block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, max_payload - PAYLOAD_RESERVE_BYTES))
        missing = list(dict.fromkeys(presumed_missing))
        blobs = [
            self._store.encoded(digest, None if bases is None else {*bases, *missing[:place]})
            for place, digest in enumerate(missing)
        ]
        bundle = Bundle(blobs, block_bytes)
        transfer_id = bundle.transfer_id(manifest)
        current = self._open.get(peer)
        if current is not None and (current.offer.transfer_id, current.offer.manifest) == (transfer_id, manifest):
            current.offer = msgspec.structs.replace(current.offer, answers=answers)
            current.sending.offer_again()
        else:
            digests = bundle.block_digests()
            claims = self._claims if bundle.size_bytes >= MIN_BYTES else None
            stored = claims is not None and claims.writable
            offer = Offer(self._role, transfer_id, manifest, bundle.parts, block_bytes, digests, answers, stored)
            size = len(encode(offer)) + OVERHEAD_BYTES
            if size > max_payload:
                raise MalformedMessage(f"offer of {size} bytes, the broker takes {max_payload}; nothing was sent")
            # Of a thousand clients the aggregator receives from a few at a time, and what it didn't ask for is lost.
            asks = stored or (self._role == "client" and bundle.num_blocks > 1)
            sending = Sending(bundle.num_blocks, credit=self._credit, now=now, shared=peer == EVERYBODY, asks=asks)
            carried = 0
            if current is not None and current.offer.manifest == manifest:
                carried = current.bytes_on_wire
            storing = (
                claims.put(transfer_id, map(bundle.block, range(bundle.num_blocks))) if claims and stored else None
            )
            if current is not None and not (stored and current.offer.transfer_id == transfer_id):  # in the same place
                self._unstore(current)
            self._open[peer] = _Outgoing(offer, bundle, sending, carried, bases is not None, storing, now)
        self._push(peer, now)
        return transfer_id

    def accept(self, peer: str, offer: Offer, now: float) -> list[Event]:
        """Receive what was ``Offered``: resumes from a part file if there is one; asks for blobs the bundle lacks."""
        return self._incoming.accept(peer, offer, now)

    def refuse(self, peer: str, offer: Offer, reason: str, detail: str, now: float) -> None:
        """Send a negative verdict; blocks that still come are dropped. Repeated, unless the reason is ``busy``."""
        self._incoming.refuse(peer, offer, reason, detail)

    def conclude(
        self,
        peer: str,
        manifest: Manifest,
        transfer_id: str,
        *,
        accepted: bool,
        reason: str = "",
        detail: str = "",
        counts_in: int = -1,
    ) -> None:
        """Send the verdict on what ``Arrived``, after it is durable. Repeated if the peer offers the same again."""
        self._incoming.conclude(
            peer, manifest, transfer_id, accepted=accepted, reason=reason, detail=detail, counts_in=counts_in
        )

    def _check_address(self, address: topics.Address) -> None:
        check(address.fleet == self._fleet, f"message of fleet {address.fleet!r}, expected {self._fleet!r}")
        if self._own_id is not None:
            check(address.peer in {self._own_id, EVERYBODY}, f"message for {address.peer!r} reached {self._own_id!r}")

    def _dispatch(  # noqa: PLR0911  # one for each kind of message
        self, peer: str, message: Message | Block, now: float
    ) -> list[Event]:
        if isinstance(message, (Presence, Report, RolledBack)):
            return [Received(peer, message)] if self._role == "aggregator" else []
        if isinstance(message, Announcement):
            for current in self._open.values() if self._role == "client" else ():
                current.sending.announced(now)
            return [Received(peer, message)]  # an aggregator hears of another one
        if isinstance(message, Block):
            return self._incoming.on_block(peer, message, now)
        if message.sender == self._role:
            return []  # our own words, echoed: both ends subscribe to the control topic
        if isinstance(message, Offer):
            return self._incoming.on_offer(peer, message, now)
        if isinstance(message, Progress):
            return self._on_progress(peer, message, now)
        if isinstance(message, Want):
            return self._on_want(peer, message, now)
        return self._on_verdict(peer, message)

    def _on_progress(self, peer: str, progress: Progress, now: float) -> list[Event]:
        """The receiver says what it has; returns an event if our own disk fails us."""
        link = self._find(peer, progress.transfer_id)
        if link is None:
            return []
        self._open[link].sending.on_progress(peer, progress, now)
        return self._guarded_push(link, now)

    def _on_want(self, peer: str, want: Want, now: float) -> list[Event]:
        """The receiver lacks blobs that the bundle didn't carry: send a bundle of those."""
        current = self._open.get(peer)
        if current is None or current.offer.transfer_id != want.transfer_id:
            return []
        listed = {entry.digest for entry in current.offer.manifest.blobs}
        wanted = [digest for digest in want.digests if digest in listed and self._store.has(digest)]
        try:
            if not wanted:
                raise KeyError("none of the wanted blobs is in the store")
            # Whoever lacks a blob may lack its base too: what goes out now stands alone.
            bases: Collection[str] | None = () if current.packs else None
            self.send(peer, current.offer.manifest, wanted, now, current.offer.answers, bases)
        except (ArtefactRejected, KeyError, MalformedMessage, OSError) as error:
            return self._fail(peer, error)
        return []

    def _on_verdict(self, peer: str, verdict: Verdict) -> list[Event]:
        """The receiver is done; repeated verdicts are ignored."""
        link = self._find(peer, verdict.transfer_id)
        if link is None or (self._role == "client" and verdict.instance != self._followed):
            return []
        current = self._open[link]
        manifest = current.offer.manifest
        if (verdict.round, verdict.version) != (manifest.round, manifest.version):
            return []
        if not verdict.accepted and verdict.reason == Reason.WRONG_DIGEST.value:
            for part in current.bundle.parts:
                self._store.distrust(part.digest)
        if link != EVERYBODY:
            del self._open[link]
            self._unstore(current)
        elif not current.sending.on_verdict(peer):
            return []
        return [Concluded(peer, manifest, verdict, current.bytes_on_wire)]

    def _push_all(self, now: float) -> list[Event]:
        return [event for peer in list(self._open) for event in self._guarded_push(peer, now)]

    def _find(self, peer: str, transfer_id: str) -> str | None:
        """The link that a message of ``peer`` is about: its own, or the shared one."""
        for link in (peer, EVERYBODY):
            current = self._open.get(link)
            if current is not None and current.offer.transfer_id == transfer_id:
                return link
        return None

    def _push(self, peer: str, now: float) -> None:
        """Send what is due."""
        current = self._open[peer]
        if current.storing is not None and not self._stored(current, current.storing, now):
            return
        if self._shared_comes(current):
            return
        transfer_id, bundle, sending = current.offer.transfer_id, current.bundle, current.sending
        resent_before = sending.num_resent
        step = sending.step(now)
        blocks: Iterable[Message | Block] = (Block(transfer_id, index, bundle.block(index)) for index in step.blocks)
        # A client has one link, whomever it offers to; the aggregator has one to each client and one to all.
        own = self._own_id
        topic = topics.topic_of(self._fleet, "down", peer) if own is None else topics.topic_of(self._fleet, "up", own)
        for message in chain([current.offer] if step.offer else [], blocks):
            frame = self._voices.seal(topic, encode(message))
            self.counters["bytes_sent"] += len(frame)
            self._links.data.publish(topic, frame)
            current.bytes_on_wire += len(frame)
        self.counters["blocks_resent"] += sending.num_resent - resent_before

    def _shared_comes(self, current: _Outgoing) -> bool:
        """Whether what all get is being put in the store: who is offered its own first asks for that alone."""
        shared = self._open.get(EVERYBODY)
        if shared is None or shared is current or shared.storing is None:
            return False
        return not {part.digest for part in shared.bundle.parts}.isdisjoint(
            entry.digest for entry in current.offer.manifest.blobs
        )

    def _stored(self, current: _Outgoing, storing: Future[None], now: float) -> bool:
        """Whether the offer can go out: its bundle is in the store, or won't get there soon enough."""
        if not storing.done() and now - current.began_at < WAIT_S:
            return False
        if not storing.done() or storing.exception() is not None:
            claims, late = self._claims, current.offer.transfer_id
            storing.cancel()  # one that still waits for its turn keeps those after it waiting
            if claims is not None:
                storing.add_done_callback(lambda _: claims.drop(late))  # nobody fetches what comes too late
            current.offer = msgspec.structs.replace(current.offer, stored=False)
        current.storing = None
        return True

    def _unstore(self, current: _Outgoing) -> None:
        claims, transfer_id = self._claims, current.offer.transfer_id
        if claims is None or not current.offer.stored:
            return
        if current.storing is None:
            claims.drop(transfer_id)
        else:  # what is still being put there would come after its removal
            current.storing.cancel()
            current.storing.add_done_callback(lambda _: claims.drop(transfer_id))

    def _answer(self, peer: str, message: Message) -> None:
        """Send on the control topic of the link to ``peer``; a client answers shared offers on its own."""
        topic = topics.topic_of(self._fleet, "control", self._own_id or peer)
        frame = self._voices.seal(topic, encode(message))
        try:
            self._links.control.publish(topic, frame)
        except ValueError as error:  # larger than the broker takes; the peer asks again
            log.warning("answer not sent peer=%s error=%s", peer, error)
            return
        self.counters["bytes_sent"] += len(frame)

    def _guarded_push(self, peer: str, now: float) -> list[Event]:
        try:
            self._push(peer, now)
        except (OSError, ValueError) as error:  # our disk, or a broker that now takes less than before
            return self._fail(peer, error)
        return []

    def _fail(self, peer: str, error: Exception) -> list[Event]:
        current = self._open.pop(peer)
        self._unstore(current)
        log.warning("transfer abandoned peer=%s transfer=%s error=%s", peer, current.offer.transfer_id, error)
        return [Failed(peer, current.offer.transfer_id, error)]


def _check_origin(address: topics.Address, message: Message | Block) -> None:
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
