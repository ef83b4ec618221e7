"""One bundle on its way in: a part file whose blocks are verified one by one.

There is no bitmap on disk: after a crash the block digests of the repeated offer tell which blocks of the part file
are good, so the two can never disagree.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.limits import DIGEST_BYTES, MAX_MISSING_RANGES, check, num_blocks
from replayfleet.federation.wire.protocol.messages import BundlePart, Offer, Progress, Role
from replayfleet.federation.wire.protocol.packed import unpack
from replayfleet.federation.wire.protocol.tensors import decompress, digest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

REPORT_S = 1.0
MAX_REPORT_S = 30.0
MAX_BAD_BLOCKS = 16
_HASH_CHUNK_BYTES = 1 << 20


class Receiving:
    """The receiver's half of one transfer; touches its part file, never a socket or a clock.

    Args:
        offer: checked by the codec; sizes are within the caller's limits.
        part: the part file; its good blocks are kept.
        held: digests that are in the store already; blocks that belong to them alone are not asked for.
        credit: blocks that the sender may have in flight; may change.
        now: seconds on any monotonic clock.

    Raises:
        OSError: The part file can't be made.
    """

    def __init__(self, offer: Offer, part: Path, held: set[str], *, credit: int, now: float) -> None:
        self.offer = offer
        self.part = part
        self.bytes_received = 0
        self.heard_at = self.progressed_at = now
        self.num_bad = 0
        self.slowest_s = 0.0
        self._wanted = [(piece, start) for piece, start in _layout(offer) if piece.digest not in held]
        self._size = sum(piece.encoded_bytes for piece in offer.parts)
        self._num_blocks = num_blocks(self._size, offer.block_bytes)
        self.credit = credit
        self._have = bytearray(self._num_blocks)
        self._next_missing = 0
        self._top = -1
        self._unreported = 0
        self._granted = 0
        self._reported_at = now
        self._report_s = REPORT_S
        self._file = -1
        self._is_blob = len(offer.parts) == 1 and offer.parts[0].encoding == "raw"
        self._hash = hashlib.sha256()  # of the leading blocks, while they are at hand, if the bundle is one blob
        self._num_hashed = 0
        self._skip_unwanted()
        if self.complete:
            self.discard()
        else:
            self._file = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            self._recover()

    @property
    def complete(self) -> bool:
        """Whether every wanted block is verified and in the part file."""
        return self._next_missing == self._num_blocks

    def on_block(self, index: int, payload: bytes | memoryview, now: float) -> bool:
        """Verify and write one block; returns whether it is new. A block that does not verify counts as missing.

        Raises:
            ArtefactRejected: The peer keeps sending blocks that don't verify.
            OSError: The disk refuses.
        """
        self.heard_at = now
        if index >= self._num_blocks or self._have[index]:
            return False
        if len(payload) != self._block_size(index) or not self._matches(index, payload):
            self.num_bad += 1
            if self.num_bad > MAX_BAD_BLOCKS:
                raise ArtefactRejected(Reason.WRONG_DIGEST, f"{self.num_bad} blocks don't match the offer's digests")
            return False
        written = os.pwrite(self._file, payload, index * self.offer.block_bytes)
        if written != len(payload):
            raise OSError(f"disk took {written} of {len(payload)} bytes of block {index}")
        self.bytes_received += len(payload)
        self.slowest_s = max(self.slowest_s, now - self.progressed_at)
        self.progressed_at = now
        self._unreported += 1
        if index == self._num_hashed and self._is_blob:
            self._hash.update(payload)
            self._num_hashed += 1
        self._mark(index)
        return True

    def take_over(self, file: Path, now: float) -> int:
        """Take those blocks of a whole bundle's file that verify and are missing; returns their bytes.

        Raises:
            OSError: The disk refuses.
        """
        before = self.bytes_received
        with contextlib.suppress(FileNotFoundError), file.open("rb") as bundle:
            for index in range(self._num_blocks):
                payload = bundle.read(self._block_size(index))
                if not self._have[index] and len(payload) == self._block_size(index) and self._matches(index, payload):
                    self.on_block(index, payload, now)
        self.heard_at = now
        return self.bytes_received - before

    def report_due(self, now: float) -> bool:
        """Whether the sender should hear from us.

        Every half of the credit, unless it may send all the rest already; each second; ever rarer in silence.
        """
        if self._unreported >= max(1, self.credit // 2) and self._granted < self._num_blocks:
            return True
        return now - self._reported_at >= (REPORT_S if self._unreported else self._report_s)

    def progress(self, sender: Role, now: float) -> Progress:
        """Return the report, and note that it was given."""
        self._report_s = REPORT_S if self._unreported else min(2 * self._report_s, MAX_REPORT_S)
        self._unreported = 0
        self._reported_at = now
        self._granted = self._next_missing + self.credit
        return Progress(sender, self.offer.transfer_id, self._next_missing, tuple(self._gaps()), self.credit)

    def unpack(self, store: DiskBlobStore) -> None:
        """Decode the wanted blobs into the store, durably; then remove the part file. Call when complete.

        A part whose base the store lacks waits in the part file: call again when something arrived.

        Raises:
            MalformedMessage: A part does not decode to its declared size.
            ArtefactRejected: A blob does not have its digest.
            OSError: The disk refuses.
        """
        sizes = {entry.digest: entry.size_bytes for entry in self.offer.manifest.blobs}
        waiting = []
        for piece, start in self._wanted:
            if piece.encoding == "raw" and 0 < piece.encoded_bytes == self._size == sizes[piece.digest]:
                _check_digest(piece.digest, self._hash_file())
                store.adopt(piece.digest, self.part)
                continue
            if piece.base and not store.has(piece.base):
                waiting.append((piece, start))
                continue
            encoded = os.pread(self._file, piece.encoded_bytes, start) if piece.encoded_bytes else b""
            raw = _decoded(piece, encoded, sizes[piece.digest], store)
            _check_digest(piece.digest, digest(raw))
            store.put_verified(piece.digest, raw)
        self._wanted = waiting
        if not waiting:
            self.discard()

    def close(self) -> None:
        """Let go of the part file, which stays for a later attempt. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def discard(self) -> None:
        """Close and remove the part file. Idempotent."""
        self.close()
        self.part.unlink(missing_ok=True)

    def _block_size(self, index: int) -> int:
        return min(self.offer.block_bytes, self._size - index * self.offer.block_bytes)

    def _matches(self, index: int, payload: bytes | memoryview) -> bool:
        expected = self.offer.block_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return hashlib.sha256(payload).digest() == expected

    def _mark(self, index: int) -> None:
        self._have[index] = 1
        self._top = max(self._top, index)
        if index == self._next_missing:
            gap = self._have.find(0, index)
            self._next_missing = self._num_blocks if gap < 0 else gap

    def _skip_unwanted(self) -> None:
        """Mark the blocks that hold no byte of a wanted part."""
        needed = bytearray(self._num_blocks)
        for piece, start in self._wanted:
            if piece.encoded_bytes:
                first, last = (
                    start // self.offer.block_bytes,
                    (start + piece.encoded_bytes - 1) // self.offer.block_bytes,
                )
                needed[first : last + 1] = b"\x01" * (last + 1 - first)
        for index in range(self._num_blocks):
            if not needed[index]:
                self._mark(index)

    def _recover(self) -> None:
        """Keep the blocks of an earlier attempt that verify."""
        leftover = os.fstat(self._file).st_size
        os.ftruncate(self._file, self._size)
        for index in range(num_blocks(min(leftover, self._size), self.offer.block_bytes)):
            size = self._block_size(index)
            if not self._have[index] and self._matches(
                index, os.pread(self._file, size, index * self.offer.block_bytes)
            ):
                self._mark(index)

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Missing ranges below the highest block received."""
        first = self._next_missing
        for _ in range(MAX_MISSING_RANGES):
            if not first < self._top:
                return
            end = self._have.find(1, first)
            yield first, end - 1
            gap = self._have.find(0, end)
            first = self._num_blocks if gap < 0 else gap

    def _hash_file(self) -> str:
        place = self._num_hashed * self.offer.block_bytes
        while chunk := os.pread(self._file, _HASH_CHUNK_BYTES, place):
            self._hash.update(chunk)
            place += len(chunk)
        return self._hash.hexdigest()


def _layout(offer: Offer) -> Iterator[tuple[BundlePart, int]]:
    """Every part with its first byte's place in the bundle."""
    place = 0
    for piece in offer.parts:
        yield piece, place
        place += piece.encoded_bytes


def _decoded(piece: BundlePart, encoded: bytes, size_bytes: int, store: DiskBlobStore) -> bytes | memoryview:
    if piece.encoding != "packed":
        return decompress(piece.encoding, encoded, size_bytes)
    if not piece.base:
        return unpack(encoded, None, size_bytes)
    found_bytes = store.path(piece.base).stat().st_size
    check(found_bytes == size_bytes, f"a difference to {size_bytes} bytes, its base has {found_bytes}")
    return unpack(encoded, store.read(piece.base), size_bytes)


def _check_digest(expected: str, found: str) -> None:
    if found != expected:
        raise ArtefactRejected(Reason.WRONG_DIGEST, f"blob {expected[:12]} arrived as {found[:12]}; it was not stored")
