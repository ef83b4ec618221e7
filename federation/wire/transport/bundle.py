"""Blobs end to end, cut into blocks: the sender's view of a transfer."""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate

from replayfleet.federation.wire.protocol.limits import num_blocks
from replayfleet.federation.wire.protocol.messages import BundlePart, Manifest
from replayfleet.federation.wire.transport.blob_store import EncodedBlob


class Bundle:
    """Reads blocks of encoded blobs from their files; holds neither bytes nor open files."""

    def __init__(self, blobs: Sequence[EncodedBlob], block_bytes: int) -> None:
        self.parts = tuple(BundlePart(blob.digest, blob.size_bytes, blob.encoding) for blob in blobs)
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
            text.update(f"/{part.digest}.{part.encoding}.{part.encoded_bytes}".encode())
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
