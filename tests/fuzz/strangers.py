"""Targets: what comes over the network, from anybody who may publish."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from replayfleet.aggregator.admission import decode_upload
from replayfleet.edge_client.flow import Inputs, Picture, Shown
from replayfleet.edge_client.learning.labels.box_feedback import BoxFeedbackDesk
from replayfleet.edge_client.learning.labels.feedback import FeedbackDesk
from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused
from replayfleet.edge_client.operator.operator_desk import OperatorDesk
from replayfleet.edge_client.operator.studio.words import Answer, decode_answer, decode_question
from replayfleet.export.running.inspection import input_names, inspect_graph
from replayfleet.federation.errors import ArtefactRejected, MalformedMessage, SettingsError, UploadRejected
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.wire.protocol import codec
from replayfleet.federation.wire.protocol.facts import decode_facts, encode_facts
from replayfleet.federation.wire.protocol.messages import (
    PROTOCOL_VERSION,
    Announcement,
    BlobEntry,
    Block,
    BundlePart,
    FleetSpec,
    Manifest,
    Message,
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
from replayfleet.federation.wire.protocol.packed import pack, unpack
from replayfleet.federation.wire.protocol.tensors import (
    compress,
    decode_arrays,
    decompress,
    digest,
    encode_arrays,
    folded,
    unfolded,
)
from replayfleet.federation.wire.protocol.thumbnails import JPEG, Thumbnail, decode_thumbnail, encode_thumbnail
from replayfleet.federation.wire.protocol.topics import parse_topic, topic_of
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.incoming import TransferLimits
from replayfleet.federation.wire.transport.interfaces import Arrived, Offered
from replayfleet.models.specs import DetectionSpec, TaskSpec
from tests.fuzz.forms import JSON, MSGPACK, PROTOBUF, SAFETENSORS, after, document, taken_apart
from tests.fuzz.mutation import Unfit
from tests.fuzz.target import Target, scratch, seeds
from tests.support.rounded import a_difference, halves
from tests.support.voices import Plain

FLEET = "street"
MAX_UNFOLDED_BYTES = 16 << 20

ARRAYS = {"conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "bias": np.ones(3), "n": np.array(7)}
FACTS = {"seen": {"0": 8, "3": 1}, "num_samples": 9, "share": 0.5, "names": ["a", "b", [True, None]]}
BLOBS = (BlobEntry("task", "ab" * 32, 4000), BlobEntry("graph/task", "cd" * 32, 70, shared=True))
SPEC = FleetSpec(
    FLEET,
    "fedavg",
    {"local_epochs": 1, "learning_rate": 0.05},
    {"channels": 1, "image_size": 28, "class_names": ["a", "b"]},
    7,
)


def manifest(direction: Any = "up", **changes: Any) -> Manifest:
    made = Manifest(direction, FLEET, "cam-1", 4, (1 << 32) + 7, BLOBS, encode_facts(FACTS))
    return msgspec.structs.replace(made, **changes)


SERVED = manifest(
    "down", serving=Serving("graph/task", "task", Probe(3, 2, (0.5, -1.0, 2.0, 0.0), 1e-3)), notice="none"
)


def offer(*parts: BundlePart, **changes: Any) -> Offer:
    return msgspec.structs.replace(Offer("client", "0f" * 16, manifest(), parts, 1024, b""), **changes)


def messages() -> list[Message]:
    return [
        offer(BundlePart("ab" * 32, 2000, "zstd"), block_digests=bytes(64)),
        offer(BundlePart("ab" * 32, 2000, "packed", "cd" * 32), block_digests=bytes(64)),
        Offer("aggregator", "1f" * 16, SERVED, (), 4096, b""),
        Progress("client", "0f" * 16, 3, ((4, 5), (9, 9)), 8),
        Want("aggregator", "0f" * 16, ("ab" * 32,)),
        Verdict("aggregator", "0f" * 16, 4, 7, False, "busy", "come again", "boot-1"),
        Presence("cam-1", "online", "boot-1", 12, "jetson", "cuda", "training", 4, 6),
        Report("cam-1", 4, 7, {"accuracy": 0.75, "num_test": 100.0}),
        RolledBack("cam-1", 4, 7, 6, "crashed", "SIGSEGV"),
        Announcement("boot-1", 4, "open", 59.5, SPEC, 1, bytes(16)),
    ]


def _frames(data: bytes) -> str:
    found = codec.decode(data)
    if codec.decode(codec.encode(found)) != found and not isinstance(found, Block):
        raise AssertionError("a message changed on its way")
    assert not isinstance(found, Offer) or len(found.manifest.mark) == 8
    return type(found).__name__


def _facts(data: bytes) -> None:
    found = decode_facts(data)
    assert decode_facts(encode_facts(found)) == found


def _tensors(data: bytes) -> None:
    for array in decode_arrays(data).values():
        array.sum()


def _encodings(data: bytes) -> None:
    encoding, size, raw = taken_apart(data, tuple[str, int, bytes])
    if not 0 <= size <= MAX_UNFOLDED_BYTES:
        raise MalformedMessage("refused from its offer")
    found = decompress(encoding, raw, size)
    assert len(found) == size


def _topics(data: bytes) -> None:
    text = data.decode(errors="replace")
    address = parse_topic(text)
    assert topic_of(address.fleet, address.channel, address.peer) == text


class _Links:
    """Both connections of a courier that nobody hears; notes what it would say."""

    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.control = self.data = self
        self.said: set[str] = set()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        message = codec.decode(payload)
        self.said.add(f"{parse_topic(topic).channel} {type(message).__name__} {getattr(message, 'reason', '')}")


def _courier(folder: str) -> tuple[FleetCourier, DiskBlobStore, set[str]]:
    store, links = _store(folder), _Links()
    store.collect(set())
    for part in store.parts.iterdir():
        part.unlink()
    limits = TransferLimits(MAX_UNFOLDED_BYTES, MAX_UNFOLDED_BYTES, max_open=2)
    return FleetCourier("aggregator", FLEET, links, store, Plain(), limits=limits), store, links.said


@cache
def _store(folder: str) -> DiskBlobStore:
    return DiskBlobStore(scratch() / folder)


def _hears(courier: FleetCourier, topic: str, frame: bytes, now: float) -> set[str]:
    """Let a courier take a frame and do what a service does then; returns what happened."""
    happened = set()
    events = courier.handle(topic, frame, now)
    while events:
        event = events.pop()
        happened.add(f"{type(event).__name__} {getattr(event, 'error', '')}")
        if isinstance(event, Offered):
            events += courier.accept(event.peer, event.offer, now)
        elif isinstance(event, Arrived):
            courier.conclude(event.peer, event.manifest, event.transfer_id, accepted=True)
    return happened


def _bundles(data: bytes) -> None:
    """A bundle whose blocks are as its offer says, whatever they unfold to."""
    parts = taken_apart(data, list[tuple[str, int, bytes, bool]])
    digests = [
        digest(decompress(encoding, raw, size)) if honest else hashlib.sha256(bytes([place % 256])).hexdigest()
        for place, (encoding, size, raw, honest) in enumerate(parts)
        if 0 <= size <= MAX_UNFOLDED_BYTES or not honest
    ]
    bundle, block_bytes = b"".join(raw for _, _, raw, _ in parts), 1024
    blocks = [bundle[start : start + block_bytes] for start in range(0, len(bundle), block_bytes)]
    entries = tuple(BlobEntry(f"set/{place}", name, parts[place][1]) for place, name in enumerate(digests))
    said = offer(
        *(BundlePart(name, len(raw), encoding) for name, (encoding, _, raw, _) in zip(digests, parts, strict=False)),  # type: ignore[arg-type]
        manifest=manifest(blobs=entries),
        block_digests=b"".join(hashlib.sha256(block).digest() for block in blocks),
    )
    courier, _, _ = _courier("bundles")
    up = topic_of(FLEET, "up", "cam-1")
    happened = _hears(courier, up, codec.encode(said), 0.0)
    for index, block in enumerate(blocks):
        happened |= _hears(courier, up, codec.encode(Block(said.transfer_id, index, block)), float(index))
    courier.tick(1e3)
    if "Arrived " not in happened:
        raise MalformedMessage(f"not taken: {sorted(happened)}".replace("[", ""))


def _packed_blobs(data: bytes) -> None:
    """What a frame holds, whatever its checksum: zstd's own damage is the encodings' target."""
    inside, base, size = taken_apart(data, tuple[bytes, bytes | None, int])
    if not 0 <= size <= MAX_UNFOLDED_BYTES:
        raise MalformedMessage("refused from its offer")
    found = unpack(folded(inside), base, size)
    assert len(found) == size


def _packed(raw: bytes, base: bytes | None, steps: dict[str, float]) -> tuple[bytes, bytes | None, int]:
    return unfolded(pack(raw, base, steps) or b"", len(raw)), base, len(raw)


def _part(raw: bytes, *, honest: bool = True) -> tuple[str, int, bytes, bool]:
    encoding, encoded = compress(raw)
    return encoding, len(raw), bytes(encoded), honest


def _conversations(data: bytes) -> str:
    """Any messages on any topics, one after the other, to a courier that is in the middle of its own transfers."""
    said = taken_apart(data, list[tuple[str, Any, float]])
    courier, store, told = _courier("conversations")
    own = store.put(b"what the aggregator sends" * 200)
    down = manifest("down", blobs=(BlobEntry("task", own, 5000),))
    transfer_id = courier.send("cam-1", down, [own], 0.0)
    now = 0.0
    happened: set[str] = set()
    for topic, message, waits in said:
        if isinstance(message, dict):
            message = {key: transfer_id if value == "1f" * 16 else value for key, value in message.items()}
        head = b"\x01" if not isinstance(message, bytes) else b"\x02"
        body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        happened |= _hears(courier, topic, head + bytes([PROTOCOL_VERSION]) + body, now)
        now += min(max(waits, 0.0), 1e4)
        courier.tick(now)
    courier.tick(now + 1e6)  # gives up, and closes, what is still open
    if courier.counters["malformed"] == len(said):
        raise MalformedMessage("nothing was understood")
    return f"{sorted(happened)} {sorted(told)}"


def _conversation() -> list[Any]:
    raw = bytes(3000)
    blocks = [raw[start : start + 1024] for start in range(0, 3000, 1024)]
    entry = BlobEntry("task", digest(raw), 3000)
    said = offer(
        BundlePart(entry.digest, 3000, "raw"),
        manifest=manifest(blobs=(entry,)),
        block_digests=b"".join(hashlib.sha256(block).digest() for block in blocks),
    )
    up, control, state = (topic_of(FLEET, channel, "cam-1") for channel in ("up", "control", "state"))
    plain: list[Any] = [(up, said, 0.1)]
    plain += [(up, codec.encode(Block(said.transfer_id, i, block))[2:], 0.1) for i, block in enumerate(blocks)]
    about_ours = [
        Progress("client", "1f" * 16, 0, (), 8),
        Want("client", "1f" * 16, ("ab" * 32,)),
        Verdict("client", "1f" * 16, 4, (1 << 32) + 7, True),
    ]
    plain += [(control, message, 1.0) for message in about_ours]
    plain += [(state, message, 0.1) for message in messages() if isinstance(message, Presence)]
    return msgspec.to_builtins(plain, builtin_types=(bytes,))


@cache
def _fleet() -> Any:
    """A whole aggregator, which an input finds as the one before left it; one of its clients is hostile."""
    from support.tiny_fleet import TinyFleet

    fleet = TinyFleet(scratch() / "fleet", ("cam-1", "cam-2"), num_clients=2, min_clients=1, num_rounds=None)
    fleet.run(until=lambda: fleet.rounds.index == 2)
    return fleet


def _members(data: bytes) -> str:
    """What an enrolled client signs and says to its aggregator, while time passes and rounds go on."""
    said = taken_apart(data, list[tuple[str, dict[str, Any] | bytes, float]])
    fleet = _fleet()
    coordinator, counters = fleet.service.coordinator, fleet.service._parts.courier.counters
    signer, before, place = fleet.clients["cam-1"].signer, counters["malformed"], coordinator.rounds.index
    for topic, message, waits in said:
        if isinstance(message, bytes):
            payload = b"\x02" + bytes([PROTOCOL_VERSION]) + message
        else:
            frame = b"\x01" + bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(_now(message, place))
            payload = signer.seal(topic, frame)
        coordinator.on_message(topic, payload, fleet.now)
        fleet.now += min(max(waits, 0.0), 100.0)
        coordinator.tick(fleet.now)
        fleet.service.loop.pump(0)
    if fleet.service._parts.metrics.errors._value.get():  # type: ignore[attr-defined]
        fleet.service._parts.metrics.errors._value.set(0)  # type: ignore[attr-defined]
        raise AssertionError("an error that nobody expected")
    if counters["malformed"] - before == len(said):
        raise MalformedMessage("nothing was understood")
    return f"{coordinator.rounds.phase} {coordinator.rounds.index - place}"


def _now(message: Any, place: int) -> Any:
    """Put the open round in the place of round 0: what was recorded is of a fleet that was younger."""
    if isinstance(message, dict):
        return {key: place if key == "round" and value == 0 else _now(value, place) for key, value in message.items()}
    return message


def _member_seeds() -> list[bytes]:
    from support.tiny_fleet import FLEET as TINY_FLEET
    from support.tiny_method import TinyUpload
    from torch import ones

    upload = TinyUpload({"w": ones(4)}, {0: {"g": ones(3)}})
    store = DiskBlobStore(scratch() / "member")
    packed = encode_artefacts(upload.pack(), store)
    draft = Manifest("up", TINY_FLEET, "cam-1", 0, 3, packed.blobs, packed.facts)
    raws = [store.read(entry.digest) for entry in packed.blobs]
    parts = tuple(BundlePart(entry.digest, entry.size_bytes, "raw") for entry in packed.blobs)
    block_digests = hashlib.sha256(b"".join(raws)).digest()
    said = Offer("client", "2f" * 16, draft, parts, 1024, block_digests)
    up, control, state = (topic_of(TINY_FLEET, channel, "cam-1") for channel in ("up", "control", "state"))
    words: list[Any] = [(state, Presence("cam-1", "online", "boot-9", 1 << 20), 0.1), (up, said, 0.1)]
    words.append((up, codec.encode(Block(said.transfer_id, 0, b"".join(raws)))[2:], 30.0))
    words += [(control, message, 1.0) for message in messages() if not isinstance(message, (Offer, Announcement))]
    words.append((topic_of(TINY_FLEET, "round"), messages()[-1], 40.0))
    return [document(words)]


def _upload_seeds() -> Sequence[bytes]:
    """One upload of every kind that a fleet may run: each set of its layout, each fact with a number."""
    found = []
    for name, (_, layout) in _methods().items():
        names = ("task", "sub-generator/0", "gradient", "fisher", "flow", "generator")
        sets = {one: SAFETENSORS.parse(encode_arrays(SMALL)) for one in names if layout(one) is not None}
        for one, many in itertools.product((8, [0]), ({"0": 8}, [0], 8)):
            numbers = dict.fromkeys(("num_samples", "num_updates", "num_filled"), one)
            data = document([name, sets, {**numbers, **dict.fromkeys(("seen", "counts"), many)}])
            try:
                _uploads(data)
            except UploadRejected:
                continue
            found.append(data)
            break
        else:
            raise AssertionError(f"no upload of {name} is known here")
    return found


SMALL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
"""In the place of every parameter set: what checks its layout doesn't know how large a network is."""


