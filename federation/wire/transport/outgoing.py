"""The sending half of a courier: one unfinished bundle per peer, offered until its verdict comes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.limits import EVERYBODY, MIN_BLOCK_BYTES
from replayfleet.federation.wire.protocol.messages import Block, Manifest, Offer, Progress, Verdict, Want
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.bundle import Bundle
from replayfleet.federation.wire.transport.interfaces import Concluded, Event, Failed
from replayfleet.federation.wire.transport.sending import Sending
from replayfleet.federation.wire.transport.wire import Wire

BLOCK_BYTES = 256 << 10
PAYLOAD_RESERVE_BYTES = 4 << 10

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outgoing:
    offer: Offer
    bundle: Bundle
    sending: Sending
    bytes_on_wire: int = 0


class Outgoing:
    """All bundles that this process sends.

    Args:
        wire: our end of the links.
        store: holds the blobs.
        max_payload_bytes: returns the largest payload that the broker takes, asked anew for each bundle.
        credit: blocks in flight per peer.
    """

    def __init__(self, wire: Wire, store: DiskBlobStore, *, max_payload_bytes: Callable[[], int], credit: int) -> None:
        self._wire = wire
        self._store = store
        self._max_payload_bytes = max_payload_bytes
        self._credit = credit
        self._open: dict[str, _Outgoing] = {}

    def send(self, peer: str, manifest: Manifest, digests: Sequence[str], now: float) -> str:
        """Offer a manifest with a bundle of some of its blobs; see ``Courier.send``.

        Raises:
            KeyError: A blob is not in the store.
            ArtefactRejected: A blob is damaged on our own disk.
            MalformedMessage: The offer breaks a limit of the protocol or of the broker.
            OSError: Our disk refuses.
        """
        max_payload = self._max_payload_bytes()
        block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, max_payload - PAYLOAD_RESERVE_BYTES))
        bundle = Bundle([self._store.encoded(digest) for digest in dict.fromkeys(digests)], block_bytes)
        transfer_id = bundle.transfer_id(manifest)
        current = self._open.get(peer)
        if current is not None and (current.offer.transfer_id, current.offer.manifest) == (transfer_id, manifest):
            current.sending.offer_again()
        else:
            offer = Offer(self._wire.role, transfer_id, manifest, bundle.parts, block_bytes, bundle.block_digests())
            size = len(encode(offer))
            if size > max_payload:
                raise MalformedMessage(f"offer of {size} bytes, the broker takes {max_payload}; nothing was sent")
            sending = Sending(bundle.num_blocks, credit=self._credit, now=now, shared=peer == EVERYBODY)
            carried = 0
            if current is not None and current.offer.manifest == manifest:
                carried = current.bytes_on_wire
            self._open[peer] = _Outgoing(offer, bundle, sending, carried)
        self._push(peer, now)
        return transfer_id

    def on_progress(self, peer: str, progress: Progress, now: float) -> list[Event]:
        """The receiver says what it has; returns an event if our own disk fails us."""
        link = self._find(peer, progress.transfer_id)
        if link is None:
            return []
        self._open[link].sending.on_progress(peer, progress, now)
        return self._guarded_push(link, now)

    def on_want(self, peer: str, want: Want, now: float) -> list[Event]:
        """The receiver lacks blobs that the bundle didn't carry: send a bundle of those."""
        current = self._open.get(peer)
        if current is None or current.offer.transfer_id != want.transfer_id:
            return []
        listed = {entry.digest for entry in current.offer.manifest.blobs}
        wanted = [digest for digest in want.digests if digest in listed and self._store.has(digest)]
        try:
            if not wanted:
                raise KeyError("none of the wanted blobs is in the store")
            self.send(peer, current.offer.manifest, wanted, now)
        except (ArtefactRejected, KeyError, MalformedMessage, OSError) as error:
            return self._fail(peer, error)
        return []

    def on_verdict(self, peer: str, verdict: Verdict) -> list[Event]:
        """The receiver is done; repeated verdicts are ignored."""
        link = self._find(peer, verdict.transfer_id)
        if link is None:
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
        elif not current.sending.on_verdict(peer):
            return []
        return [Concluded(peer, manifest, verdict, current.bytes_on_wire)]

    def tick(self, now: float) -> list[Event]:
        """Send what is due."""
        return [event for peer in list(self._open) for event in self._guarded_push(peer, now)]

    def resume(self, now: float) -> list[Event]:
        """Offer again all that has no verdict."""
        for current in self._open.values():
            current.sending.offer_again()
        return self.tick(now)

    def _find(self, peer: str, transfer_id: str) -> str | None:
        """The link that a message of ``peer`` is about: its own, or the shared one."""
        for link in (peer, EVERYBODY):
            current = self._open.get(link)
            if current is not None and current.offer.transfer_id == transfer_id:
                return link
        return None

    def _push(self, peer: str, now: float) -> None:
        current = self._open[peer]
        resent_before = current.sending.num_resent
        step = current.sending.step(now)
        if step.offer:
            current.bytes_on_wire += self._wire.bulk(peer, current.offer)
        for index in step.blocks:
            block = Block(current.offer.transfer_id, index, current.bundle.block(index))
            current.bytes_on_wire += self._wire.bulk(peer, block)
        self._wire.counters["blocks_resent"] += current.sending.num_resent - resent_before

    def _guarded_push(self, peer: str, now: float) -> list[Event]:
        try:
            self._push(peer, now)
        except (OSError, ValueError) as error:  # our disk, or a broker that now takes less than before
            return self._fail(peer, error)
        return []

    def _fail(self, peer: str, error: Exception) -> list[Event]:
        current = self._open.pop(peer)
        log.warning("transfer abandoned peer=%s transfer=%s error=%s", peer, current.offer.transfer_id, error)
        return [Failed(peer, current.offer.transfer_id, error)]
