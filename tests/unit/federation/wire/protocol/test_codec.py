from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import msgspec
import pytest

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol.codec import decode, encode, encode_manifest
from replayfleet.federation.wire.protocol.limits import (
    MAX_BLOBS,
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_BUNDLE_BYTES,
    MAX_COUNTER,
    MAX_ENCODINGS,
    MAX_EPOCH,
    MAX_FACTS_BYTES,
    MAX_HOLDS,
    MAX_METADATA_BYTES,
    MAX_METRICS,
    MAX_MISSING_RANGES,
    MAX_PROBE_LOGITS,
    MAX_ROOTS,
    MAX_TEXT,
    check_message,
)
from replayfleet.federation.wire.protocol.messages import (
    MARK_BYTES,
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
    Release,
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


def told(**changes: Any) -> Announcement:
    return msgspec.structs.replace(an_announcement(), **changes)


def a_probe(seed: int = 1, batch_size: int = 1, num_logits: int = 1) -> Offer:
    return an_offer(
        manifest=a_manifest(serving=Serving("task", "task", Probe(seed, batch_size, (0.5,) * num_logits, 0.1)))
    )


def of_blobs(*blobs: BlobEntry, **changes: Any) -> Offer:
    return an_offer(manifest=a_manifest(blobs=blobs, serving=None), **changes)


def a_base(base: str, encoding: Any = "packed") -> Offer:
    return an_offer(parts=(BundlePart(DIGEST, 5000, encoding, base),))


MANY, LONG, LARGEST = MAX_COUNTER + 1, "y" * (MAX_TEXT + 1), MAX_BUNDLE_BYTES
SPEC, OTHERS = an_announcement().spec, [f"{number:064x}" for number in range(MAX_BLOBS + 1)]
TOO_LONG_METADATA = bytes(MAX_METADATA_BYTES + 1)
ROLLED_BACK, REPORT, VERDICT = (
    RolledBack("cam-1", 3, 7, 6, "drifted", "one class"),
    Report("cam-1", 3, 7, {}),
    Verdict("aggregator", TRANSFER, 3, 7, False, "too-large", "why"),
)
BEYOND: list[tuple[str, Any, dict[str, Any]]] = [
    ("digest 'ABC'", of_blobs(BlobEntry("task", "ABC", 1), parts=(), block_digests=b""), {}),
    ("probe seed", a_probe(seed=-1), {}),
    ("probe batch size", a_probe(batch_size=1025, num_logits=1025), {}),
    ("number of probe logits", a_probe(num_logits=MAX_PROBE_LOGITS + 1), {}),
    ("divide into the batch", a_probe(batch_size=2, num_logits=3), {}),
    ("manifest's version", an_offer(manifest=a_manifest(version=MANY)), {}),
    ("number of blobs", of_blobs(*(BlobEntry(one, one, 1) for one in OTHERS), parts=(), block_digests=b""), {}),
    ("size of the facts", an_offer(manifest=a_manifest(facts=bytes(MAX_FACTS_BYTES + 1))), {}),
    ("notice", an_offer(manifest=a_manifest(notice=LONG)), {}),
    *(
        ("size of a release", an_offer(manifest=a_manifest(release=Release(*files))), {})
        for files in ((TOO_LONG_METADATA, b"x", b"x"), (b"x", b"", b"x"), (b"x", b"x", TOO_LONG_METADATA))
    ),
    ("block size", an_offer(), {"block_bytes": MAX_BLOCK_BYTES + 1, "block_digests": bytes(32)}),
    ("number of parts", an_offer(), {"parts": (BundlePart(DIGEST, 5000, "raw"),) * 3}),
    ("parts occur twice", an_offer(), {"parts": (BundlePart(DIGEST, 2500, "raw"),) * 2}),
    ("size of a part", an_offer(), {"parts": (BundlePart(DIGEST, -1, "raw"),)}),
    (
        "size of the bundle",
        an_offer(),
        {"parts": (BundlePart(DIGEST, LARGEST, "raw"), BundlePart("cd" * 32, 1, "raw"))},
    ),
    (
        "number of blocks",
        an_offer(),
        {"parts": (BundlePart(DIGEST, LARGEST, "raw"),), "block_digests": bytes(32 << 18)},
    ),
    ("boot id that an offer answers", an_offer(), {"answers": "a/b"}),
    ("a part's base", a_base("ABC"), {}),
    ("a base that it can't have", a_base(DIGEST), {}),
    ("a base that it can't have", a_base("cd" * 32, "zstd"), {}),
    ("next missing block", Progress("client", TRANSFER, MAX_BLOCKS + 1, (), 8), {}),
    ("missing ranges", Progress("client", TRANSFER, 0, tuple((n, n) for n in range(MAX_MISSING_RANGES + 1)), 8), {}),
    ("missing ranges", Progress("client", TRANSFER, 0, ((3, MAX_BLOCKS),), 8), {}),
    *(
        ("transfer id", one, {"transfer_id": "abc"})
        for one in (an_offer(), Want("client", TRANSFER, (DIGEST,)), VERDICT, Block(TRANSFER, 0, b"x"))
    ),
    ("verdict's round", VERDICT, {"round": -1}),
    ("verdict's version", VERDICT, {"version": MANY}),
    ("upload counts", VERDICT, {"counts_in": -2}),
    ("verdict's reason", VERDICT, {"reason": LONG}),
    ("instance", VERDICT, {"instance": "a/b"}),
    *(("client id", one, {"client_id": "../etc"}) for one in (a_presence(), REPORT, ROLLED_BACK)),
    ("boot id", a_presence(), {"boot_id": "a/b"}),
    ("presence's round", a_presence(), {"round": MANY}),
    ("serving version", a_presence(), {"serving_version": -2}),
    ("labels that wait", a_presence(), {"labels_waiting": MANY}),
    ("age of a picture", a_presence(), {"picture_age_s": math.nan}),
    ("labels that were answered", a_presence(), {"labels_answered": MANY}),
    *((what, a_presence(), {what: LONG}) for what in ("device", "provider", "phase", "reason", "why", "precision")),
    ("number of encodings", a_presence(), {"decodes": ("raw",) * (MAX_ENCODINGS + 1)}),
    ("an encoding's name", told(), {"decodes": (LONG,)}),
    ("report's version", REPORT, {"version": MANY}),
    ("number of metrics", REPORT, {"metrics": {str(number): 0.0 for number in range(MAX_METRICS + 1)}}),
    ("characters in names", REPORT, {"metrics": {f"{number}{'y' * 900}": 0.0 for number in range(40)}}),
    ("metric's name", REPORT, {"metrics": {LONG: 0.0}}),
    ("rolled-back round", ROLLED_BACK, {"round": -2}),
    ("rolled-back version", ROLLED_BACK, {"version": -1}),
    ("serving version", ROLLED_BACK, {"serving_version": MANY}),
    ("reason of a roll-back", ROLLED_BACK, {"reason": LONG}),
    ("fleet", told(), {"spec": msgspec.structs.replace(SPEC, fleet="a/b")}),
    ("method", told(), {"spec": msgspec.structs.replace(SPEC, method="a/b")}),
    ("run seed", told(), {"spec": msgspec.structs.replace(SPEC, run_seed=-1)}),
    ("task fields", told(), {"spec": msgspec.structs.replace(SPEC, task={"image_size": math.inf})}),
    ("instance", told(), {"instance": "a/b"}),
    ("epoch", told(), {"epoch": MAX_EPOCH + 1}),
    ("announced round", told(), {"round": MANY}),
    ("late rounds", told(), {"late_rounds": -1}),
    ("what is held", told(), {"holds": bytes(MARK_BYTES * (MAX_HOLDS + 1))}),
    ("who is excluded", told(), {"excluded": bytes(MARK_BYTES + 1)}),
    ("who is shut out", told(), {"shut_out": bytes(MARK_BYTES - 1)}),
    ("number of roots", told(), {"roots": (b"x",) * (MAX_ROOTS + 1)}),
    ("size of a root", told(), {"roots": (TOO_LONG_METADATA,)}),
]


@pytest.mark.parametrize(
    ("what", "message", "changes"), BEYOND, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_bound_is_the_one_that_is_named(what: str, message: Any, changes: dict[str, Any]):
    """Of what breaks but one bound the error says which, so none of them can be left out."""
    changed = msgspec.structs.replace(message, **changes)
    with pytest.raises(MalformedMessage, match=what):
        check_message(changed)


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
