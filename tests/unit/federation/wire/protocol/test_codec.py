from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import msgspec
import pytest

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.codec import decode, encode, encode_manifest
from replayfleet.federation.wire.protocol.messages import (
    PROTOCOL_VERSION,
    Announcement,
    BlobEntry,
    Block,
    BundlePart,
    FleetSpec,
    Manifest,
    Offer,
    Presence,
    Probe,
    Progress,
    Report,
    RolledBack,
    Serving,
    Verdict,
    Want,
)

TRANSFER = "0123456789abcdef" * 2
DIGEST = "ab" * 32


def a_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        direction="down",
        fleet="yard",
        client_id="cam-1",
        round=3,
        version=7,
        blobs=(BlobEntry("task", DIGEST, 5000), BlobEntry("graph/task", "cd" * 32, 10, shared=True)),
        facts=b"\x80",
        serving=Serving("graph/task", "task", Probe(1, 2, (0.5, 1.5), 1e-4)),
    )
    return msgspec.structs.replace(manifest, **changes)


def an_offer(**changes: Any) -> Offer:
    offer = Offer("aggregator", TRANSFER, a_manifest(), (BundlePart(DIGEST, 5000, "raw"),), 4096, bytes(64))
    return msgspec.structs.replace(offer, **changes)


def an_announcement(**settings: Any) -> Announcement:
    return Announcement("boot-1", 3, "open", 30.0, FleetSpec("yard", "fedavg", settings, {"image_size": 28}, 1))


def a_presence(**changes: Any) -> Presence:
    return msgspec.structs.replace(Presence("cam-1", "online", "boot-1", 4), **changes)


