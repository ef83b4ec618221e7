"""The sender's view of a transfer: when to send which block (``Sending``), and what stands in it (``Bundle``).

An aggregator pushes a first window at once, a client what is small. Then the receiver sets the pace: blocks below
``next_missing + credit`` may travel. An ``Offer`` sent again asks "what do you have?"; the ``Progress`` that answers it
is the truth, and what it doesn't show counts as lost. So every loss and every crash ends in the same question.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from replayfleet.federation.wire.protocol.limits import num_blocks
from replayfleet.federation.wire.protocol.messages import BundlePart, Manifest, Progress
from replayfleet.federation.wire.transport.blob_store import EncodedBlob

STALL_S = 5.0
MAX_STALL_S = 60.0
RESEND_S = 0.5
SLOWEST_STEP_S = 40.0
"""What a block takes at 64 kbit/s, with something else beside it."""
SHARED_RESEND_S = 2.0
"""What one of a thousand receivers lacks goes to all of them again: not more often than so."""
UNHEARD_S = 1.0
LAGGARD_S = 1.0
MAX_SHARED_OFFERS = 4
MAX_RECEIVERS = 4096
"""Of one shared transfer; others ask for what they lack."""


@dataclass(slots=True)
class _Receiver:
    next_missing: int = 0
    num_gaps: int = 0
    credit: int = 256
    advanced_at: float = 0.0
    step_s: float | None = None
    answered: int = 0
    concluded: bool = False
    best: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """What to send now: the offer first, if it is due, then these blocks."""

    offer: bool
    blocks: list[int] = field(default_factory=list)


class Sending:
    """One bundle on its way to one peer, or to all on the shared topic.

    Args:
        num_blocks: of the bundle; 0 if the peer lacks nothing.
        credit: blocks in flight beyond the first that is missing.
        asks: no block travels before the receiver says what it wants: it may let us wait.
        shared: several receivers; the slow ones don't hold up the others, and stragglers ask with ``Want`` later.
        now: seconds on any monotonic clock.
    """

    def __init__(self, num_blocks: int, *, credit: int, now: float, shared: bool = False, asks: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_resent = 0
        self._credit = credit
        self._shared = shared
        self._asks = asks
        self._receivers: dict[str, _Receiver] = {}
        self._cursor = 0
        self._lost: set[int] = set()
        self._sent_at: dict[int, float] = {}
        self._offer_due = True
        self._num_offers = 0
        self._advanced_at = now
        self._offered_at = now
        self._stall_s = STALL_S
        self._is_stalled = False

    def offer_again(self) -> None:
        """Ask every receiver what it has: after a reconnect or a restart."""
        self._offer_due, self._is_stalled = True, False

    def announced(self, now: float) -> None:
        """The aggregator spoke to all, perhaps since it lost what waited for it: offer again what it never answered."""
        if not self._receivers and now - self._offered_at >= UNHEARD_S:
            self._offer_due = True

    def on_progress(self, peer: str, progress: Progress, now: float) -> None:
        """Take a receiver's word on what it has."""
        if peer not in self._receivers and len(self._receivers) >= MAX_RECEIVERS:
            return
        after_s = SHARED_RESEND_S if self._shared else 0.0
        known = self._receivers.get(peer)
        # Its word may be from before our question: all is on its way. A first one that comes at once answers that.
        if self._is_stalled and (known is not None or now - self._offered_at >= UNHEARD_S):
            in_flight_s = math.inf if known is None else SLOWEST_STEP_S
            if known is not None and known.step_s is not None:
                in_flight_s = (self._cursor - known.next_missing) * known.step_s
            after_s = max(after_s, in_flight_s)
        receiver = self._receivers.setdefault(peer, _Receiver(advanced_at=now))
        next_missing = min(progress.next_missing, self.num_blocks)
        gaps = [range(first, min(last, self._cursor - 1) + 1) for first, last in progress.missing]
        num_gaps = sum(map(len, gaps))
        there = (next_missing, -num_gaps)
        changed = there != (receiver.next_missing, -receiver.num_gaps)
        if there > receiver.best if self._shared else changed:  # who goes back and forth sets nobody's pace
            self._advance(receiver, now)
        receiver.best = max(receiver.best, there)
        receiver.next_missing, receiver.num_gaps, receiver.credit = next_missing, num_gaps, max(progress.credit, 1)
        if receiver.answered < self._num_offers - 1:
            receiver.answered = self._num_offers - 1
            top = progress.missing[-1][1] + 2 if progress.missing else next_missing
            self._note_lost([*gaps, range(top, self._cursor)], now, after_s)
        else:
            self._note_lost(gaps, now, SHARED_RESEND_S if self._shared else RESEND_S)
        if not self._shared:
            self._cursor = max(self._cursor, next_missing)
            self._lost = {index for index in self._lost if index >= next_missing}

    def _note_lost(self, gaps: Sequence[range], now: float, after_s: float) -> None:
        """Blocks that a receiver lacks though they were sent so long ago are lost."""
        for gap in gaps:
            self._lost.update(index for index in gap if now - self._sent_at.get(index, now) >= after_s)

    @property
    def advanced_at(self) -> float:
        """When a receiver last said that it has more than before; the beginning, if none did."""
        return self._advanced_at

    def on_verdict(self, peer: str) -> bool:
        """A receiver of a shared transfer is done: it no longer sets the pace. Returns whether this is news."""
        if peer not in self._receivers and len(self._receivers) >= MAX_RECEIVERS:
            return False
        receiver = self._receivers.setdefault(peer, _Receiver())
        news, receiver.concluded = not receiver.concluded, True
        return news

    def step(self, now: float) -> Step:
        """Return what is due; the caller sends all of it."""
        if now - max(self._advanced_at, self._offered_at) >= self._stall_s and not self._ended():
            self._offer_due = self._is_stalled = True
            self._stall_s = min(2 * self._stall_s, MAX_STALL_S)
        offer, self._offer_due = self._offer_due, False
        if offer:
            self._num_offers += 1
            self._offered_at = now
            if self._num_offers > 1:
                return Step(True)  # wait for the answer: it says what to send
        return Step(offer, list(self._take(now)))

    def _take(self, now: float) -> Iterator[int]:
        if self._asks and all(receiver.concluded for receiver in self._receivers.values()):
            return
        floor, credit = self._pace(now)
        limit = min(floor + credit, self.num_blocks)
        resent = sorted(index for index in self._lost if index < limit) if self._lost else []
        self._lost.difference_update(resent)
        fresh = range(self._cursor, max(limit, self._cursor))
        self._cursor = fresh.stop
        for index in (*resent, *fresh):
            self.num_resent += index in self._sent_at
            self._sent_at[index] = now
            yield index

    def _advance(self, receiver: _Receiver, now: float) -> None:
        """Something arrived: the stall timer starts again, longer than the slowest step seen, for slow links."""
        receiver.step_s = min(now - receiver.advanced_at, SLOWEST_STEP_S)
        self._stall_s = min(max(STALL_S, 3 * (now - self._advanced_at)), MAX_STALL_S)
        self._advanced_at = receiver.advanced_at = now

    def _ended(self) -> bool:
        """Shared only: whoever is left asks with ``Want``, so asking all again would only cost the others."""
        known = self._receivers.values()
        done = bool(known) and all(receiver.concluded for receiver in known)
        return self._shared and (done or self._num_offers >= MAX_SHARED_OFFERS)

    def _pace(self, now: float) -> tuple[int, int]:
        """Return what all who set the pace have, and how many blocks beyond may travel."""
        waiting = [receiver for receiver in self._receivers.values() if not receiver.concluded]
        if not waiting:
            return 0, self._credit
        brisk = [receiver for receiver in waiting if not self._shared or now - receiver.advanced_at < LAGGARD_S]
        credit = min([self._credit, *(receiver.credit for receiver in brisk or waiting)])
        if not brisk:
            return max(receiver.next_missing for receiver in waiting), credit
        return min(receiver.next_missing for receiver in brisk), credit


