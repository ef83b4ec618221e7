"""Offers of blobs, made by hand: what a sender says before its first block."""

from __future__ import annotations

import hashlib

from replayfleet.federation.wire.protocol.messages import BlobEntry, BundlePart, Manifest, Offer

BLOCK_BYTES = 1024


def blob(number: int, size_bytes: int) -> bytes:
    return hashlib.shake_256(bytes([number])).digest(size_bytes)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blocks_of(*blobs: bytes) -> list[bytes]:
    bundle = b"".join(blobs)
    return [bundle[start : start + BLOCK_BYTES] for start in range(0, len(bundle), BLOCK_BYTES)]


def offer_of(*carried: bytes, also: tuple[bytes, ...] = (), transfer: int = 0, version: int = 1) -> Offer:
    """An offer whose bundle carries some blobs, raw; ``also`` are in its manifest alone."""
    entries = tuple(
        BlobEntry(f"blob/{index}", digest_of(data), len(data)) for index, data in enumerate((*carried, *also))
    )
    manifest = Manifest("up", "street", "cam-1", 0, version, entries)
    parts = tuple(BundlePart(digest_of(data), len(data), "raw") for data in carried)
    digests = b"".join(hashlib.sha256(block).digest() for block in blocks_of(*carried))
    return Offer("client", f"{transfer:032x}", manifest, parts, BLOCK_BYTES, digests)
