"""Targets: what operators write and what lies on disks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from replayfleet.aggregator.console.story import Story
from replayfleet.aggregator.control.curves import points
from replayfleet.aggregator.control.growing import add_classes
from replayfleet.aggregator.control.verbs import (
    CloseRound,
    Drain,
    Exclude,
    ExtendRound,
    OpenRound,
    Pause,
    Readmit,
    Resume,
    RollBack,
    decode_verb,
    name_of,
)
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.edge_client.cameras.uri import parse_sources
from replayfleet.edge_client.doctor.settings import DoctorSettings
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.edge_client.state_store import HeldDownload, Pace, SentAway, Settled, StateStore, TrainingCommit, Trial
from replayfleet.export.first_model import initial_parameters
from replayfleet.export.parameters import Model, read_parameter_file
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.service.data_dir import MARKER, claim_data_dir, read_owner
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.fleet.task import task_kind
from replayfleet.federation.service.settings import read_settings, read_toml, settings_from
from replayfleet.federation.streams.annotations import read_class_names, read_coco, read_yolo
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, redacted
from replayfleet.models.specs import TaskSpec
from tests.fuzz.forms import JSON, JSON_LINES, MSGPACK, SAFETENSORS, URIS, document, taken_apart, toml_of
from tests.fuzz.mutation import Unfit
from tests.fuzz.strangers import BLOBS, BOXES, SERVED, SPEC
from tests.fuzz.target import Target, scratch, seeds

_SMALL = TaskSpec(1, 28, ("a", "b"), architecture="lenet")
_VERBS = (
    Exclude("cam-1", "a dirty lens"),
    Readmit("cam-1"),
    Pause(),
    Drain(),
    Resume(),
    RollBack("*"),
    RollBack("cam-1", 7),
    CloseRound(),
    ExtendRound(60.0),
    OpenRound(),
)


def written(data: bytes, name: str) -> Path:
    path = scratch() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def on_disk(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        read(written(data, name))

    return feed


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _parameter_files(data: bytes) -> str:
    found = read_parameter_file(written(data, "model.safetensors"))
    return found.model.kind if found.model is not None else "plain"


def _parameter_seeds() -> list[bytes]:
    spec = TaskSpec(1, 28, ("a", "b"))
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    return [Model(kind, spec, {"w": plain, "n": np.array([1])}).encode() for kind in ("task", "sub-generator")]


_KINDS: dict[str, type[Any]] = {
    "client": ClientSettings,
    "aggregator": AggregatorSettings,
    "doctor": DoctorSettings,
}


def _settings(data: bytes) -> str:
    """A file, variables and options at once, for one of the programs; the file may be any text."""
    kind, file, environment, given = taken_apart(
        data, tuple[str, dict[str, Any] | bytes, dict[str, str], dict[str, str | list[str] | dict[str, str]]]
    )
    if kind not in _KINDS:
        raise Unfit
    content = file if isinstance(file, bytes) else toml_of(file)
    read_settings(_KINDS[kind], written(content, "settings.toml"), given, environment=environment)
    return kind


def _settings_seeds() -> list[bytes]:
    here = str(scratch() / "data")
    client = {
        "broker": "mqtts://broker.example:8883",
        "client_id": "cam-1",
        "source": ["front=camera://0?rate=30", "back=synthetic://"],
        "data_dir": here,
    }
    trains = {"max_temperature_c": 80.5, "threads": 2, "stay": True}
    aggregator = {"data_dir": here, "clients": 3, "rounds": 5, "deadline_s": 60.5, "set": {"learning_rate": 0.1}}
    return [
        document(["client", {**client, **trains}, {"REPLAYFLEET_THREADS": "4"}, {"fleet": "x"}]),
        document(["aggregator", aggregator, {"REPLAYFLEET_SEED": "1"}, {"clients": "4"}]),
        document(["doctor", {"ntp": "time:123"}, {}, {"source": ["camera://0"]}]),
        document(["doctor", toml_of(client), {}, {}]),
    ]


def _tasks(data: bytes) -> str:
    kind, fields = task_kind(read_toml(written(data, "task.toml")))
    settings_from(kind, fields, "task.toml")
    return kind.__name__


_TASKS = [
    toml_of(msgspec.to_builtins(TaskSpec(1, 28, ("a", "b")))),
    toml_of({"kind": "detection", **msgspec.to_builtins(BOXES)}),
]


_RECORDS: dict[str, Any] = {
    "training": TrainingCommit(4, 7, "ab" * 32, BLOBS, b"", BLOBS, b"", 1.5, 20, 2, 1),
    "verdict": Settled(7, "accepted"),
    "held": HeldDownload(SERVED, SPEC),
    "previous": HeldDownload(SERVED, SPEC),
    "probation": Trial(7),
    "rolled-back": SentAway(7, 4, "crashed", "SIGSEGV"),
    "pace": Pace("ab" * 32, 2),
}


def _records(data: bytes) -> str:
    """A client starts with any of its records: [name, what stands in it, whether its digest fits]."""
    name, record, fits = taken_apart(data, tuple[str, Any, bool])
    store = StateStore(scratch())
    raw = record if isinstance(record, bytes) else msgspec.msgpack.encode(record)
    if name not in _RECORDS:
        raise Unfit
    written((hashlib.sha256(raw).digest() if fits else bytes(32)) + raw, f"state/{name}")
    found = [store.training(), store.pending(), store.held(), store.previous(), store.sent_away(), store.pace("", 1)]
    store.blobs_in_use()
    store.begin()
    if not store.on_probation:
        store.goodbye()
    return f"{name} {sum(one is not None for one in found)}"


def _journals(data: bytes) -> str:
    """Whatever stands in a journal: its numbers are exported, its events told and searched."""
    folder = written(data, "run/events.jsonl").parent
    story = Story(folder)
    story.follow()
    story.search("round", limit=5)
    return str(len(list(points(read_journal(folder)))))


def _initial_models(data: bytes) -> None:
    initial_parameters(written(data, "model.safetensors"), _fedavg(), 0)


@cache
def _fedavg() -> Any:
    return method_of(make_spec("f", "fedavg", _SMALL, preset="tiny", overrides={}, run_seed=0))


def _initial_seeds() -> list[bytes]:
    model = _fedavg().initial_download(torch.Generator().manual_seed(0)).task_parameters
    return [Model("task", _SMALL, {name: tensor.numpy() for name, tensor in model.items()}).encode()]


def _added_classes(data: bytes) -> str:
    """What an operator calls new classes, in an aggregator's data dir."""
    names = taken_apart(data, list[str])
    if any("\0" in name for name in names):
        raise Unfit  # no command line has it
    return str(len(add_classes(_growing(), names, "anna", 0.0, only_plan=True).added))


