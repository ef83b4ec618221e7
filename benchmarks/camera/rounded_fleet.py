"""A fleet of real processes whose clients serve float32, float16 and INT8: what each rounded model costs and saves.

Three clients of pFedGRP learn Fashion-MNIST as it circulates. At the end every client's newest download is taken from
its disk: the rounded model that it serves and the float32 one that it was made of answer the same test images, and are
timed in turns. Told are besides the seconds that the aggregator took to publish each round, and why it kept float32.

    python -m benchmarks.camera.rounded_fleet [--rounds 6] [--out benchmarks/results/rounded_fleet.json]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.harness import run
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.edge_client.state_store import StateStore
from replayfleet.export.latency import median_latencies_s
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.labelled_images import normalise
from replayfleet.federation.wire.protocol.tensors import decode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.fleet.plan import DATASET, Yard
from replayfleet.scripts.launch.fleet import Limit, RunningFleet

WANTED = {"client-0": "fp32", "client-1": "fp16", "client-2": "int8"}
BATCH = 256


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        yard = Yard(
            out=Path(folder), clients=len(WANTED), rounds=options.rounds, source=DATASET, method="pfedgrp",
            preset=options.preset, rate=10.0, deadline_s=3600.0, seed=0,
        )  # fmt: skip
        yard.prepare()
        plan = yard.fleet()
        clients = {name: [*line, "--precision", WANTED[name]] for name, line in plan.clients.items()}
        with PrivateBroker() as broker:
            limit = Limit(time.monotonic(), options.limit_s)
            RunningFleet(replace(plan, clients=clients), broker, Console(quiet=True), limit).run()
        events = list(read_journal(plan.data_dir))
        data = load_dataset("fashion-mnist", data_root=options.data_root).test
        images, labels = normalise(np.asarray(data.images[: options.test])), data.labels[: options.test]
        result: dict[str, Any] = {
            "publish_s": [event["publish_s"] for event in events if event["event"] == "round committed"],
            "kept float32": [
                {name: event[name] for name in ("round", "client", "detail")}
                for event in events
                if event["event"] == "model not rounded"
            ],
        }
        for line in plan.clients.values():
            folder_of = Path(line[list(line).index("--data-dir") + 1])
            result[folder_of.name] = found = _of(folder_of, images, labels)
            print(folder_of.name, found, flush=True)
        return result


def _of(folder: Path, images: Any, labels: Any) -> dict[str, Any]:
    """Return what a client's newest model is, beside the float32 one that it was made of."""
    held = StateStore(folder, read_only=True).held()
    assert held is not None
    serving, blobs = held.manifest.serving, DiskBlobStore(folder / "blobs")
    assert serving is not None
    entries = {entry.name: entry for entry in held.manifest.blobs}

    def model(graph: str, parameters: str) -> OnnxModel:
        arrays = decode_arrays(blobs.read(entries[parameters].digest))
        return OnnxModel(blobs.read(entries[graph].digest), arrays, num_threads=1)

    models = {"float32": model("graph/task", serving.model), "served": model(serving.graph, serving.parameters)}
    answers = {name: _answers(one, images) for name, one in models.items()}
    found: dict[str, Any] = {
        "precision": serving.precision,
        "agreement": float((answers["served"] == answers["float32"]).mean()),
        "float32_bytes": entries["graph/task"].size_bytes + entries[serving.model].size_bytes,
        "served_bytes": entries[serving.graph].size_bytes + entries[serving.parameters].size_bytes,
        "download_bytes": sum(entry.size_bytes for entry in held.manifest.blobs),
    }
    for name, said in answers.items():
        found[f"{name}_accuracy"] = float((said == labels).mean())
    for size in (1, 64):
        timed = {name: functools.partial(one.run, images[:size]) for name, one in models.items()}
        seconds = median_latencies_s(timed, repeats=40, budget_s=4.0)
        found[f"batch_{size}_s"] = seconds
    return found


def _answers(model: OnnxModel, images: Any) -> Any:
    return np.concatenate([model.run(images[at : at + BATCH]).argmax(axis=1) for at in range(0, len(images), BATCH)])


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        rounds=(6, "of the fleet"),
        preset=("small", "of method and stream"),
        test=(10_000, "test images"),
        limit_s=(1500.0, "after which the fleet is given up"),
        data_root=None,
    )
