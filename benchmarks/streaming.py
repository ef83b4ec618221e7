"""From uploads in the blob store to FedAvg's average: updates a second, and what the process takes in memory for it.

``--updates`` task models of 2.8 MB (ResNet20 for 28 pixels, 122 tensors) lie in an aggregator's blob store, as after a
round that was restarted: each is read, verified by its digest, held against the method's layout, looked at number by
number, and averaged by its volume. ``verified`` is the same once more, as at the end of a round whose uploads this
process has admitted, and ``decoded`` the average alone, in seconds of the clock, with one thread and with two. Each
number of updates has a process of its own, whose memory beside files (RssAnon), and all of it (RSS, with the mapped
files, which are the kernel's to drop), is watched while it works.

    python -m benchmarks.streaming [--updates 10 1000] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import run
from replayfleet.aggregator.admission import decode_upload
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.promises import remembered_layout
from replayfleet.federation.methods.kit.task_records import TaskModels, TaskUpload
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, tuple("0123456789"))
WATCH_EVERY_S = 0.002
THREADS = (1, 2)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for updates in options.updates:
        command = [sys.executable, "-m", "benchmarks.streaming", "--alone", str(updates)]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        found[str(updates)] = json.loads(said.splitlines()[-1])
        print(updates, found[str(updates)], flush=True)
    return found


def alone(updates: int) -> dict[str, float]:
    """Measure in this process."""
    prepare_torch(1)
    method = FedAvg(task=TASK)
    with tempfile.TemporaryDirectory() as folder:
        manifests = _stored(Path(folder), updates)
        blobs, layout = DiskBlobStore(Path(folder)), remembered_layout(method)

        def averaged(*, must_be_finite: bool) -> float:
            began = time.process_time()
            uploads = {
                client: decode_upload(method, manifest, blobs, layout, must_be_finite=must_be_finite)
                for client, manifest in manifests.items()
            }
            method.aggregate(TaskModels(), uploads, torch.Generator(), sampler=eager_sampler(TASK))
            return time.process_time() - began

        with _Watched() as watched:
            stored_s, verified_s = averaged(must_be_finite=True), averaged(must_be_finite=False)
        decoded = {c: decode_upload(method, m, blobs, layout, must_be_finite=False) for c, m in manifests.items()}
        decoded_per_s = {}
        for threads in THREADS:
            prepare_torch(threads)
            began = time.perf_counter()
            method.aggregate(TaskModels(), decoded, torch.Generator(), sampler=eager_sampler(TASK))
            decoded_per_s[f"decoded_updates_per_s_{threads}"] = updates / (time.perf_counter() - began)
    return {
        **decoded_per_s,
        "updates_per_cpu_s": updates / stored_s,
        "verified_updates_per_cpu_s": updates / verified_s,
        "peak_own_mb": watched.own_bytes / 1e6,
        "peak_mb": watched.all_bytes / 1e6,
    }


def _stored(folder: Path, updates: int) -> dict[str, Manifest]:
    store, rng = DiskBlobStore(folder), torch.Generator().manual_seed(0)
    model = {name: tensor.clone() for name, tensor in initialise(build_task_model(TASK), rng).state_dict().items()}
    manifests = {}
    for number in range(updates):
        model["linear.bias" if "linear.bias" in model else next(iter(model))].add_(1e-3)
        packed = encode_artefacts(TaskUpload(model, 10 + number % 3).pack(), store)
        client = f"cam-{number}"
        manifests[client] = Manifest("up", "bench", client, 0, 1, packed.blobs, packed.facts)
    return manifests


class _Watched:
    """What this process takes at most, in bytes: alone, and with mapped files."""

    def __enter__(self) -> _Watched:
        self.own_bytes = self.all_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._over.wait(WATCH_EVERY_S):
            memory = process.memory_info()
            self.own_bytes = max(self.own_bytes, memory.rss - memory.shared)
            self.all_bytes = max(self.all_bytes, memory.rss)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(alone(int(sys.argv[2]))))
    else:
        run(measure, __doc__, updates=([10, 1000], "how many"))
