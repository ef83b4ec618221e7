"""Blobs whose values were rounded, in the few bytes that they need: float16, or whole steps from another blob.

Nothing is lost here: who made the blob rounded its values (``federation.methods.kit.travel``), and what is unpacked has
the blob's digest, or is refused. ``from_steps`` is the one formula on both ends: float32, multiplied, then added.

A packed blob is a zstd frame of: the size of its header; the header, as safetensors has it, or nothing if the base has
the same one; a code for each array; the steps of those arrays that are differences; then the arrays' bytes, those of
each code together, float16 with all low bytes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.limits import check
from replayfleet.federation.wire.protocol.tensors import Place, folded, places_of, unfolded

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_STEPS = 127
"""Of a difference, either way: it is an int8."""

_AS_IT_IS, _HALF, _STEPS = range(3)
_SAMPLE = 64


def from_steps(base: Array, step: float, counts: Array) -> Array:
    """Return ``base + step * counts``, (N,) float32, of (N,) float32 and (N,) int8: equal bits on every machine."""
    return np.asarray(base + np.float32(step) * counts.astype(np.float32), np.float32)


def counted(exact: Array, base: Array, num_steps: int = MAX_STEPS) -> tuple[float, Array]:
    """Return (step, counts): ``exact`` as whole steps from ``base``, of which there are ``num_steps`` at most.

    The step is 0 where there is no difference, or none that is finite and normal.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        change = exact - base
        step = np.float32(np.abs(change).max(initial=0.0) / np.float32(num_steps))
    if not np.finfo(np.float32).tiny <= step <= np.finfo(np.float32).max:
        return 0.0, np.zeros(change.shape, np.int8)
    return float(step), np.clip(np.rint(change / step), -num_steps, num_steps).astype(np.int8)


def pack(raw: bytes, base: bytes | None, steps: Mapping[str, float]) -> bytes | None:
    """Return a blob packed, or None if its values weren't rounded so, or it would save nothing.

    Args:
        raw: a blob of arrays.
        base: another, for the same arrays, which the receiver holds; None: the packed blob stands alone.
        steps: of those arrays that are whole steps away from the base's.
    """
    try:
        places = places_of(raw, len(raw))
    except MalformedMessage:
        return None  # a graph, say
    head = raw[: places[0].first] if places else raw
    if base is not None and base[: len(head)] != head:
        return None
    codes = bytes(_code(raw, place, steps if base is not None else {}) for place in places)
    grouped = _by_code(places, codes)
    if 2 * sum(place.last - place.first for place in (*grouped[_HALF], *grouped[_STEPS])) < len(raw):
        return None  # ones and zeros of a model that wasn't rounded: as a whole it gets smaller with its bytes shuffled
    of_steps = [(place, steps[place.name]) for place in grouped[_STEPS]]
    bodies = [*(raw[place.first : place.last] for place in grouped[_AS_IT_IS]), _planes(raw, grouped[_HALF])]
    for place, step in of_steps:
        change = _floats(raw, place) - _floats(base or b"", place)
        bodies.append((np.rint(change / np.float32(step)) if step else np.zeros_like(change)).astype(np.int8).tobytes())
    own_head = b"" if base is not None else head
    sizes = np.array([step for _, step in of_steps], "<f4").tobytes()
    body = b"".join((len(own_head).to_bytes(4, "little"), own_head, codes, sizes, *bodies))
    packed = folded(body)
    return packed if max(len(body), len(packed)) < len(raw) and unpack(packed, base, len(raw)) == raw else None


def unpack(packed: bytes | memoryview, base: bytes | None, size_bytes: int) -> bytes:
    """Return the blob of ``size_bytes`` again; its digest is the caller's to check.

    Raises:
        MalformedMessage: Damaged, larger or other than declared, or it needs a base that isn't of its kind.
    """
    body = _Reader(unfolded(packed, size_bytes))
    head: bytes | memoryview = body.take(int.from_bytes(body.take(4), "little"))
    if not head:
        check(base is not None and len(base) == size_bytes, "a difference needs a base of its own size")
        head = memoryview(base or b"")
    places = places_of(head, size_bytes)
    raw = bytearray(size_bytes)
    start = places[0].first if places else size_bytes
    check(len(head) >= start, "the header of a packed blob ends early")
    raw[:start] = head[:start]
    codes = body.take(len(places))
    check(max(codes, default=0) <= _STEPS, "a packed blob has a code that is unknown")
    check(
        all(place.dtype == "F32" for place, code in zip(places, codes, strict=True) if code != _AS_IT_IS),
        "a packed array isn't float32",
    )
    grouped = _by_code(places, codes)
    steps = np.frombuffer(body.take(4 * len(grouped[_STEPS])), "<f4")
    check(bool(np.isfinite(steps).all()), "a step isn't finite")
    for place in grouped[_AS_IT_IS]:
        raw[place.first : place.last] = body.take(place.last - place.first)
    _from_planes(raw, grouped[_HALF], body)
    check(not grouped[_STEPS] or (base is not None and len(base) == size_bytes), "a difference without its base")
    for place, step in zip(grouped[_STEPS], steps.tolist(), strict=True):
        counts = np.frombuffer(body.take((place.last - place.first) // 4), np.int8)
        with np.errstate(over="ignore", invalid="ignore"):
            raw[place.first : place.last] = from_steps(_floats(base or b"", place), step, counts).tobytes()
    check(body.ended, "a packed blob goes on after its last array")
    return bytes(raw)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def take(self, size: int) -> memoryview:
        check(size <= len(self._left), f"a packed blob ends {size - len(self._left)} bytes early")
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    @property
    def ended(self) -> bool:
        return not self._left


def _floats(data: bytes, place: Place) -> Array:
    return np.frombuffer(data, "<f4", (place.last - place.first) // 4, place.first)


def _code(raw: bytes, place: Place, steps: Mapping[str, float]) -> int:
    if place.dtype != "F32":
        return _AS_IT_IS
    if place.name in steps:
        return _STEPS
    values = _floats(raw, place)
    # Nearly all that isn't rounded shows in the first few.
    return _HALF if _is_half(values[:_SAMPLE]) and _is_half(values) else _AS_IT_IS


def _is_half(values: Array) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype("<f2").astype("<f4").tobytes() == values.tobytes()


def _by_code(places: Sequence[Place], codes: bytes | memoryview) -> tuple[list[Place], ...]:
    return tuple([place for place, code in zip(places, codes, strict=True) if code == one] for one in range(3))


def _planes(raw: bytes, places: Sequence[Place]) -> bytes:
    """Return arrays as float16, first all low bytes, then all high bytes, which resemble each other."""
    halves = [_floats(raw, place).astype("<f2") for place in places]
    if not halves:
        return b""
    return bytes(np.concatenate(halves).view(np.uint8).reshape(-1, 2).T.tobytes())


def _from_planes(raw: bytearray, places: Sequence[Place], body: _Reader) -> None:
    num_values = sum(place.last - place.first for place in places) // 4
    planes = np.frombuffer(body.take(2 * num_values), np.uint8).reshape(2, num_values)
    values = np.ascontiguousarray(planes.T).view("<f2")[:, 0].astype("<f4") if num_values else np.empty(0, "<f4")
    done = 0
    for place in places:
        size = (place.last - place.first) // 4
        raw[place.first : place.last] = values[done : done + size].tobytes()
        done += size
