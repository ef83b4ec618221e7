"""Blobs: named arrays as safetensors, lossless compression, and the digest that names them. Knows numpy, not torch.

Compression gathers the first bytes of all 4-byte words, then the second bytes and so on, before zstd: the exponents
of float32 parameters resemble each other, their mantissas don't. A trained task model shrinks to 0.84 of its size.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zstandard

from replayfleet.federation.errors import UNREADABLE, MalformedMessage
from replayfleet.federation.wire.protocol.limits import MAX_BLOB_BYTES, check
from replayfleet.federation.wire.protocol.messages import Encoding

_DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "F16": np.dtype("<f2"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""In the order in which safetensors lays arrays out, so that each begins at a multiple of its item's size."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
TORCH_NAMES = {dtype: f"torch.{dtype.name}" for dtype in _NAMES}
"""What torch calls them; asking a NumPy dtype for its name takes longer than all else of a tensor's check."""
_RANKS = {name: rank for rank, name in enumerate(_DTYPES)}
_MAX_HEADER_BYTES = 1 << 20
_KNOWN_HEADER_BYTES = 64 << 10
_MAX_ARRAYS = 8192
_MAX_AXES = 8
_PIECES = 16
_PIECE_BYTES = 16 << 10
_WORTHWHILE = 0.97
_PLANES = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8, write_content_size=True)
"""Bytes sorted by significance shrink by how rare each is, and hardly repeat each other: a table of repeats that stays
in the nearest cache takes little more than half the time, and the fewer chance repeats make them no larger."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_entries = msgspec.json.Decoder(dict[str, _Entry])  # made at import, for threads: children.decoder_of


@dataclass(frozen=True, slots=True)
class Table:
    """Where the arrays of a blob lie, in their order.

    Attributes:
        start: the first byte behind the header.
        places: name -> (dtype, shape, first byte, the byte behind the last), bytes counted from ``start``.
        floats: (dtype, first, behind the last) of what lies there in floating point, neighbours together.
        in_order: names of those arrays if they are of one dtype and side by side, else none; one object for one header.
    """

    start: int
    places: Mapping[str, tuple[np.dtype[Any], tuple[int, ...], int, int]]
    floats: tuple[tuple[np.dtype[Any], int, int], ...]
    in_order: tuple[str, ...]

    def view(self, name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return one array as a view of ``data``, the bytes from ``start`` on as uint8."""
        dtype, shape, first, last = self.places[name]
        return _aligned(data[first:last].view(dtype).reshape(shape))

    def side_by_side(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the arrays of ``in_order`` as one, flat: a view of ``data``."""
        ((dtype, first, last),) = self.floats
        return _aligned(data[first:last].view(dtype))

    def not_finite(self, data: np.ndarray[Any, Any]) -> str | None:
        """Return the name of an array that holds NaN or infinity; None if there is none."""
        if all(bool(np.isfinite(data[first:last].view(dtype)).all()) for dtype, first, last in self.floats):
            return None
        names = (name for name, (dtype, *_) in self.places.items() if dtype.kind == "f")
        return next(name for name in names if not bool(np.isfinite(self.view(name, data)).all()))


def _aligned(view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return view if view.flags.aligned else view.copy()


def digest(raw: bytes | memoryview | mmap.mmap) -> str:
    """Return the sha256 of decoded bytes as 64 hexadecimal digits: the blob's id everywhere."""
    return hashlib.sha256(raw).hexdigest()


def encode_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return named arrays as safetensors; equal arrays give equal bytes, whatever their order.

    Raises:
        MalformedMessage: An array's dtype does not travel.
    """
    for name, array in arrays.items():
        if array.dtype.newbyteorder("<") not in _NAMES:
            known = ", ".join(sorted(dtype.name for dtype in _NAMES))
            raise MalformedMessage(f"array {name!r} is {array.dtype}, expected one of {known}")
    plain = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    ordered = sorted(plain, key=lambda name: (_RANKS[_NAMES[plain[name].dtype]], name.encode()))
    header, place = {}, 0
    for name in ordered:
        array, first = plain[name], place
        place += array.nbytes
        header[name] = _Entry(_NAMES[array.dtype], list(arrays[name].shape), (first, place))
    described = msgspec.json.encode(header)
    described += b" " * (-len(described) % 8)
    # One join: as fast as memory takes it, where the library copies every array twice.
    return b"".join([len(described).to_bytes(8, "little"), described, *(plain[name].data for name in ordered)])


def decode_arrays(data: bytes, *, max_bytes: int = MAX_BLOB_BYTES) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays, writable and independent of ``data``.

    Args:
        data: safetensors bytes from anywhere.
        max_bytes: refuse more than this before looking.

    Raises:
        MalformedMessage: Too large, not safetensors, a dtype that does not travel, or shapes that don't fit the bytes.
    """
    return arrays_in(bytearray(data), max_bytes=max_bytes)


def arrays_in(data: bytearray | mmap.mmap, *, max_bytes: int = MAX_BLOB_BYTES) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays as views of ``data``.

    Raises:
        MalformedMessage: As ``decode_arrays``.
    """
    table = table_of(memoryview(data), max_bytes=max_bytes)
    whole = np.frombuffer(data, np.uint8, offset=table.start)
    return {name: table.view(name, whole) for name in table.places}


def table_of(data: bytes | memoryview, *, max_bytes: int = MAX_BLOB_BYTES) -> Table:
    """Return where the arrays lie; the header of one layout is parsed once.

    Raises:
        MalformedMessage: As ``decode_arrays``.
    """
    check(len(data) <= max_bytes, f"tensors of {len(data)} bytes, expected at most {max_bytes}")
    return _table_in(data, len(data))


def _table_in(head: bytes | memoryview, size_bytes: int) -> Table:
    check(len(head) >= 8, f"tensors of {len(head)} bytes have no header")
    size = int.from_bytes(head[:8], "little")
    check(size <= min(_MAX_HEADER_BYTES, len(head) - 8, size_bytes - 8), f"tensor header claims {size} bytes")
    header = bytes(head[8 : 8 + size])
    table, end = _known_table(header) if size <= _KNOWN_HEADER_BYTES else _parsed(header)
    check(end == size_bytes - 8 - size, f"tensors end at byte {end}, the data at {size_bytes - 8 - size}")
    return table


def compress(raw: bytes | memoryview) -> tuple[Encoding, bytes | memoryview]:
    """Return the smallest of the encodings; ``raw`` itself where none helps.

    Larger blobs are judged by pieces from all over, as much of one place misleads.
    The same bytes always give the same result, so an interrupted transfer finds its blocks again.
    """
    view = memoryview(raw)
    sample = _sample(view)
    tried: dict[Encoding, bytes] = {"zstd": _zstd(sample), "shuffle4-zstd": _zstd_of_planes(sample)}
    best = min(tried, key=lambda name: len(tried[name]))
    if len(tried[best]) > _WORTHWHILE * len(sample):
        return "raw", raw
    if len(sample) < len(view):
        tried[best] = (_zstd if best == "zstd" else _zstd_of_planes)(view)
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


def _sample(view: memoryview) -> bytes | memoryview:
    if len(view) <= _PIECES * _PIECE_BYTES:
        return view
    apart = (len(view) - _PIECE_BYTES) // (_PIECES - 1) // 4 * 4
    return b"".join(view[place * apart :][:_PIECE_BYTES] for place in range(_PIECES))


def _zstd(data: bytes | memoryview) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))


def _zstd_of_planes(data: bytes | memoryview) -> bytes:
    return bytes(zstandard.ZstdCompressor(compression_params=_PLANES).compress(_shuffle(data)))


def _shuffle(data: bytes | memoryview) -> memoryview:
    # By shifts, which a processor does for many words at once.
    words, shuffled = np.frombuffer(data, "<u4", len(data) // 4), np.empty(len(data), np.uint8)
    for place, plane in enumerate(shuffled[: words.nbytes].reshape(4, -1)):
        np.right_shift(words, 8 * place, out=plane, dtype=words.dtype, casting="unsafe")
    shuffled[words.nbytes :] = bytearray(data[words.nbytes :])
    return shuffled.data


def _unshuffle(data: bytes) -> memoryview:
    planes, raw = np.frombuffer(data, np.uint8, len(data) // 4 * 4).reshape(4, -1), np.empty(len(data), np.uint8)
    words = raw[: planes.nbytes].view("<u4")
    words[:] = planes[3]
    for place in (2, 1, 0):
        words <<= 8
        words |= planes[place]
    raw[planes.nbytes :] = bytearray(data[planes.nbytes :])
    return raw.data


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
    table = _table_in(head, size_bytes)
    return [
        Place(name, _NAMES[dtype], len(shape), table.start + first, table.start + last)
        for name, (dtype, shape, first, last) in table.places.items()
    ]


def _parsed(header: bytes) -> tuple[Table, int]:
    """Return the table that a header describes, and the byte at which its arrays end."""
    try:
        entries = _entries.decode(header)
    except UNREADABLE as error:
        raise MalformedMessage(f"tensor header does not decode: {error}") from error
    check(len(entries) <= _MAX_ARRAYS, f"{len(entries)} tensors, expected at most {_MAX_ARRAYS}")
    end, places = 0, {}
    floats: list[tuple[np.dtype[Any], int, int]] = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        check(entry.dtype in _DTYPES, f"tensor {name[:80]!r} is {entry.dtype[:20]!r}, which does not travel")
        # Beside a side of 0 the others may be anything, and NumPy refuses what it can't count.
        check(
            len(entry.shape) <= _MAX_AXES
            and min(entry.shape, default=0) >= 0
            and math.prod(max(side, 1) for side in entry.shape) <= MAX_BLOB_BYTES,
            f"tensor {name[:80]!r} has a bad shape",
        )
        dtype, (first, last) = _DTYPES[entry.dtype], entry.data_offsets
        expected = math.prod(entry.shape) * dtype.itemsize
        check(first == end and last - first == expected, f"tensor {name[:80]!r} does not fit its bytes")
        places[name], end = (dtype, tuple(entry.shape), first, last), last
        if dtype.kind == "f" and floats and floats[-1][0] == dtype and floats[-1][2] == first:
            floats[-1] = (dtype, floats[-1][1], last)
        elif dtype.kind == "f":
            floats.append((dtype, first, last))
    in_order = tuple(name for name, (dtype, *_) in places.items() if dtype.kind == "f") if len(floats) == 1 else ()
    return Table(8 + len(header), places, tuple(floats), in_order), end


_known_table = functools.lru_cache(maxsize=64)(_parsed)
"""A fleet's models have a few layouts, and each one's header is the same to the byte."""