@cache
def _methods() -> dict[str, tuple[Any, Callable[[str], Any]]]:
    import torch

    from replayfleet.federation.methods import METHODS
    from replayfleet.federation.service.fleet.spec import make_spec, method_of

    small = {name: torch.from_numpy(array) for name, array in SMALL.items()}
    task = TaskSpec(1, 28, ("a", "b"), generator_width=1)
    kinds: dict[Any, Any] = {}
    for name, method in METHODS.items():
        if method.deployable and method.Upload not in kinds:
            made = method_of(make_spec(FLEET, name, task, preset="tiny", overrides={}, run_seed=0))
            known = cache(lambda one, made=made: made.upload_layout(one) is not None)
            kinds[method.Upload] = name, made, lambda one, known=known: small if known(one) else None
    return {name: (made, layout) for name, made, layout in kinds.values()}


def _uploads(data: bytes) -> str:
    name, given, facts = taken_apart(data, tuple[str, dict[str, bytes | list[Any]], bytes | dict[str, Any]])
    if name not in _methods():
        raise Unfit
    try:
        sets = {key: raw if isinstance(raw, bytes) else SAFETENSORS.unparse(raw) for key, raw in given.items()}
    except (ValueError, TypeError, struct.error) as error:
        raise Unfit from error
    method, layout = _methods()[name]
    entries = tuple(BlobEntry(set_name, set_name, len(raw)) for set_name, raw in sets.items())
    packed = facts if isinstance(facts, bytes) else msgspec.msgpack.encode(facts)
    store = SimpleNamespace(read=sets.__getitem__, mapped=sets.__getitem__)
    decode_upload(method, manifest(blobs=entries, facts=packed), store, layout)
    return name


