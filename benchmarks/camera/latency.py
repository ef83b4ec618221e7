"""Inference with PyTorch (eager), TorchScript and ONNX Runtime, side by side, at batch 1 and 64.

``raw`` is a bare ``InferenceSession.run`` of the same model, made without any of our code; what ``onnx``, our runtime,
takes longer is our overhead. Each is checked for parity first. All run with the same number of threads: one by default,
which is what a device gives to serving. They take turns; a turn is one call to warm the caches that the others cooled,
then some that are timed. Bounds are held against the median of the ratios within turns: all meet the same noise.

    python -m benchmarks.camera.latency [--out benchmarks/results/latency.json]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from benchmarks.harness import in_turns, paired_ratio, run
from replayfleet.export.graphs.graph import sub_generator_graph, task_graph
from replayfleet.export.graphs.join import join
from replayfleet.export.parity import check_parity, eager_run
from replayfleet.export.running.artefact import Array, Run
from replayfleet.export.running.facts import sub_generator_facts, task_facts
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.export.torchscript import load_torchscript, torchscript_bytes
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.models.build import build_generator, build_task_model, initialise
from replayfleet.models.specs import LATENT_SIZE

SPEC = TASKS["fashion-mnist"]
BATCHES = (1, 64)
CALLS_PER_TURN = 5
GOALS = {"task model": 0.45, "sub-generator": 0.1}
"""Of eager's latency, ONNX at batch 1 may take this much."""
MAX_OVERHEAD = 1.1
"""Of a bare session's latency, our runtime may take this much."""


def candidates(
    module: nn.Module, graph: bytes, input_shape: tuple[int, ...], facts: dict[str, str], threads: int
) -> dict[str, Run]:
    """Return the ways to run one model, after they were found to agree."""
    arrays = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    eager = eager_run(module)
    script = torchscript_bytes(module, input_shape, facts)
    runs = {
        "eager": eager,
        "torchscript": eager_run(load_torchscript(script, hashlib.sha256(script).hexdigest())),
        "raw": bare_session(join(graph, arrays), threads),
        "onnx": OnnxModel(graph, arrays, num_threads=threads).run,
    }
    for name, candidate in runs.items():
        check_parity(name, candidate, eager, input_shape)
    return runs


def bare_session(model: bytes, threads: int) -> Run:
    """Return ``InferenceSession.run`` and nothing else, with as many threads, which sleep between runs as ours do."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    source, target = session.get_inputs()[0].name, session.get_outputs()[0].name

    def bare(x: Array) -> Array:
        result: Array = session.run([target], {source: x})[0]
        return result

    return bare


def times(runs: dict[str, Run], input_shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Return medians in seconds, and ratios, by batch size."""
    result: dict[str, Any] = {}
    for batch_size in BATCHES:
        x = np.random.default_rng(0).standard_normal((batch_size, *input_shape), dtype=np.float32)
        turns = timed_turns({name: functools.partial(one, x) for name, one in runs.items()}, repeats)
        seconds = {name: statistics.median(values) for name, values in turns.items()}
        result[f"batch {batch_size}"] = {
            "median_s": seconds,
            "times_as_fast_as_eager": {name: seconds["eager"] / value for name, value in seconds.items()},
            "onnx_of_eager": paired_ratio(turns["onnx"], turns["eager"]),
            "onnx_of_raw": paired_ratio(turns["onnx"], turns["raw"]),
        }
    return result


def timed_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the median seconds of each call in each turn; the first call of a turn warms its caches."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            (turn,) = in_turns({name: call}, CALLS_PER_TURN, warm_ups=1).values()
            seconds[name].append(statistics.median(turn))
    return seconds


def bounds(name: str, at_batch_1: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is bounded for one model, each with its bound and whether it holds."""
    held = [
        (f"{name}: onnx at batch 1, of eager", at_batch_1["onnx_of_eager"], GOALS[name]),
        (f"{name}: onnx at batch 1, of a bare session", at_batch_1["onnx_of_raw"], MAX_OVERHEAD),
    ]
    return [{"what": what, "ratio": ratio, "at_most": most, "holds": ratio <= most} for what, ratio, most in held]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    models = {
        "task model": (build_task_model(SPEC), task_graph(SPEC), SPEC.image_shape, task_facts(SPEC)),
        "sub-generator": (build_generator(SPEC), sub_generator_graph(SPEC), (LATENT_SIZE,), sub_generator_facts(SPEC)),
    }
    result: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats, "bounds": []}
    for name, (module, graph, input_shape, facts) in models.items():
        runs = candidates(initialise(module, rng), graph, input_shape, facts, options.threads)
        result[name] = times(runs, input_shape, options.repeats)
        for batch, found in result[name].items():
            ratios = found["times_as_fast_as_eager"]
            print(
                f"{name:<14} {batch:<9} "
                + "   ".join(f"{way} {found['median_s'][way] * 1e3:8.3f} ms ({ratios[way]:5.2f}x)" for way in runs)
                + f"   onnx of eager {found['onnx_of_eager']:.3f}, of raw {found['onnx_of_raw']:.3f}",
                flush=True,
            )
        result["bounds"] += bounds(name, result[name]["batch 1"])
    for bound in result["bounds"]:
        verdict = "holds" if bound["holds"] else "BROKEN"
        print(f"{bound['what']}: {bound['ratio']:.3f}, at most {bound['at_most']:g}: {verdict}")
    return result


if __name__ == "__main__":
    run(measure, __doc__, repeats=(40, "turns per number"), threads=1)
