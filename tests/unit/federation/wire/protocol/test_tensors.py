from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import zstandard

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.facts import decode_facts, encode_facts
from replayfleet.federation.wire.protocol.tensors import compress, decode_arrays, decompress, digest, encode_arrays


def some_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "conv.weight": rng.normal(size=(16, 3, 3, 3)).astype(np.float32),
        "bn.num_batches_tracked": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "mask": np.array([True, False]),
    }


def test_arrays_come_back_to_the_bit_and_in_their_shape():
    arrays = some_arrays()
    back = decode_arrays(encode_arrays(arrays))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert np.array_equal(back[name], array)


def test_the_bytes_are_those_of_the_library():
    kinds = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    arrays = {f'{kind} "\\é': np.arange(3).astype(kind) for kind in kinds} | some_arrays() | {"scalar": np.float32(1)}
    assert encode_arrays(arrays) == safetensors.numpy.save({name: np.asarray(each) for name, each in arrays.items()})
    assert encode_arrays({}) == safetensors.numpy.save({})


def test_an_array_at_an_odd_place_is_read_like_any_other():
    odd = b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    found = decode_arrays(len(odd).to_bytes(8, "little") + odd + b"\x07" + np.float32(2.5).tobytes())
    assert (found["a"].item(), found["b"].item()) == (7, 2.5)
    assert found["b"].flags.aligned


def test_equal_arrays_give_equal_bytes_whatever_their_order_and_layout():
    arrays = some_arrays()
    shuffled = {name: np.asfortranarray(arrays[name]).reshape(arrays[name].shape) for name in reversed(arrays)}
    assert encode_arrays(arrays) == encode_arrays(shuffled)


def test_an_array_that_does_not_travel_is_named():
    with pytest.raises(MalformedMessage, match="'x' is complex128"):
        encode_arrays({"x": np.zeros(2, complex)})


def tensors(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (1 << 60).to_bytes(8, "little") + b"{}",
        tensors(b"[1]", b""),
        tensors(b"[" * 5000, b""),
        tensors({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        tensors({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        tensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12341234"),
        tensors({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        tensors({"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, b"1234"),
        tensors({"x": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}, b""),
        tensors({"x": {"dtype": "F32", "shape": [1 << 70, 0], "data_offsets": [0, 0]}}, b""),
        tensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"),
        tensors({"x": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_bytes_that_are_no_tensors_are_refused(data: bytes):
    with pytest.raises(MalformedMessage):
        decode_arrays(data)


def test_more_bytes_than_expected_are_refused_before_a_look_at_them():
    with pytest.raises(MalformedMessage, match="at most 10"):
        decode_arrays(bytes(11), max_bytes=10)


def float_bytes(count: int = 70_003) -> bytes:
    return np.random.default_rng(1).normal(size=count).astype(np.float32).tobytes() + b"odd"


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        (float_bytes(), "shuffle4-zstd"),
        (b"the same words again " * 5000, "zstd"),
        (np.random.default_rng(2).bytes(100_000), "raw"),
        (b"", "raw"),
        (b"x", "raw"),
    ],
)
def test_compression_chooses_what_helps_and_loses_nothing(raw: bytes, encoding: str):
    chosen, data = compress(raw)
    assert chosen == encoding
    assert len(data) <= len(raw)
    assert bytes(decompress(chosen, data, len(raw))) == raw
    assert compress(raw) == (chosen, data)


def test_parameters_shrink_to_about_the_published_ratio():
    raw = float_bytes()
    _, data = compress(raw)
    assert len(data) / len(raw) < 0.9


def test_repeats_among_parameters_that_are_chance_make_them_no_larger():
    raw = float_bytes()[:-3]
    planes = np.frombuffer(raw, np.uint8).reshape(-1, 4).T.tobytes()
    chosen, data = compress(raw)
    assert chosen == "shuffle4-zstd"
    assert len(data) < len(zstandard.ZstdCompressor(level=1).compress(planes))


def test_a_zip_bomb_is_refused_by_its_declared_size():
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(MalformedMessage, match="unfolds to 67108864 bytes, declared were 100"):
        decompress("zstd", bomb, 100)


def test_a_bomb_that_hides_its_size_is_refused_too():
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(MalformedMessage, match="unfolds"):
        decompress("zstd", bomb, 100)


@pytest.mark.parametrize("encoding", ["zstd", "shuffle4-zstd", "raw", "gzip"])
def test_damaged_compressed_bytes_are_refused(encoding: str):
    with pytest.raises(MalformedMessage):
        decompress(encoding, b"\x28\xb5\x2f\xfdgarbage", 100)


def test_the_digest_is_sha256():
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_facts_come_back_and_equal_facts_give_equal_bytes():
    facts = {"counts": {"3": 17}, "name": "x", "list": [1, 2.5, None, True]}
    assert decode_facts(encode_facts(facts)) == facts
    assert encode_facts(facts) == encode_facts(dict(reversed(facts.items())))
    assert decode_facts(b"") == {}


@pytest.mark.parametrize(
    "facts", [{"x": object()}, {"x": {1: 2}}, {"x": b"bytes"}, {"x": 1 << 80}, {"x": "y" * (600 << 10)}]
)
def test_facts_that_do_not_travel_are_refused_where_they_are_made(facts: dict[str, Any]):
    with pytest.raises(MalformedMessage):
        encode_facts(facts)


@pytest.mark.parametrize(
    "data", [b"\x93", b"\x81\x01\x02", b"\x91" * 5000, b"\x81\xa1x" * 100 + b"\x01", bytes(1 << 20)]
)
def test_bytes_that_are_no_facts_are_refused(data: bytes):
    with pytest.raises(MalformedMessage):
        decode_facts(data)


def test_facts_from_elsewhere_must_be_finite():
    data = encode_facts({"loss": math.nan})
    with pytest.raises(MalformedMessage, match="nan"):
        decode_facts(data)
    assert math.isnan(decode_facts(data, finite=False)["loss"])


def test_tensors_that_overlap_are_refused_before_the_library_sees_them():
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    with pytest.raises(MalformedMessage, match="tensor 'y' does not fit its bytes"):
        decode_arrays(tensors({"x": entry, "y": entry}, b"1234"))
