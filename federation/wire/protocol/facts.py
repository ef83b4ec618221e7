"""Facts (small plain values beside the tensors) as msgpack, with limits on both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from replayfleet.federation.errors import UNREADABLE, MalformedMessage
from replayfleet.federation.wire.protocol.limits import MAX_FACTS_BYTES, check, check_values

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


def encode_facts(facts: Mapping[str, Any]) -> bytes:
    """Return facts as bytes; equal facts give equal bytes, whatever the order of their keys.

    Raises:
        MalformedMessage: A value is of another type than None, bool, int, float, str, list or str-keyed dict, or the
            whole is too deep or too large. NaN and infinity are taken here, and refused by ``decode_facts``.
    """
    check_values(facts, "facts", finite=False)
    try:
        data = _encoder.encode(dict(facts))
    except (TypeError, OverflowError) as error:
        raise MalformedMessage(f"facts can't be encoded: {error}") from error
    check(len(data) <= MAX_FACTS_BYTES, f"facts of {len(data)} bytes, expected at most {MAX_FACTS_BYTES}")
    return data


def decode_facts(data: bytes, *, finite: bool = True) -> dict[str, Any]:
    """Return the facts again; tuples come back as lists.

    Args:
        data: what ``encode_facts`` returned, from anywhere.
        finite: refuse NaN and infinity; switch it off for what this process stored itself.

    Raises:
        MalformedMessage: Too large, too deep, not msgpack, not a str-keyed dict, or not finite.
    """
    check(len(data) <= MAX_FACTS_BYTES, f"facts of {len(data)} bytes, expected at most {MAX_FACTS_BYTES}")
    if not data:
        return {}
    try:
        facts = _decoder.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"facts don't decode: {error}") from error
    check_values(facts, "facts", finite=finite)
    return facts