@cache
def _growing() -> Path:
    folder = scratch() / "growing"
    claim_data_dir(folder, fleet="f", role="aggregator").close()
    store = AggregatorStore(folder)
    store.found(make_spec("f", "fedavg", _SMALL, preset="tiny", overrides={}, run_seed=0), 0.0)
    store.close()
    return folder


_JOURNAL = b"\n".join(
    json.dumps({"time": 100.0 + number, "event": event, "client": "cam-1", "round": 1, **fields}).encode()
    for number, (event, fields) in enumerate(
        (
            ("aggregator started", {"fleet": "f", "method": "fedavg", "clients": 2, "spec": {"method": "fedavg"}}),
            ("round opened", {"expected": 2, "deadline_s": 60.0}),
            ("upload accepted", {"bytes": 10, "num_samples": 4, "num_filled": 1, "seen": {"0": 3}}),
            ("upload rejected", {"reason": "not-finite", "detail": "x"}),
            ("round committed", {"round_s": 1.5, "aggregate_s": 0.5, "weights": {"cam-1": {"cam-1": 1.0}}}),
            ("client report", {"metrics": {"accuracy": 0.5, "swap_s": 0.25, "bytes_up": 9.0}}),
        )
    )
)

_COCO = {
    "images": [{"id": 1, "width": 640, "height": 480, "file_name": "a.png"}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [10.5, 20, 30, 40], "iscrowd": 0}],
    "categories": [{"id": 3, "name": "car"}, {"id": 4, "name": "bike"}],
}
_OWNER = {"format": 1, "fleet": "street", "role": "client", "owner": "cam-1"}
_SOURCES = (
    "dataset://fashion-mnist?scenario=circulating&clients=3&client=0&rounds=6&samples=200&seed=0&rate=10",
    "folder:///srv/images?per_round=64&rate=5",
    "front=camera://0?rate=30&width=640&height=480\nback=rtsp://user:password@host/path?x=1#transport=udp",
    "carla-replay:///data/carla?town=Town01\ncsi://0\nvideo:///a%20b.webm\nimages:///folder?rate=2",
    "carla://simulator:2000?town=Town01\nsynthetic://street?seed=3",
)


