from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.rounded import a_difference, halves, some_arrays

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.packed import counted, from_steps, pack, unpack
from replayfleet.federation.wire.protocol.tensors import encode_arrays


def packed_difference() -> tuple[bytes, bytes, bytes]:
    raw, base, steps = a_difference()
    packed = pack(raw, base, steps)
    assert packed is not None
    return packed, base, raw


def packed_halves() -> tuple[bytes, bytes]:
    packed = pack(halves(), None, {})
    assert packed is not None
    return packed, halves()


def test_a_difference_unpacks_to_the_bit_and_takes_a_third() -> None:
    packed, base, raw = packed_difference()
    assert unpack(packed, base, len(raw)) == raw
    assert len(packed) < 0.35 * len(raw)


def test_float16_unpacks_to_the_bit_and_takes_half() -> None:
    packed, raw = packed_halves()
    assert unpack(packed, None, len(raw)) == raw
    assert len(packed) < 0.55 * len(raw)


def test_what_wasnt_rounded_isnt_packed() -> None:
    raw, base, steps = a_difference()
    exact = encode_arrays(some_arrays(3))
    assert pack(exact, None, {}) is None
    assert pack(encode_arrays({**some_arrays(3), "norm": np.ones(64, np.float32)}), None, {}) is None
    assert pack(exact, base, steps) is None
    assert pack(b"not a blob of arrays", None, {}) is None
    assert pack(raw, encode_arrays({"other": np.zeros(3, np.float32)}), steps) is None


def test_another_base_gives_another_blob_which_its_digest_tells() -> None:
    packed, _, raw = packed_difference()
    assert unpack(packed, encode_arrays(some_arrays(9)), len(raw)) != raw


@pytest.mark.parametrize("base", [None, b"", b"\0" * 8, encode_arrays({"w": np.zeros(2, np.float32)})])
def test_a_difference_needs_a_base_of_its_kind(base: bytes | None) -> None:
    packed, _, raw = packed_difference()
    with pytest.raises(MalformedMessage):
        unpack(packed, base, len(raw))


def test_a_packed_blob_that_unfolds_to_more_than_declared_is_refused_before_it_does() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(MalformedMessage, match="unfolds"):
        unpack(bomb, None, 1000)
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(MalformedMessage, match="unfolds"):
        unpack(hidden, None, 1000)


@given(place=st.integers(0, 10_000), value=st.integers(0, 255), size=st.integers(0, 20_000), with_base=st.booleans())
def test_whatever_is_inside_either_unpacks_to_the_declared_size_or_is_refused(
    place: int, value: int, size: int, with_base: bool
) -> None:
    packed, base, raw = packed_difference()
    inside = bytearray(zstandard.ZstdDecompressor().decompress(packed))
    inside[place % len(inside)] = value
    for body in (inside, inside[:size]):
        changed = zstandard.ZstdCompressor().compress(bytes(body))
        try:
            found = unpack(changed, base if with_base else None, len(raw))
        except MalformedMessage:
            continue
        assert len(found) == len(raw)


def test_counts_are_the_nearest_whole_steps() -> None:
    base, exact = np.zeros(3, np.float32), np.array([1.27, 0.014, -0.006], np.float32)
    step, counts = counted(exact, base)
    assert step == pytest.approx(0.01)
    assert counts.tolist() == [127, 1, -1]
    assert np.abs(from_steps(base, step, counts) - exact).max() <= step / 2


@pytest.mark.parametrize("worst", [np.nan, np.inf, 0.0, 1e-45])
def test_where_there_is_no_finite_normal_step_nothing_changes(worst: float) -> None:
    base = np.array([3.0, 0.0], np.float32)
    step, counts = counted(base + np.array([0, worst], np.float32), base)
    assert (step, counts.tolist()) == (0.0, [0, 0])