def _agreements(data: bytes) -> str:
    """What a fleet agrees on, as an announcement brings it: a client makes its method of it."""
    from replayfleet.federation.service.fleet.spec import method_of

    found = codec.decode(b"\x01" + bytes([PROTOCOL_VERSION]) + data)
    if not isinstance(found, Announcement):
        raise MalformedMessage("another message")
    method_of(found.spec)
    return found.spec.method


def _agreement_seeds() -> list[bytes]:
    specs = (
        ("fedavg", {"local_epochs": 1, "learning_rate": 0.05}, msgspec.to_builtins(TaskSpec(1, 28, ("a", "b")))),
        ("pfedgrp", {"gan_batch_size": 8}, msgspec.to_builtins(TaskSpec(3, 32, ("a", "b", "c")))),
        ("fedgp", {}, {"kind": "detection", **msgspec.to_builtins(BOXES)}),
    )
    said = (FleetSpec(FLEET, method, settings, task, 7) for method, settings, task in specs)
    return [msgspec.msgpack.encode(Announcement("boot", 1, "open", 9.0, spec)) for spec in said]


BOXES = DetectionSpec(3, 64, 96, ("car", "bike"), anchors=((0.25, 0.25),), stride=32, max_boxes=3)


@cache
def _desks() -> list[OperatorDesk]:
    picture = Picture("front", 7, np.zeros((64, 96, 3), np.uint8), 0.0)
    classes, boxes = FeedbackDesk(("cat", "dog"), 1e9, lambda: 0.0), BoxFeedbackDesk(BOXES, 1e9, lambda: 0.0)
    classes.keep(Shown(picture, Inputs(np.zeros((2, 3, 8, 8), np.float32)), None))
    boxes.keep(Shown(picture, Inputs(np.zeros((1, 3, 64, 96), np.float32)), None))
    return [OperatorDesk(tuple, learn, lambda: 0.0) for learn in (classes.samples, boxes.samples)]


