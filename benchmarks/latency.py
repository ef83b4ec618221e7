"""Inference with PyTorch (eager), TorchScript and ONNX Runtime, side by side, at batch 1 and 64.

Each model is checked for parity first. All three run with the same number of threads: one by default, which is what a
device gives to serving. They take turns; a turn is one call to warm the caches that the others cooled, then some that
are timed.

    python -m benchmarks.latency [--out benchmarks/results/latency.json]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.environment import write_result
from export.artefact import Run
from export.facts import sub_generator_facts, task_facts
from export.graph import sub_generator_graph, task_graph
from export.parity import check_parity, eager_run
from export.runtime import OnnxModel
from export.torchscript import load_torchscript, torchscript_bytes
from federation.service.presets import TASKS
from federation.service.torch_setup import prepare_torch
from models.build import build_generator, build_task_model, initialise
from models.specs import LATENT_SIZE

SPEC = TASKS["fashion-mnist"]
BATCHES = (1, 64)
CALLS_PER_TURN = 5
GOALS = {"task model": 2.0, "sub-generator": 8.0}
"""ONNX at batch 1 against eager."""


def candidates(
    module: nn.Module, graph: bytes, input_shape: tuple[int, ...], facts: dict[str, str], threads: int
) -> dict[str, Run]:
    """Return the three ways to run one model, after they were found to agree."""
    arrays = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    eager = eager_run(module)
    script = torchscript_bytes(module, input_shape, facts)
    runs = {
        "eager": eager,
        "torchscript": eager_run(load_torchscript(script, hashlib.sha256(script).hexdigest())),
        "onnx": OnnxModel(graph, arrays, num_threads=threads).run,
    }
    for name, run in runs.items():
        check_parity(name, run, eager, input_shape)
    return runs


def measure(runs: dict[str, Run], input_shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Return medians in seconds and ratios to eager, by batch size."""
    result: dict[str, Any] = {}
    for batch_size in BATCHES:
        x = np.random.default_rng(0).standard_normal((batch_size, *input_shape), dtype=np.float32)
        calls: dict[str, Callable[[], object]] = {name: functools.partial(run, x) for name, run in runs.items()}
        seconds = medians(calls, repeats)
        result[f"batch {batch_size}"] = {
            "median_s": seconds,
            "times_as_fast_as_eager": {name: seconds["eager"] / value for name, value in seconds.items()},
        }
    return result


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            for _ in range(CALLS_PER_TURN):
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print both models; write JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--repeats", type=int, default=40, help="turns per number")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    prepare_torch(options.threads)
    rng = torch.Generator().manual_seed(0)
    models = {
        "task model": (build_task_model(SPEC), task_graph(SPEC), SPEC.image_shape, task_facts(SPEC)),
        "sub-generator": (build_generator(SPEC), sub_generator_graph(SPEC), (LATENT_SIZE,), sub_generator_facts(SPEC)),
    }
    result: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats, "goals": GOALS}
    for name, (module, graph, input_shape, facts) in models.items():
        runs = candidates(initialise(module, rng), graph, input_shape, facts, options.threads)
        result[name] = measure(runs, input_shape, options.repeats)
        for batch, found in result[name].items():
            ratios = found["times_as_fast_as_eager"]
            print(
                f"{name:<14} {batch:<9} "
                + "   ".join(f"{way} {found['median_s'][way] * 1e3:8.3f} ms ({ratios[way]:5.2f}x)" for way in runs)
                + (f"   goal for onnx {GOALS[name]:g}x" if batch == "batch 1" else ""),
                flush=True,
            )
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
