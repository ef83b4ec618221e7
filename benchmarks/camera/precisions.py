"""One task model as ONNX in float32, float16 and INT8: size of the file, accuracy on Fashion-MNIST, latency.

The model is trained for a minute or two, calibrated with training images and judged on all 10,000 test images by the
gate of ``model-export``. The three files and the eager model are timed in turns, in one run.

    python -m benchmarks.camera.precisions [--out benchmarks/results/precisions.json]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run
from replayfleet.export.calibration import Rounding
from replayfleet.export.formats import DEFAULT_SAMPLES, FORMATS
from replayfleet.export.gate import compare_on_labels
from replayfleet.export.job import Exported, Request, run_export
from replayfleet.export.latency import median_latencies_s
from replayfleet.export.parity import eager_run
from replayfleet.export.running.artefact import Run
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.export.samples import Source, read_held
from replayfleet.export.subject import Architecture
from replayfleet.federation.methods.steps.task_model import Optimisation, train_task_model
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.labelled_images import normalise
from replayfleet.models.build import build_task_model, initialise

MAX_SIZE_RATIO = {"onnx-fp16": 0.52, "onnx-int8": 0.3}
MAX_LOSS_POINTS = {"onnx-fp16": 0.1, "onnx-int8": 1.0}
BATCHES = (1, 64)
SPEC = TASKS["fashion-mnist"]
CALIBRATION, HELD = "calibration.npz", "held.npz"


def report(name: str, done: Exported) -> dict[str, Any]:
    """Return what one export came to, with its bounds."""
    size = done.files[0][1]
    ratio = size / (done.float32_bytes or size)
    found: dict[str, Any] = {"size_bytes": size, "size_ratio": ratio, "parity_worst": done.parity.worst}
    if done.verdict is not None:
        found |= {
            "accuracy": done.verdict.candidate,
            "loss_points": done.verdict.loss_points,
            "max_size_ratio": MAX_SIZE_RATIO[name],
            "max_loss_points": MAX_LOSS_POINTS[name],
            "within_bounds": found["size_ratio"] <= MAX_SIZE_RATIO[name]
            and done.verdict.loss_points <= MAX_LOSS_POINTS[name],
        }
    return found


def trained_model(images: np.ndarray, labels: np.ndarray) -> torch.nn.Module:
    """Return the task model after one pass over the images."""
    rng = torch.Generator().manual_seed(0)
    module = initialise(build_task_model(SPEC), rng)
    optimisation = Optimisation(num_epochs=1, batch_size=32, learning_rate=0.05, momentum=0.9, weight_decay=5e-4)
    tensors = torch.from_numpy(images), torch.from_numpy(labels)
    began = time.perf_counter()
    module.load_state_dict(train_task_model(SPEC, module.state_dict(), *tensors, optimisation, rng))
    print(f"trained on {len(images)} images in {time.perf_counter() - began:.0f} s", flush=True)
    return module


def exports(module: torch.nn.Module, folder: Path, threads: int) -> tuple[dict[str, Any], dict[str, Run]]:
    """Return what each ONNX format came to, and the models to time, the eager one first."""
    arrays = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    runs = {"eager": eager_run(module)}
    formats: dict[str, Any] = {}
    held = read_held(folder / HELD, SPEC)
    for row in [row for row in FORMATS if row.suffix == ".onnx"]:
        rounding = None
        if row.max_loss_points is not None:  # measured here, and not refused
            rounding = Rounding(100.0, (Source(folder / CALIBRATION),), held=folder / HELD)
        request = Request(Architecture("task", SPEC), row, folder, threads, rounding=rounding)
        done = run_export(request, arrays)
        found = report(row.name, done)
        runs[row.name] = OnnxModel(request.path.read_bytes(), {}, num_threads=threads).run
        if done.verdict is None:
            verdict = compare_on_labels(SPEC, held.images, held.labels, runs["eager"], runs[row.name], 100.0)
            found |= {"accuracy": verdict.candidate, "loss_points": verdict.loss_points}
        formats[row.name] = found
        print(f"{row.name:<12} " + "  ".join(f"{key} {value:.6g}" for key, value in found.items()), flush=True)
    return formats, runs


def measure(options: argparse.Namespace) -> dict[str, Any]:
    data = load_dataset("fashion-mnist", data_root=options.data_root)
    chosen = np.random.default_rng(0).permutation(len(data.train.labels))[: options.train + DEFAULT_SAMPLES]
    images = normalise(np.asarray(data.train.images[chosen]))
    module = trained_model(images[: options.train], data.train.labels[chosen][: options.train])
    held = normalise(np.asarray(data.test.images[: options.test]))
    result: dict[str, Any] = {"threads": options.threads, "train": options.train, "test": len(held)}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / CALIBRATION, images=images[options.train :])
        np.savez(Path(folder) / HELD, images=held, labels=data.test.labels[: options.test])
        result["formats"], runs = exports(module, Path(folder), options.threads)
    result["latency_s"] = {}
    for batch_size in BATCHES:
        calls = {name: functools.partial(one, held[:batch_size]) for name, one in runs.items()}
        seconds = median_latencies_s(calls, repeats=options.repeats, budget_s=60.0)
        result["latency_s"][f"batch {batch_size}"] = seconds
        print(f"batch {batch_size:<6} " + "  ".join(f"{n} {s * 1e3:.2f} ms" for n, s in seconds.items()), flush=True)
    return result


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        train=(8000, "training images, each seen once"),
        test=(10_000, "test images"),
        repeats=(40, "turns per latency"),
        threads=1,
        data_root=None,
    )