def _brokers(data: bytes) -> None:
    text = _text(data)
    redacted(text)
    found = BrokerAddress.parse(text, insecure=True)
    assert BrokerAddress.parse(str(found), insecure=True) == found


FILES = {
    "parameter files": Target(seeds(_parameter_seeds), _parameter_files, (SettingsError,), SAFETENSORS),
    "settings": Target(seeds(_settings_seeds), _settings, (SettingsError,), MSGPACK),
    "tasks": Target(seeds(lambda: _TASKS), _tasks, (SettingsError,)),
    "sources": Target(
        seeds(lambda: [text.encode() for text in _SOURCES]),
        lambda data: str([type(one).__name__ for one in parse_sources(_text(data).split("\n"))]),
        (SettingsError,),
        URIS,
    ),
    "brokers": Target(
        seeds(lambda: [b"mqtts://broker.example:8883", b"mqtt://127.0.0.1", b"mqtt://[::1]:1883/"]),
        _brokers,
        (SettingsError,),
    ),
    "credentials": Target(
        seeds(lambda: ["user\npasswörd\n".encode()]), on_disk("credentials", Credentials.load), (SettingsError,)
    ),
    "YOLO labels": Target(
        seeds(lambda: [b"0 0.5 0.5 0.25 0.125\n1 0.1 0.2 0.05 0.1\n\n", b""]),
        on_disk("a.txt", lambda path: read_yolo(path, 3, (640, 480))),
        (SettingsError,),
    ),
    "COCO files": Target(
        seeds(lambda: [json.dumps(_COCO).encode()]), on_disk("coco.json", read_coco), (SettingsError,), JSON
    ),
    "class names": Target(seeds(lambda: [b"car\nbike\n"]), on_disk("labels.txt", read_class_names), (SettingsError,)),
    "records": Target(
        seeds(lambda: [document([name, record, True]) for name, record in _RECORDS.items()]),
        _records,
        (),
        MSGPACK,
    ),
    "journals": Target(seeds(lambda: [_JOURNAL]), _journals, (), JSON_LINES),
    "initial models": Target(seeds(_initial_seeds), _initial_models, (SettingsError,), SAFETENSORS),
    "added classes": Target(
        seeds(lambda: [document(["tram"]), document(["tram", "ferry"])]), _added_classes, (SettingsError,), MSGPACK
    ),
    "verbs": Target(
        seeds(lambda: [msgspec.json.encode(verb) for verb in _VERBS]),
        lambda data: name_of(decode_verb(data)),
        (MalformedMessage,),
        JSON,
    ),
    "data dirs": Target(
        seeds(lambda: [json.dumps(_OWNER).encode()]),
        lambda data: str(read_owner(written(data, MARKER).parent, dict(_OWNER))),
        (SettingsError,),
        JSON,
    ),
}
