from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.codec import decode, encode
from replayfleet.federation.wire.protocol.facts import decode_facts, encode_facts
from replayfleet.federation.wire.protocol.limits import MAX_METRIC
from replayfleet.federation.wire.protocol.messages import Block, Presence, Progress, Report
from replayfleet.federation.wire.protocol.tensors import compress, decode_arrays, decompress

ids = st.text("abcXYZ019_-", min_size=1, max_size=64).filter(lambda text: text[0] != "-")
transfer_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
counters = st.integers(0, 1 << 53)
finite = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)

messages = st.one_of(
    st.builds(
        Presence,
        client_id=ids,
        status=st.sampled_from(["online", "sleeping", "stopped", "offline"]),
        boot_id=ids,
        sequence=counters,
        device=st.text(max_size=50),
        round=st.integers(-1, 100),
    ),
    st.builds(
        Report,
        client_id=ids,
        round=counters,
        version=counters,
        metrics=st.dictionaries(
            st.text(max_size=9), st.floats(-MAX_METRIC, MAX_METRIC, allow_subnormal=False), max_size=5
        ),
    ),
    st.builds(
        Progress,
        sender=st.sampled_from(["client", "aggregator"]),
        transfer_id=transfer_ids,
        next_missing=st.integers(0, 1000),
        missing=st.just(()),
        credit=st.integers(0, 256),
    ),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | finite | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=20,
)


@given(messages)
def test_messages_survive_the_round_trip(message: Any):
    assert decode(encode(message)) == message


@given(transfer_ids, st.integers(0, 1000), st.binary(min_size=1, max_size=2000))
def test_blocks_survive_the_round_trip(transfer_id: str, index: int, payload: bytes):
    block = decode(encode(Block(transfer_id, index, payload)))
    assert isinstance(block, Block)
    assert (block.transfer_id, block.index, bytes(block.payload)) == (transfer_id, index, payload)


@given(st.binary(max_size=300))
def test_garbage_never_does_more_than_raise_malformed(data: bytes):
    for attempt in (decode, decode_facts, decode_arrays, lambda raw: decompress("zstd", raw, 100)):
        with contextlib.suppress(MalformedMessage):
            attempt(data)


@given(messages, st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_message_decodes_to_something_valid_or_is_refused(message: Any, place: int, value: int):
    frame = bytearray(encode(message))
    frame[place % len(frame)] = value
    try:
        decode(bytes(frame))
    except MalformedMessage:
        return


@given(st.dictionaries(st.text(max_size=8), values, max_size=5))
def test_facts_survive_the_round_trip(facts: dict[str, Any]):
    assert decode_facts(encode_facts(facts)) == facts


@given(st.binary(max_size=5000) | st.binary(max_size=9).map(lambda piece: piece * 500))
def test_compression_loses_nothing(raw: bytes):
    encoding, data = compress(raw)
    assert bytes(decompress(encoding, data, len(raw))) == raw
