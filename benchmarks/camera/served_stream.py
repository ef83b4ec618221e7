"""A camera stream as a client serves it, without training: age of frames when they are answered, drops, memory.

A small RTSP server in a process of its own sends MJPEG at 640x384; the capture process, the serving loop and an ONNX
task model in its serving process do what they do in ``edge-client``. The age is from the grab to the answer. Torch is
never imported here: the model is exported by another process. The bound of the project: p95 at most 100 ms at 30
frames a second for ten minutes on two cores, memory flat, dropped = captured - answered.

    python -m benchmarks.camera.served_stream [--seconds 600] [--out benchmarks/results/served_stream.json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.camera.live_camera import SIZE, course, served_camera, shown, spread_ms
from benchmarks.harness import cpu_s, resident_mb, run
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.frames.answerer import Answerer
from replayfleet.edge_client.frames.inference import InferenceLoop
from replayfleet.edge_client.frames.views import WholePicture
from replayfleet.edge_client.serving.model import WorkerModel, Workers
from replayfleet.edge_client.serving.probation.guard import Guard
from replayfleet.edge_client.serving.slot import Candidate, ModelSlot
from replayfleet.edge_client.sync.download import candidate
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(3, 32, ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign"))

_EXPORT = """
import sys, msgspec, torch
from pathlib import Path
from replayfleet.export.running.artefact import make_probe
from replayfleet.export.graphs.graph import task_graph
from replayfleet.export.parity import eager_run
from replayfleet.federation.wire.protocol.messages import BlobEntry, Manifest, Serving
from replayfleet.federation.service.artefact_codec import encode_parameters
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec
task = TaskSpec(3, 32, ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign"))
module = initialise(build_task_model(task), torch.Generator().manual_seed(0))
folder = Path(sys.argv[1])
store = DiskBlobStore(folder)
entries = []
for name, data in (("graph/task", task_graph(task)), ("task", encode_parameters(dict(module.state_dict())))):
    entries.append(BlobEntry(name, store.put(data), len(data)))
serving = Serving("graph/task", "task", make_probe(eager_run(module), task.image_shape, seed=0))
manifest = Manifest("down", "fleet", "cam", 1, 0, tuple(entries), bytes([128]), serving)
sys.stdout.buffer.write(msgspec.msgpack.encode(manifest))
"""

_WARM_UP_S = 2.0


def exported_model(folder: Path) -> Candidate:
    """Return a download whose task model another process exported to ``folder``."""
    done = subprocess.run([sys.executable, "-c", _EXPORT, str(folder)], check=True, stdout=subprocess.PIPE)
    workers = Workers(folder, num_threads=1, providers=("CPUExecutionProvider",))
    return candidate(msgspec.msgpack.decode(done.stdout, type=Manifest), TASK, workers)


def serve(camera: SupervisedCamera, download: Candidate, seconds: float) -> dict[str, Any]:
    """Return ages in ms, CPU in shares of a core, memory in MB, and counts."""
    slot = ModelSlot()
    slot.install(download)
    guard = Guard(slot)
    answerer, ages = Answerer(slot, WholePicture(TASK), on_answer=guard.saw), list[float]()
    began = time.monotonic() + _WARM_UP_S

    def note(shown: Shown) -> None:
        if shown.prediction is not None and shown.picture.captured_at >= began:
            ages.append(shown.prediction.age_s)

    loop = InferenceLoop([camera], answerer, note)
    guard.start()
    loop.start()
    time.sleep(_WARM_UP_S)
    assert slot.active is not None
    assert isinstance(slot.active.model, WorkerModel)
    processes = {"client": os.getpid(), "capture": camera.pid or 0, "serving": slot.active.model.pid or 0}
    cpu_before = {name: cpu_s(pid) for name, pid in processes.items()}
    memory: dict[str, list[float]] = {name: [] for name in processes}
    stop = threading.Event()
    while time.monotonic() - began < seconds and not stop.wait(1.0):
        for name, pid in processes.items():
            memory[name].append(resident_mb(pid))
    elapsed = time.monotonic() - began
    used = {name: (cpu_s(pid) - cpu_before[name]) / elapsed for name, pid in processes.items()}
    loop.stop()
    guard.stop()
    slot.clear()
    counts = loop.counts
    return {
        "age_ms": spread_ms(ages),
        "answers_per_s": len(ages) / elapsed,
        "cpu_cores": used,
        "memory_mb": {name: course(values) for name, values in memory.items()},
        "captured": camera.counts.num_captured,
        "captured_by_frame_ids": counts.num_captured,
        "answered": counts.num_frames,
        "dropped": counts.num_dropped,
        "failed": counts.num_failed,
        "lost": camera.counts.num_lost,
        "torch_imported": "torch" in sys.modules,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with served_camera(options.rate) as camera, tempfile.TemporaryDirectory() as folder:
        numbers = serve(camera, exported_model(Path(folder)), options.seconds)
    return shown({"size": SIZE, "rate_hz": options.rate, "seconds": options.seconds} | numbers)


if __name__ == "__main__":
    run(measure, __doc__, seconds=600.0, rate=30.0)
