"""Hot swaps under load: frames flow through the real loop while one real model after the other takes over.

Every version is the task model with parameters of its own, in a serving process of its own, checked, swapped in and put
on probation as in a client. Every answer is compared with what PyTorch says about that picture with that version's
parameters; pictures on which PyTorch's two best classes lie within ``MARGIN`` are not counted as wrong.

    python -m benchmarks.camera.hot_swaps [--swaps 200] [--rate-hz 30] [--out benchmarks/results/hot_swaps.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import run
from replayfleet.edge_client.cameras.recorded.scene import SceneCamera
from replayfleet.edge_client.flow import Inputs, Picture, Prediction, Shown
from replayfleet.edge_client.frames.answerer import Answerer, FrameCounts
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.serving.model import WorkerModel, Workers
from replayfleet.edge_client.serving.probation.guard import Guard
from replayfleet.edge_client.serving.proc import anonymous_bytes
from replayfleet.edge_client.serving.slot import Candidate, Model, ModelSlot
from replayfleet.edge_client.sync.download import candidate
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import make_probe
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Serving
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise

SPEC = TASKS["fashion-mnist"]
NUM_PICTURES = 60
MARGIN = 1e-3
WARM_UP = 5
"""Swaps before memory is measured for the first time: Python's and NumPy's own pools fill."""

GOALS = {"swap_s": 0.05, "growth_bytes": 10 << 20}


class Versions:
    """What an aggregator would send, and what is right about every picture."""

    def __init__(self, folder: Path) -> None:
        self._store = DiskBlobStore(folder)
        graph = task_graph(SPEC)
        self._graph = BlobEntry("graph/task", self._store.put(graph), len(graph))
        self._workers = Workers(folder, num_threads=1, providers=("CPUExecutionProvider",))
        rng = np.random.default_rng(0)
        grey = rng.integers(0, 256, (NUM_PICTURES, 28, 28, 1), np.uint8)
        self.pictures: NDArray[np.uint8] = np.repeat(grey, 3, axis=3)
        self._images = np.concatenate([picture_inputs(picture).images for picture in self.pictures])
        self.right: dict[int, NDArray[np.int64]] = {}
        """Version -> class of every picture; -1 where two are about as good."""

    def make(self, version: int) -> Candidate:
        """Return a version as something to install."""
        module = initialise(build_task_model(SPEC), torch.Generator().manual_seed(version))
        run = eager_run(module)
        logits = run(self._images)
        best = np.sort(logits, axis=1)
        self.right[version] = np.where(best[:, -1] - best[:, -2] > MARGIN, logits.argmax(axis=1), -1)
        data = encode_parameters(dict(module.state_dict()))
        parameters = BlobEntry("task", self._store.put(data), len(data))
        serving = Serving("graph/task", "task", make_probe(run, SPEC.image_shape, seed=version))
        blobs = (self._graph, parameters)
        return candidate(
            Manifest("down", "fleet", "cam", version, version, blobs, b"\x80", serving), SPEC, self._workers
        )


def picture_inputs(picture: NDArray[np.uint8]) -> Inputs:
    """Return what a whole picture asks the task model."""
    return WholePicture(SPEC).inputs(Picture("cam", 0, picture, 0.0))


@dataclass
class Swap:
    """One of them.

    Attributes:
        version: which model took over.
        load_s: starting its process, loading, warming up and checking, while the one before it answered.
        decided_at: monotonic seconds at which it had passed its last check.
    """

    version: int
    load_s: float
    decided_at: float = 0.0


def timed(made: Candidate, swap: Swap) -> Candidate:
    """Return the candidate with its last check noting the time."""

    def check(model: Model) -> None:
        made.check(model)
        swap.decided_at = time.monotonic()

    return dataclasses.replace(made, check=check)


def swapped(num_swaps: int, rate_hz: float, folder: Path) -> dict[str, Any]:
    """Return what became of all frames, how long swaps took, and how memory grew."""
    versions, slot = Versions(folder), ModelSlot()
    # All are made before a frame flows: an aggregator does that, and not on the device.
    downloads = [versions.make(version) for version in range(1, WARM_UP + num_swaps + 2)]
    gc.collect()
    gc.freeze()  # nor does a device have PyTorch's objects, through which a collection goes for longer than a frame
    guard = Guard(slot)
    seen: list[Prediction] = []

    def take(shown: Shown) -> None:
        if shown.prediction is not None:
            seen.append(shown.prediction)

    slot.install(downloads[0])
    camera = SceneCamera(rate_hz)
    camera.show(versions.pictures)
    loop = InferenceLoop([camera], Answerer(slot, WholePicture(SPEC), on_answer=guard.saw), take)
    guard.start()
    loop.start()
    swaps: list[Swap] = []
    client_bytes: list[int] = []
    serving_bytes: list[int] = []
    try:
        for download in downloads[1:]:
            swap = Swap(download.version, 0.0)
            began = time.monotonic()
            slot.install(timed(download, swap))
            swap.load_s = swap.decided_at - began
            swaps.append(swap)
            wait_for(seen, download.version)
            if len(swaps) >= WARM_UP:
                client_bytes.append(anonymous_bytes(os.getpid()) or 0)
                serving_bytes.append(worker_bytes(slot))
    finally:
        loop.stop()
        guard.stop()
        slot.clear()
        gc.unfreeze()
    return {
        **results(swaps[WARM_UP:], seen, loop.counts, versions),
        "rollbacks": slot.num_rollbacks,
        "client_growth_bytes": client_bytes[-1] - client_bytes[0],
        "serving_growth_bytes": serving_bytes[-1] - serving_bytes[0],
        "client_bytes": client_bytes[-1],
        "serving_bytes": serving_bytes[-1],
    }


def results(swaps: list[Swap], seen: list[Prediction], counts: FrameCounts, versions: Versions) -> dict[str, Any]:
    """Return counts of frames, and times of swaps."""
    first_answers: dict[int, float] = {}
    wrong = 0
    for prediction in seen:
        first_answers.setdefault(prediction.model_version, prediction.answered_at)
        right = versions.right[prediction.model_version][prediction.frame_id % NUM_PICTURES]
        wrong += int(right != -1 and prediction.answers.class_ids.tolist() != [int(right)])
    times = [first_answers[swap.version] - swap.decided_at for swap in swaps]
    order = [prediction.model_version for prediction in seen]
    return {
        "swaps": len(swaps),
        "frames_captured": counts.num_captured,
        "frames_answered": counts.num_frames,
        "frames_dropped": counts.num_dropped,
        "frames_failed": counts.num_failed,
        "answers_wrong": wrong,
        "versions_only_rise": order == sorted(order),
        "swap_s": {"median": statistics.median(times), "max": max(times)},
        "load_s": {"median": statistics.median(s.load_s for s in swaps), "max": max(s.load_s for s in swaps)},
        "prediction_age_p95_s": counts.latency_p95_s,
    }


def wait_for(seen: list[Prediction], version: int) -> None:
    """Wait until a version has answered a few frames."""
    deadline = time.monotonic() + 60
    while not seen or seen[-1].model_version != version:
        if time.monotonic() > deadline:
            raise RuntimeError(f"version {version} answered nothing within a minute")
        time.sleep(0.005)
    threading.Event().wait(0.05)


def worker_bytes(slot: ModelSlot) -> int:
    """Return what the process that serves occupies."""
    model = slot.active.model if slot.active is not None else None
    return (model.memory_bytes or 0) if isinstance(model, WorkerModel) else 0


def missed(result: dict[str, Any]) -> list[str]:
    """Return the goals that a result misses."""
    growth = max(result["client_growth_bytes"], result["serving_growth_bytes"])
    checks = {
        "a frame was dropped or failed": result["frames_dropped"] + result["frames_failed"] > 0,
        "an answer was wrong": result["answers_wrong"] > 0 or not result["versions_only_rise"],
        "a model was rolled back": result["rollbacks"] > 0,
        "a swap took 50 ms": result["swap_s"]["max"] > GOALS["swap_s"],
        "memory grew by 10 MB": growth > GOALS["growth_bytes"],
    }
    return [name for name, failed in checks.items() if failed]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = swapped(options.swaps, options.rate_hz, Path(folder))
    for name, value in result.items():
        print(f"{name:24} {value}")
    return result


if __name__ == "__main__":
    run(measure, __doc__, failed=missed, swaps=(200, ""), rate_hz=(30.0, "pictures per second"), threads=1)