@pytest.mark.parametrize(
    "message",
    [
        an_offer(),
        Progress("client", TRANSFER, 3, ((3, 4), (9, 9)), 8),
        Want("client", TRANSFER, (DIGEST,)),
        Verdict("aggregator", TRANSFER, 3, 7, False, "too-large", "why"),
        a_presence(labels_answered=9, labels_right=9),
        Report("cam-1", 3, 7, {"accuracy": 0.5}),
        RolledBack("cam-1", 3, 7, 6, "drifted", "one class"),
        an_announcement(lambda_=0.3, names=["a", "b"]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_comes_back_as_it_was(message: Any):
    assert decode(encode(message)) == message


def test_a_block_comes_back_as_a_view_of_its_frame():
    block = decode(encode(Block(TRANSFER, 5, b"payload")))
    assert isinstance(block, Block)
    assert (block.transfer_id, block.index, bytes(block.payload)) == (TRANSFER, 5, b"payload")
    assert isinstance(block.payload, memoryview)


BAD = {
    "client id": an_offer(manifest=a_manifest(client_id="../etc")),
    "fleet": an_offer(manifest=a_manifest(fleet="a/b")),
    "everybody in an upload": an_offer(manifest=a_manifest(direction="up", client_id="*")),
    "digest": Want("client", TRANSFER, ("ABC",)),
    "no wants": Want("client", TRANSFER, ()),
    "negative round": an_offer(manifest=a_manifest(round=-1)),
    "blob name": an_offer(manifest=a_manifest(blobs=(BlobEntry("../x", DIGEST, 1),), serving=None)),
    "huge blob": an_offer(manifest=a_manifest(blobs=(BlobEntry("task", DIGEST, 1 << 40),), serving=None)),
    "twice the same name": an_offer(manifest=a_manifest(blobs=(BlobEntry("task", DIGEST, 1),) * 2, serving=None)),
    "serving without blob": an_offer(manifest=a_manifest(blobs=(BlobEntry("task", DIGEST, 1),))),
    "infinite probe": an_offer(manifest=a_manifest(serving=Serving("task", "task", Probe(1, 1, (math.inf,), 1e-4)))),
    "nan tolerance": an_offer(manifest=a_manifest(serving=Serving("task", "task", Probe(1, 1, (1.0,), math.nan)))),
    "part of another manifest": an_offer(parts=(BundlePart("ef" * 32, 5000, "raw"),)),
    "block of one byte": an_offer(block_bytes=1),
    "huge part": an_offer(parts=(BundlePart(DIGEST, 1 << 40, "raw"),)),
    "too few digests": an_offer(block_digests=bytes(32)),
    "ranges out of order": Progress("client", TRANSFER, 3, ((9, 9), (3, 4)), 8),
    "credit": Progress("client", TRANSFER, 3, (), 10_000),
    "transfer id": Progress("client", "abc", 3, (), 8),
    "report of no round": Report("cam-1", -1, 1, {}),
    "nan metric": Report("cam-1", 3, 7, {"accuracy": math.nan}),
    "metric that no sum takes": Report("cam-1", 3, 7, {"train_s": 1.7e308}),
    "share of more than all": Report("cam-1", 3, 7, {"stream_accuracy/yard": 1.5}),
    "long roll-back": RolledBack("cam-1", 3, 7, 6, "drifted", "y" * 5000),
    "nan deadline": msgspec.structs.replace(an_announcement(), deadline_s=math.nan),
    "nan setting": an_announcement(x=[math.nan]),
    "long text": Verdict("aggregator", TRANSFER, 3, 7, False, "x", "y" * 5000),
    "sequence": a_presence(sequence=-1),
    "more right than answered": a_presence(labels_answered=3, labels_right=4),
    "empty block": Block(TRANSFER, 0, b""),
    "block index": Block(TRANSFER, 1 << 20, b"x"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_breaks_a_limit_is_refused_on_both_ways(name: str):
    message = BAD[name]
    with pytest.raises(MalformedMessage):
        encode(message)
    if isinstance(message, Block) and message.payload:
        return  # the head has no room for such an index in practice; the size check stands below
    frame = bytes((1, PROTOCOL_VERSION)) + msgspec.msgpack.encode(message)
    if not isinstance(message, Block):
        with pytest.raises(MalformedMessage):
            decode(frame)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "shorter"),
        (b"\x01", "shorter"),
        (b"\x07\x01abc", "frame type 7"),
        (b"\x01\x02\x80", "protocol version 2, this build speaks 1"),
        (b"\x01\x01" + b"\x91" * 100_000, "not a message"),
        (b"\x01\x01\xdd\xff\xff\xff\xff", "not a message"),
        (b"\x01\x01" + msgspec.msgpack.encode({"kind": "gossip"}), "not a message"),
        (b"\x01\x01" + bytes(2 << 20), r"message of \d+ bytes"),
        (b"\x02\x01" + bytes(20), "block of 0 bytes"),
        (b"\x02\x01" + bytes(5 << 20), "block of"),
    ],
)
def test_garbage_is_one_clear_error(frame: bytes, text: str):
    with pytest.raises(MalformedMessage, match=text):
        decode(frame)


def test_settings_nested_too_deeply_are_refused():
    nested: Any = 1
    for _ in range(40):
        nested = [nested]
    frame = b"\x01\x01" + msgspec.msgpack.encode(an_announcement(x=nested))
    with pytest.raises(MalformedMessage, match="deeper than"):
        decode(frame)


def test_what_a_later_version_adds_to_a_message_is_passed_over():
    frame = encode(an_offer())
    said = msgspec.msgpack.decode(frame[2:])
    said["later"], said["manifest"]["later"], said["manifest"]["blobs"][0]["later"] = 1, {"a": [1]}, "b"
    assert decode(frame[:2] + msgspec.msgpack.encode(said)) == an_offer()


def test_a_manifest_is_signed_and_known_by_the_bytes_that_earlier_versions_make_of_it():
    """They pass over a field that they don't know, and find another signature's bytes: no download would be taken."""
    told = encode_manifest(a_manifest(notice="why"))
    assert hashlib.sha256(told).hexdigest() == "e82ef01c5f13875e4090593cc9fcafe7d061f4f7fa959cc339482da62d544287"
    assert a_manifest().mark.hex() == "302452e2d2e2dd50"


def test_messages_are_values_that_nobody_changes():
    assert not dataclasses.is_dataclass(a_presence())
    with pytest.raises(AttributeError):
        a_presence().sequence = 9  # type: ignore[misc]
