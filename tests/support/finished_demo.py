"""A folder as a finished demo leaves it, made in a second: journal, store with untrained models, FedAvg's result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.demo_journal import CLASS_NAMES, CLIENTS, WEIGHTS, baseline_result, journal, spec

from replayfleet.aggregator.aggregation import store_artefacts
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.methods.kit import packing
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientRecord
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, CLASS_NAMES, "cifar", 16)


def finished_demo(out: Path, *, sent: tuple[int, ...] = (2, 2, 0), **changed: Any) -> Path:
    """Write everything that the report reads, of a fleet with these settings of the method; returns ``out``."""
    folder = out / "aggregator"
    folder.mkdir(parents=True)
    lines = [json.dumps(event) for event in journal(sent=sent, **changed)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    blobs, store = DiskBlobStore(folder / "blobs"), AggregatorStore(folder)
    store.found(FleetSpec(**spec(**changed)), 0.0)
    store.close_round(0, 1.0)
    store.commit_round(0, store_artefacts(_state(single=changed.get("generators") == "single").pack(), blobs), {}, 2.0)
    store.close()
    (out / "fedavg").mkdir()
    (out / "fedavg" / "result.json").write_bytes(baseline_result().encode())
    noted: dict[str, Any] = {"preset": "tiny", "broker": "private mosquitto 2.0 on 127.0.0.1:1, without persistence"}
    (out / "demo.json").write_text(
        json.dumps({**noted, "command": ["python", "-m", "replayfleet.scripts.demo", "--fast"]})
    )
    return out


def tiny_images() -> Dataset:
    """Three images per class; a class's images are as bright as its id says."""
    labels = np.repeat(np.arange(len(CLASS_NAMES)), 3)
    images = np.broadcast_to((labels * 60).astype(np.uint8)[:, None, None, None], (len(labels), 28, 28, 1))
    part = LabelledImages(np.ascontiguousarray(images), labels.astype(np.int64), CLASS_NAMES)
    return Dataset("fashion-mnist", part, part, TASK)


def _state(*, single: bool) -> AggregatorState:
    rng = torch.Generator().manual_seed(0)
    task = initialise(build_task_model(TASK), rng).state_dict()
    generators = {c: initialise(build_generator(TASK), rng).state_dict() for c in range(len(CLASS_NAMES))}
    seen = dict.fromkeys(generators, 40)
    if single:
        wide = replace(TASK, generator_width=2 * TASK.generator_width)
        generators = {packing.ALL_CLASSES: initialise(build_generator(wide), rng).state_dict()}
    clients = {name: ClientRecord(task, generators, seen, task, WEIGHTS[name]) for name in CLIENTS}
    return AggregatorState(clients=clients, average=task)
