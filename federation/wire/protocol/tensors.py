"""Blobs: named arrays as safetensors, lossless compression, and the digest that names them. Knows numpy, not torch.

Compression gathers the first bytes of all 4-byte words, then the second bytes and so on, before zstd: the exponents
of float32 parameters resemble each other, their mantissas don't. A trained task model shrinks to 0.84 of its size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
import zstandard

from replayfleet.federation.errors import UNREADABLE, MalformedMessage
from replayfleet.federation.wire.protocol.limits import MAX_BLOB_BYTES, check
from replayfleet.federation.wire.protocol.messages import Encoding

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_NUMPY_NAMES = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"})
_MAX_HEADER_BYTES = 1 << 20
_MAX_ARRAYS = 8192
_MAX_AXES = 8
_SAMPLE_BYTES = 4 << 20
_WORTHWHILE = 0.97


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def digest(raw: bytes | memoryview) -> str:
    """Return the sha256 of decoded bytes as 64 hexadecimal digits: the blob's id everywhere."""
    return hashlib.sha256(raw).hexdigest()


def encode_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return named arrays as safetensors; equal arrays give equal bytes, whatever their order.

    Raises:
        MalformedMessage: An array's dtype does not travel.
    """
    for name, array in arrays.items():
        if array.dtype.newbyteorder("=").name not in _NUMPY_NAMES:
            raise MalformedMessage(
                f"array {name!r} is {array.dtype}, expected one of {', '.join(sorted(_NUMPY_NAMES))}"
            )
    plain = {name: np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in sorted(arrays)}
    return safetensors.numpy.save(plain)


def decode_arrays(data: bytes, *, max_bytes: int = MAX_BLOB_BYTES) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays, writable and independent of ``data``.

    Args:
        data: safetensors bytes from anywhere.
        max_bytes: refuse more than this before looking.

    Raises:
        MalformedMessage: Too large, not safetensors, a dtype that does not travel, or shapes that don't fit the bytes.
    """
    check(len(data) <= max_bytes, f"tensors of {len(data)} bytes, expected at most {max_bytes}")
    places_of(data, len(data))  # before the library sees the bytes
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"tensors don't decode: {error}") from error


def compress(raw: bytes | memoryview) -> tuple[Encoding, bytes | memoryview]:
    """Return the smallest of the encodings; ``raw`` itself where none helps.

    Larger blobs are judged by 4 MiB from their middle. Less misleads: by 64 KiB, 28 of 70 blobs of a run were judged
    wrongly, by 7 % of their size.
    The same bytes always give the same result, so an interrupted transfer finds its blocks again.
    """
    view = memoryview(raw)
    start = max(0, len(view) - _SAMPLE_BYTES) // 8 * 4
    sample = view[start : start + _SAMPLE_BYTES]
    tried: dict[Encoding, bytes] = {"zstd": _zstd(sample), "shuffle4-zstd": _zstd(_shuffle(sample))}
    best = min(tried, key=lambda name: len(tried[name]))
    if len(tried[best]) > _WORTHWHILE * len(sample):
        return "raw", raw
    if len(sample) < len(view):
        tried[best] = _zstd(view if best == "zstd" else _shuffle(view))
    return (best, tried[best]) if len(tried[best]) < len(view) else ("raw", raw)


def decompress(encoding: str, data: bytes | memoryview, size_bytes: int) -> bytes | memoryview:
    """Return the ``size_bytes`` decoded bytes; never allocates more than that.

    Raises:
        MalformedMessage: An unknown encoding, another size than declared, or damaged bytes.
    """
    if encoding == "raw":
        check(len(data) == size_bytes, f"blob of {len(data)} bytes, declared were {size_bytes}")
        return data
    check(encoding in {"zstd", "shuffle4-zstd"}, f"encoding {encoding[:40]!r} is unknown")
    raw = unfolded(data, size_bytes)
    check(len(raw) == size_bytes, f"compressed blob unfolded to {len(raw)} bytes, declared were {size_bytes}")
    return raw if encoding == "zstd" else _unshuffle(raw)


def unfolded(data: bytes | memoryview, max_bytes: int) -> bytes:
    """Return what a zstd frame holds; never allocates more than ``max_bytes``.

    Raises:
        MalformedMessage: Damaged, larger, or a frame that doesn't say how large.
    """
    try:
        declared = zstandard.frame_content_size(data)
        check(0 <= declared <= max_bytes, f"compressed blob unfolds to {declared} bytes, declared were {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"compressed blob is damaged: {error}") from error


def folded(data: bytes | memoryview) -> bytes:
    """Return the zstd frame that ``unfolded`` takes."""
    return _zstd(data)


def _zstd(data: bytes | memoryview) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))


def _shuffle(data: bytes | memoryview) -> bytes:
    words = len(data) // 4
    planes = np.frombuffer(data, np.uint8, words * 4).reshape(words, 4).T
    return b"".join((planes.tobytes(), data[words * 4 :]))


def _unshuffle(data: bytes) -> bytes:
    words = len(data) // 4
    planes = np.frombuffer(data, np.uint8, words * 4).reshape(4, words).T
    return b"".join((planes.tobytes(), data[words * 4 :]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one array lies in a blob: ``dtype`` as safetensors spells it, its bytes from ``first`` to ``last``."""

    name: str
    dtype: str
    num_axes: int
    first: int
    last: int


def places_of(head: bytes | memoryview, size_bytes: int) -> list[Place]:
    """Return where the arrays of a blob lie, in their order, from its first bytes.

    Args:
        head: safetensors bytes from anywhere, up to the end of their header at least.
        size_bytes: of the whole blob; the arrays must fill it.

    Raises:
        MalformedMessage: No header, a dtype that does not travel, or arrays that don't fill the blob.
    """
    view = memoryview(head)
    check(len(view) >= 8, f"tensors of {len(view)} bytes have no header")
    size = int.from_bytes(view[:8], "little")
    check(size <= min(_MAX_HEADER_BYTES, len(view) - 8, size_bytes - 8), f"tensor header claims {size} bytes")
    try:
        header = msgspec.json.decode(view[8 : 8 + size], type=dict[str, _Entry])
    except UNREADABLE as error:
        raise MalformedMessage(f"tensor header does not decode: {error}") from error
    check(len(header) <= _MAX_ARRAYS, f"{len(header)} tensors, expected at most {_MAX_ARRAYS}")
    end, places = 0, []
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        check(entry.dtype in _ITEM_BYTES, f"tensor {name[:80]!r} is {entry.dtype[:20]!r}, which does not travel")
        check(
            len(entry.shape) <= _MAX_AXES and min(entry.shape, default=0) >= 0, f"tensor {name[:80]!r} has a bad shape"
        )
        first, last = entry.data_offsets
        expected = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
        check(first == end and last - first == expected, f"tensor {name[:80]!r} does not fit its bytes")
        places.append(Place(name, entry.dtype, len(entry.shape), 8 + size + first, 8 + size + last))
        end = last
    check(end == size_bytes - 8 - size, f"tensors end at byte {end}, the data at {size_bytes - 8 - size}")
    return places
