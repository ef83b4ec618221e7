"""The receiving half of a courier: offers to decide on, bundles on their way in, verdicts to repeat."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from replayfleet.federation.backoff import LONGEST_S
from replayfleet.federation.errors import TRANSIENT, ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.wire.protocol.limits import EVERYBODY, MAX_TEXT
from replayfleet.federation.wire.protocol.messages import Block, Manifest, Message, Offer, Role, Verdict, Want
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.claims import FETCH_S, ClaimStore
from replayfleet.federation.wire.transport.interfaces import Arrived, Event, Failed, Offered
from replayfleet.federation.wire.transport.receiving import Receiving
from replayfleet.federation.wire.transport.sending import SLOWEST_STEP_S

IDLE_S = 5.0
"""A transfer without a new block for so long may have to give its place to another; at 0.5 Mbit/s a block takes 4.2."""
SHARED_GRACE_S = 1.0
SHARED_PATIENCE_S = 3.0
WANT_AGAIN_S = 1.0
MAX_WANT_AGAIN_S = LONGEST_S
MAX_CONCLUDED = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """What one process is willing to receive; checked on the offer, before anything is allocated.

    Attributes:
        max_bundle_bytes: encoded bytes of one bundle.
        max_blob_bytes: decoded bytes of one blob.
        max_open: transfers being received at a time, one of each peer; others wait for their turn.
        max_waiting: peers whose offers wait; more are refused as busy.
        max_window_bytes: about as much may be on its way to us from all peers together, beside a block of each: what
            comes faster than it is dealt with waits in the inbox, which has room for four times this.
        give_up_s: a transfer from which nothing is heard for so long is dropped; its part file stays.
    """

    max_bundle_bytes: int = 256 << 20
    max_blob_bytes: int = 256 << 20
    max_open: int = 64
    max_waiting: int = 16_384
    max_window_bytes: int = 16 << 20
    give_up_s: float = 600.0


@dataclass(slots=True)
class _Pending:
    """An offer that the service has not decided on, and the blocks of its first window."""

    offer: Offer
    blocks: dict[int, bytes | memoryview] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    offer: Offer
    receiving: Receiving
    bytes_on_wire: int = 0
    unpacked: bool = False
    arrived: bool = False
    want_at: float | None = None
    want_again_s: float = WANT_AGAIN_S
    fetching: Future[None] | None = None
    fetched_by: float = 0.0


class Incoming:
    """All bundles that this process receives.

    Args:
        role: which end this is.
        answer: sends a message to a peer on its control topic.
        counters: ``duplicates`` is counted here.
        store: gets the blobs; its spool holds the part files.
        credit: blocks that a sender may have in flight, fewer while many send.
        limits: what we are willing to receive.
        claims: where bundles may lie too.

    Attributes:
        useless: blocks of each peer that belong to nothing or came before.
        instance: the aggregator's process, whose word the verdicts are; empty for a client.
    """

    def __init__(
        self,
        role: Role,
        answer: Callable[[str, Message], None],
        counters: Counter[str],
        store: DiskBlobStore,
        *,
        credit: int,
        limits: TransferLimits,
        claims: ClaimStore | None = None,
    ) -> None:
        self._claims = claims
        self.instance = ""
        self.useless: Counter[str] = Counter()
        self._role = role
        self._answer = answer
        self._counters = counters
        self._store = store
        self._credit = credit
        self._limits = limits
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._fetches: dict[str, Future[None]] = {}
        self._open: dict[str, _Incoming] = {}
        self._waiting: OrderedDict[str, Offer] = OrderedDict()
        self._concluded: OrderedDict[tuple[str, str, int, int], Verdict] = OrderedDict()

    def on_offer(self, peer: str, offer: Offer, now: float) -> list[Event]:
        """Answer what is known; hand what is new to the service."""
        known = self._concluded.get(_key(peer, offer.manifest, offer.transfer_id))
        if known is not None:
            self._counters["duplicates"] += 1
            self._answer(peer, known)
            return []
        current = self._open.get(peer)
        if current is not None and current.offer.manifest == offer.manifest:
            if current.offer.transfer_id == offer.transfer_id:
                self._counters["duplicates"] += 1
                self._report(peer, current, now)
                return []
            if not self._beyond_limits(peer, offer):
                return self._replace_bundle(peer, current, offer, now)
            return []
        if self._waiting.get(peer) == offer or self._beyond_limits(peer, offer):
            return []
        pending = self._pending.get(peer)
        if pending is None or pending.offer != offer:
            self._pending[peer] = _Pending(offer)
            while len(self._pending) > self._limits.max_open:
                self._pending.popitem(last=False)
        return [Offered(peer, offer)]

    def on_block(self, peer: str, block: Block, now: float) -> list[Event]:
        """Take one block; those that belong to nothing are dropped."""
        current = self._open.get(peer)
        if current is None or current.offer.transfer_id != block.transfer_id:
            pending = self._pending.get(peer)
            if pending is not None and pending.offer.transfer_id == block.transfer_id:
                if len(pending.blocks) < self._credit:
                    pending.blocks[block.index] = block.payload
            else:
                self._counters["duplicates"] += 1
                self.useless[peer] += 1
            return []
        return self._guarded(peer, lambda: self._take(peer, current, block.index, block.payload, now))

    def accept(self, peer: str, offer: Offer, now: float) -> list[Event]:
        """Begin to receive, or go on where an earlier attempt ended; see ``Courier.accept``."""
        pending = self._pending.pop(peer, None)
        current, since = self._open.get(peer), now
        if current is not None:
            if current.offer == offer:
                self._report(peer, current, now)
                return []
            since = current.receiving.progressed_at  # another offer is no progress: nobody holds a place by offers
            self._drop(peer, keep_part=current.offer.transfer_id == offer.transfer_id)
        freed = self._make_room(now)
        if len(self._open) >= self._limits.max_open:
            if len(self._waiting) >= self._limits.max_waiting and peer not in self._waiting:
                self.refuse(
                    peer, offer, Reason.BUSY.value, f"others that wait: {len(self._waiting)}; offer again later"
                )
            else:
                self._waiting[peer] = offer  # a newer offer has the earlier one's turn
            return freed
        self._waiting.pop(peer, None)
        self._remove_parts(peer, but=_part_name(peer, offer))
        early = pending.blocks if pending is not None and pending.offer == offer else {}
        return freed + self._guarded(peer, lambda: self._begin(peer, offer, early, now, since), offer)

    def turns(self) -> list[Event]:
        """Return the offers whose turn has come, for the service to decide on again: its round may have closed."""
        free = max(0, self._limits.max_open - len(self._open))
        return [Offered(peer, self._waiting.pop(peer)) for peer in tuple(islice(self._waiting, free))]

    def refuse(self, peer: str, offer: Offer, reason: str, detail: str) -> None:
        """Send a negative verdict; repeated when the same is offered again, unless the reason may pass."""
        self._pending.pop(peer, None)
        current = self._open.get(peer)
        if current is not None and current.offer.transfer_id == offer.transfer_id:
            self._drop(peer)
        self.conclude(peer, offer.manifest, offer.transfer_id, accepted=False, reason=reason, detail=detail)

    def conclude(
        self,
        peer: str,
        manifest: Manifest,
        transfer_id: str,
        *,
        accepted: bool,
        reason: str,
        detail: str,
        counts_in: int = -1,
    ) -> None:
        """Send a verdict and repeat it whenever the same is offered again."""
        current = self._open.get(peer)
        if current is not None and current.offer.transfer_id == transfer_id:
            self._drop(peer)
        pending = self._pending.get(peer)
        if pending is not None and pending.offer.transfer_id == transfer_id:
            del self._pending[peer]
        self._waiting.pop(peer, None)
        verdict = self._verdict(transfer_id, manifest, accepted, reason, detail, counts_in)
        if reason not in TRANSIENT:
            self._concluded[_key(peer, manifest, transfer_id)] = verdict
            while len(self._concluded) > MAX_CONCLUDED:
                self._concluded.popitem(last=False)
        self._answer(peer, verdict)

    def tick(self, now: float) -> list[Event]:
        """Report progress, repeat wants, drop what is dead."""
        events: list[Event] = []
        for peer, current in list(self._open.items()):
            silent_s = now - current.receiving.heard_at
            stuck_s = now - current.receiving.progressed_at  # what all get may come again and again for somebody else
            if current.arrived or self._open.get(peer) is not current:
                continue
            if current.fetching is not None:
                events += self._guarded(peer, lambda p=peer, c=current: self._fetched(p, c, now))  # type: ignore[misc]
                continue
            if silent_s >= self._limits.give_up_s or (peer == EVERYBODY and stuck_s >= _patience_s(current.receiving)):
                events += self._give_up(peer, current, silent_s, now)
            elif current.unpacked:
                events += self._guarded(peer, lambda p=peer, c=current: self._settle(p, c, now))  # type: ignore[misc]
            elif current.receiving.report_due(now):
                self._report(peer, current, now)
        if self._waiting:
            events += self._make_room(now) + self.turns()
        return events

    def forget(self, only: str | None = None, *, for_good: bool = False) -> None:
        """Let go of every transfer, or of those with one peer and of what they came to; part files stay, or don't."""
        if only is not None:  # what was said of them may not hold any more: the service is asked again
            self._concluded = OrderedDict((key, said) for key, said in self._concluded.items() if key[0] != only)
        for peer in [peer for peer in (*self._pending, *self._open, *self._waiting) if only in {None, peer}]:
            self._pending.pop(peer, None)
            self._waiting.pop(peer, None)
            if peer in self._open:
                self._drop(peer, keep_part=True)
        if for_good and only is not None:
            self._remove_parts(only)

    def resume(self, now: float) -> None:
        """The sender may have forgotten: tell it what we have."""
        for peer, current in self._open.items():
            self._report(peer, current, now)
            if current.want_at is not None:
                current.want_at, current.want_again_s = now, WANT_AGAIN_S  # asked when time passes

    def _begin(
        self, peer: str, offer: Offer, early: dict[int, bytes | memoryview], now: float, since: float
    ) -> list[Event]:
        held = {part.digest for part in offer.parts if self._store.has(part.digest)}
        part = self._store.parts / _part_name(peer, offer)
        receiving = Receiving(offer, part, held, credit=self._credit, now=now)
        receiving.progressed_at = now if peer == EVERYBODY else since
        current = self._open[peer] = _Incoming(offer, receiving)
        if receiving.complete:
            return self._settle(peer, current, now)
        events: list[Event] = []
        for index, payload in early.items():
            events += self._take(peer, current, index, payload, now, quiet=True)
        fetches = self._fetches.get(peer)
        idle = fetches is None or fetches.done()  # who replaces a bundle again and again has one fetched at a time
        if offer.stored and self._claims is not None and self._claims.usable and not receiving.complete and idle:
            size = sum(part.encoded_bytes for part in offer.parts)
            current.fetching = self._claims.fetch(offer.transfer_id, _claimed(receiving), size)
            current.fetched_by = now + FETCH_S
            self._fetches[peer] = current.fetching
        if not receiving.complete:
            self._report(peer, current, now)
        return events

    def _fetched(self, peer: str, current: _Incoming, now: float) -> list[Event]:
        """Take over what came from the store, whatever that is; blocks that don't verify come over the link."""
        fetching, receiving = current.fetching, current.receiving
        if fetching is None or (not fetching.done() and now < current.fetched_by):
            return []
        if not current.unpacked and not receiving.complete:
            current.bytes_on_wire += receiving.take_over(_claimed(receiving), now)
        _let_fetch_go(current)
        if receiving.complete:
            return self._settle(peer, current, now)
        if fetching.done() and not fetching.cancelled() and fetching.exception() is None:
            log.warning(
                "bundle from the store isn't what was offered peer=%s transfer=%s next=over MQTT",
                peer, current.offer.transfer_id,
            )  # fmt: skip
        self._report(peer, current, now)
        return []

    def _replace_bundle(self, peer: str, current: _Incoming, offer: Offer, now: float) -> list[Event]:
        """Another bundle of the manifest that we already accepted: the answer to a ``Want``."""
        if current.arrived:
            return []
        _let_fetch_go(current)
        current.receiving.discard()
        carried = current.bytes_on_wire
        since = current.receiving.progressed_at
        events = self._guarded(peer, lambda: self._begin(peer, offer, {}, now, since), offer)
        if peer in self._open:
            self._open[peer].bytes_on_wire += carried
        return events

    def _take(
        self, peer: str, current: _Incoming, index: int, payload: bytes | memoryview, now: float, *, quiet: bool = False
    ) -> list[Event]:
        receiving = current.receiving
        current.bytes_on_wire += len(payload)
        if current.unpacked or not receiving.on_block(index, payload, now):
            self._counters["duplicates"] += 1
            self.useless[peer] += 1
            return []
        if receiving.complete:
            return self._settle(peer, current, now)
        if not quiet and receiving.report_due(now):
            self._report(peer, current, now)
        return []

    def _settle(self, peer: str, current: _Incoming, now: float) -> list[Event]:
        """The bundle is complete: unpack it, then ask for what it didn't carry, or be done."""
        current.receiving.unpack(self._store)  # what differs from a blob that wasn't here waits, and is tried again
        current.unpacked = True
        entries = current.offer.manifest.blobs
        missing = tuple(dict.fromkeys(entry.digest for entry in entries if not self._store.has(entry.digest)))
        if not missing:
            current.arrived = True
            arrived: list[Event] = [
                Arrived(peer, current.offer.transfer_id, current.offer.manifest, current.bytes_on_wire)
            ]
            return arrived + self._wake_others(peer, now)
        if peer == EVERYBODY:
            self._drop(peer)
            log.info("shared bundle incomplete missing=%d; the next own offer asks for them", len(missing))
            return self._wake_others(peer, now)
        if current.want_at is None:
            hopeful = any(entry.shared for entry in entries if entry.digest in missing)
            current.want_at = now + SHARED_GRACE_S if hopeful else now
        if now >= current.want_at and not self._shared_brings(missing):
            current.want_at = now + current.want_again_s
            current.want_again_s = min(2 * current.want_again_s, MAX_WANT_AGAIN_S)
            self._answer(peer, Want(self._role, current.offer.transfer_id, missing))
        return []

    def _shared_brings(self, missing: tuple[str, ...]) -> bool:
        shared = self._open.get(EVERYBODY)
        if shared is None or shared.arrived:
            return False
        return not {part.digest for part in shared.offer.parts}.isdisjoint(missing)

    def _wake_others(self, finished: str, now: float) -> list[Event]:
        """What arrived for one link may be what another waits for."""
        events: list[Event] = []
        for peer, other in list(self._open.items()):
            if peer != finished and other.unpacked and not other.arrived:
                events += self._settle(peer, other, now)
        return events

    def _beyond_limits(self, peer: str, offer: Offer) -> bool:
        """Refuse what is too large, before anything is allocated."""
        size = sum(part.encoded_bytes for part in offer.parts)
        largest = max((entry.size_bytes for entry in offer.manifest.blobs), default=0)
        limits = self._limits
        if size <= limits.max_bundle_bytes and largest <= limits.max_blob_bytes:
            return False
        detail = (
            f"bundle of {size} bytes with a blob of {largest}, expected at most {limits.max_bundle_bytes} "
            f"and {limits.max_blob_bytes}"
        )
        self.refuse(peer, offer, Reason.TOO_LARGE.value, detail)
        return True

    def _guarded(self, peer: str, act: Callable[[], list[Event]], offer: Offer | None = None) -> list[Event]:
        """Run one step; bytes that don't verify and disks that refuse end the transfer with a verdict."""
        try:
            return act()
        except ArtefactRejected as error:
            return self._fail(peer, offer, error, error.reason)
        except MalformedMessage as error:
            return self._fail(peer, offer, error, Reason.MALFORMED)
        except OSError as error:
            return self._fail(peer, offer, error, Reason.BUSY)

    def _fail(self, peer: str, offer: Offer | None, error: Exception, reason: Reason) -> list[Event]:
        if peer in self._open:
            offer = self._open[peer].offer
            self._drop(peer)
        if offer is None:
            return []
        log.warning("transfer failed peer=%s transfer=%s error=%s", peer, offer.transfer_id, error)
        # Not remembered: damaged bytes and full disks pass, so the same offer may be tried again.
        self._answer(peer, self._verdict(offer.transfer_id, offer.manifest, False, reason.value, str(error)))
        return [Failed(peer, offer.transfer_id, error)]

    def _verdict(
        self, transfer_id: str, manifest: Manifest, accepted: bool, reason: str, detail: str, counts_in: int = -1
    ) -> Verdict:
        reason, detail = reason[:MAX_TEXT], detail[:MAX_TEXT]
        place = (manifest.round, manifest.version)
        return Verdict(self._role, transfer_id, *place, accepted, reason, detail, self.instance, counts_in)

    def _make_room(self, now: float) -> list[Event]:
        """If every place is taken, take back the one that made no progress for longest; it is told to come again."""
        if len(self._open) < self._limits.max_open:
            return []
        idle = {
            peer: now - current.receiving.progressed_at
            for peer, current in self._open.items()
            if not current.arrived and peer != EVERYBODY and current.fetching is None  # which has an end of its own
        }
        loser = max(idle, key=lambda peer: idle[peer], default=None)
        if loser is None or idle[loser] < IDLE_S:
            return []
        offer = self._open[loser].offer
        self._drop(loser, keep_part=True)
        error = TimeoutError(f"no new block for {idle[loser]:.0f} s while others wait; what arrived is kept")
        self._answer(loser, self._verdict(offer.transfer_id, offer.manifest, False, Reason.BUSY.value, str(error)))
        return [Failed(loser, offer.transfer_id, error)]

    def _give_up(self, peer: str, current: _Incoming, silent_s: float, now: float) -> list[Event]:
        current.receiving.close()
        del self._open[peer]
        error = TimeoutError(f"nothing heard for {silent_s:.0f} s; what arrived is kept for the next offer")
        return [Failed(peer, current.offer.transfer_id, error), *self._wake_others(peer, now)]

    def _report(self, peer: str, current: _Incoming, now: float) -> None:
        if current.fetching is not None:
            return  # the sender waits for our word, and sends no block before it
        current.receiving.credit = self._share(current.offer)
        self._answer(peer, current.receiving.progress(self._role, now))

    def _share(self, offer: Offer) -> int:
        """Blocks that each sender may have in flight now."""
        blocks = self._limits.max_window_bytes // (offer.block_bytes * max(1, len(self._open)))
        return max(1, min(self._credit, blocks))

    def _remove_parts(self, peer: str, but: str = "") -> None:
        for part in self._store.parts.glob(f"{_file_stem(peer)}.*.part"):
            if part.name != but:
                part.unlink(missing_ok=True)

    def _drop(self, peer: str, *, keep_part: bool = False) -> None:
        current = self._open.pop(peer)
        _let_fetch_go(current)
        receiving = current.receiving
        receiving.close() if keep_part else receiving.discard()


def _patience_s(shared: Receiving) -> float:
    """How long to wait for the next block that all get: over a slow line it is on its way, and ours comes later."""
    if not shared.bytes_received:
        return SLOWEST_STEP_S
    return min(max(SHARED_PATIENCE_S, 3 * shared.slowest_s), SLOWEST_STEP_S)


def _key(peer: str, manifest: Manifest, transfer_id: str) -> tuple[str, str, int, int]:
    return (peer, transfer_id, manifest.round, manifest.version)


def _file_stem(peer: str) -> str:
    return "+everybody" if peer == EVERYBODY else peer


def _let_fetch_go(current: _Incoming) -> None:
    """Have what is being fetched removed as soon as it is there, for nobody will take it over any more."""
    target, fetching = _claimed(current.receiving), current.fetching
    if fetching is not None:
        current.fetching = None
        fetching.cancel()
        fetching.add_done_callback(lambda _: target.unlink(missing_ok=True))


def _claimed(receiving: Receiving) -> Path:
    return receiving.part.with_suffix(".claim")


def _part_name(peer: str, offer: Offer) -> str:
    return f"{_file_stem(peer)}.{offer.transfer_id}.part"