def _feedback(data: bytes) -> None:
    """A word for two clients: one learns classes, the other boxes."""
    classes, boxes = _desks()
    try:
        classes.take(data)
    except FeedbackRefused:
        boxes.take(data)


def graph() -> bytes:
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", dims=[3, 2], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="parameters")
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 3])
    nodes = [
        helper.make_node("Constant", [], ["s"], value=shape),
        helper.make_node("Reshape", ["x", "s"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
        helper.make_node("Softmax", ["y"], ["z"], axis=1),
    ]
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 2])],
        [weight, helper.make_tensor("b", TensorProto.FLOAT, [2], [0.5, 1.0])],
    )
    model = helper.make_model(made)
    helper.set_model_props(model, {"replayfleet.classes": '["a", "b"]'})
    return bytes(model.SerializeToString())


def _graphs(data: bytes) -> str:
    found = inspect_graph(data)
    input_names(data)
    return f"{len(found.parameters)} parameters"


_FRAME = after(2, MSGPACK)
_BOMB = compress(bytes(MAX_UNFOLDED_BYTES))

STRANGERS = {
    "frames": Target(
        seeds(lambda: [*map(codec.encode, messages()), codec.encode(Block("0f" * 16, 3, b"block" * 30))]),
        _frames,
        (MalformedMessage,),
        _FRAME,
    ),
    "facts": Target(
        seeds(lambda: [encode_facts(FACTS), encode_facts({"": 2**60})]), _facts, (MalformedMessage,), MSGPACK
    ),
    "tensors": Target(
        seeds(lambda: [encode_arrays(ARRAYS), encode_arrays({})]), _tensors, (MalformedMessage,), SAFETENSORS
    ),
    "encodings": Target(
        seeds(
            lambda: [
                document(["raw", 5, b"plain"]),
                *(document([*_part(raw)[:2], _part(raw)[2]]) for raw in (bytes(5000), encode_arrays(ARRAYS) * 30)),
                document([_BOMB[0], MAX_UNFOLDED_BYTES, bytes(_BOMB[1])]),
            ]
        ),
        _encodings,
        (MalformedMessage,),
        MSGPACK,
    ),
    "packed": Target(
        seeds(lambda: [document([*_packed(*a_difference())]), document([*_packed(halves(), None, {})])]),
        _packed_blobs,
        (MalformedMessage,),
        MSGPACK,
    ),
    "bundles": Target(
        seeds(
            lambda: [
                document([_part(bytes(9000)), _part(bytes(range(256)) * 9)]),
                document([("raw", 3000, b"abc" * 1000, True)]),
                document([_part(encode_arrays(ARRAYS) * 30)]),
            ]
        ),
        _bundles,
        (MalformedMessage,),
        MSGPACK,
    ),
    "conversations": Target(seeds(lambda: [document(_conversation())]), _conversations, (MalformedMessage,), MSGPACK),
    "members": Target(seeds(_member_seeds), _members, (MalformedMessage,), MSGPACK),
    "topics": Target(
        seeds(lambda: [topic_of(FLEET, "round").encode(), topic_of(FLEET, "up", "cam-1").encode()]),
        _topics,
        (MalformedMessage,),
    ),
    "uploads": Target(seeds(_upload_seeds), _uploads, (UploadRejected,), MSGPACK),
    "agreements": Target(seeds(_agreement_seeds), _agreements, (MalformedMessage, SettingsError), MSGPACK),
    "graphs": Target(seeds(lambda: [graph()]), _graphs, (ArtefactRejected,), PROTOBUF),
    "feedback": Target(
        seeds(
            lambda: [
                b'{"camera": "front", "frame": 7, "class": "cat", "object": 1}',
                b'{"frame":7,"boxes":[{"class":"car", "box": [1, 2, 9, 6.5]},{"class": "bike", "box": [0, 0, 9, 9]}]}',
            ]
        ),
        _feedback,
        (FeedbackRefused,),
        JSON,
    ),
    "studio's questions": Target(
        seeds(
            lambda: [
                b'{"id":7,"act":"boxes","session":"00ff","camera":"front","frame":7,"boxes":[{"class":"car","box":[1,2,9,9]}]}',
                b'{"id": 7, "act": "label", "session": "00ff", "camera": "front", "frame": 7, "class": "cat"}',
            ]
        ),
        decode_question,
        (MalformedMessage,),
        JSON,
    ),
    "thumbnails": Target(
        seeds(lambda: [encode_thumbnail(Thumbnail("front", 7, JPEG + bytes(40)))]),
        decode_thumbnail,
        (MalformedMessage,),
        MSGPACK,
    ),
    "studio's answers": Target(
        seeds(lambda: [msgspec.msgpack.encode(Answer(7, "00ff", said="cat", state=b"{}", picture=b"\xff\xd8\xff"))]),
        decode_answer,
        (MalformedMessage,),
        MSGPACK,
    ),
}