class Bundle:
    """Reads blocks of encoded blobs from their files; holds neither bytes nor open files."""

    def __init__(self, blobs: Sequence[EncodedBlob], block_bytes: int) -> None:
        self.parts = tuple(BundlePart(blob.digest, blob.size_bytes, blob.encoding, blob.base) for blob in blobs)
        self.block_bytes = block_bytes
        self._blobs = tuple(blobs)
        self._ends = list(accumulate(blob.size_bytes for blob in blobs))
        self.size_bytes = self._ends[-1] if self._ends else 0
        self.num_blocks = num_blocks(self.size_bytes, block_bytes)

    def block(self, index: int) -> bytes:
        """Return one block.

        Raises:
            OSError: A blob's file is gone or shorter than it was.
        """
        first = index * self.block_bytes
        last = min(first + self.block_bytes, self.size_bytes)
        pieces = []
        place = bisect.bisect_right(self._ends, first)
        while first < last:
            blob, end = self._blobs[place], self._ends[place]
            size = min(last, end) - first
            if size > 0:
                pieces.append(_read(blob, first - (end - blob.size_bytes), size))
            first += size
            place += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def block_digests(self) -> bytes:
        """Return sha256 of every block, concatenated."""
        return b"".join(hashlib.sha256(self.block(index)).digest() for index in range(self.num_blocks))

    def transfer_id(self, manifest: Manifest) -> str:
        """Return an id that depends on what travels between whom, and on nothing else.

        Round and version stay out of it: if both ends crash and the manifest is made anew, the part file still fits.
        """
        text = hashlib.sha256(f"{manifest.direction}/{manifest.fleet}/{manifest.client_id}/{self.block_bytes}".encode())
        for part in self.parts:
            text.update(f"/{part.digest}.{part.encoding}{part.base}.{part.encoded_bytes}".encode())
        return text.hexdigest()[:32]


def _read(blob: EncodedBlob, offset: int, size: int) -> bytes:
    descriptor = os.open(blob.path, os.O_RDONLY)
    try:
        data = os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise OSError(f"blob {blob.digest[:12]} ends early in {blob.path.name}")
    return data
