"""The process that measures one runtime: a ``Trial`` on standard input.

One runtime a process: memory is its own, and one that crashes takes no other with it.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from replayfleet.devices.profiles import CPU, CUDA
from replayfleet.edge_client.bench.messages import Measured, Trial, Unusable, latency_of
from replayfleet.edge_client.bench.subject import task_from
from replayfleet.export.engines.cache import Workplace
from replayfleet.export.files import read_file
from replayfleet.export.latency import warm_up
from replayfleet.export.parameters import read_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.export.running.filling import filled
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.export.running.runtimes import Runtime
from replayfleet.federation.children import Parent
from replayfleet.federation.errors import ArtefactRejected, ReplayfleetError

MIN_RUNS = 20
MAX_RUNS = 20_000


def main() -> None:
    """Measure what standard input asks for."""
    parent = Parent()
    trial = parent.hear(Trial)
    if trial is not None:
        parent.say(measured(trial))


def measured(trial: Trial) -> Measured | Unusable:
    """Measure in this process."""
    before = _resident_bytes()
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            runtime = _open(trial, Path(folder))
            _check(runtime)
            load_s = time.perf_counter() - began
            latency_s = {}
            for size in trial.batches:
                x = _inputs(runtime, size)
                latency_s[size] = latency_of(timed(lambda: runtime.run(x), trial.seconds))  # noqa: B023 - runs here
    except ReplayfleetError as error:
        return Unusable(error.detail if isinstance(error, ArtefactRejected) else str(error))
    except ImportError as error:
        return Unusable(str(error))
    after = _resident_bytes()
    return Measured(runtime.runs_on, load_s, latency_s, after, max(0, after - before))


def timed(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds of each run, at least ``MIN_RUNS`` of them, after a warm-up."""
    warm_up(run)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < MIN_RUNS or (time.perf_counter() < deadline and len(samples) < MAX_RUNS):
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return samples


def _inputs(runtime: Runtime, batch_size: int) -> Array:
    return np.random.default_rng(batch_size).uniform(-1, 1, (batch_size, *runtime.input_shape)).astype(np.float32)


def _check(runtime: Runtime) -> None:
    """See it answer: with numbers, and with the same ones for one sample alone as among others."""
    x = _inputs(runtime, 2)
    answers = runtime.run(x)
    alone = runtime.run(x[:1])
    if len(answers) != 2 or not np.isfinite(answers).all():
        raise ReplayfleetError("it answers with something else than numbers")
    if not np.allclose(alone[0], answers[0], rtol=0.05, atol=0.05):
        raise ReplayfleetError("a sample's answer depends on the others of its batch")


def _open(trial: Trial, folder: Path) -> Runtime:
    if trial.runtime in {"eager", "TorchScript"}:
        return _with_torch(trial)
    from replayfleet.export.running.runtime import OnnxModel

    graph = read_file(Path(trial.variant.model))
    parameters = read_parameters(Path(trial.variant.parameters)) if trial.variant.parameters else {}
    if trial.runtime == "TensorRT":
        return _with_tensorrt(filled(graph, parameters), trial, folder)
    providers = (CPU,) if trial.runtime == "CPU" else (CUDA, CPU)
    return OnnxModel(graph, parameters, num_threads=trial.num_threads, providers=providers)


def _with_tensorrt(model: bytes, trial: Trial, folder: Path) -> Runtime:
    from replayfleet.export.engines.tensorrt import TensorRt
    from replayfleet.export.running.runtime import OnnxModel

    maker, place = TensorRt(), Workplace(folder, folder / "engine", folder / "timing")
    profile = BatchProfile(min(trial.batches), min(trial.batches), max(trial.batches))
    for path in (place.engine, place.timing):
        path.mkdir()
    maker.build(model, place, profile, lambda part, of: None)
    shape = OnnxModel(model, {}, num_threads=1).input_shape
    providers = maker.providers(model, shape, place.engine, profile)
    return OnnxModel(model, {}, num_threads=trial.num_threads, providers=providers)


def _with_torch(trial: Trial) -> Runtime:
    from replayfleet.export.parity import load_parameters
    from replayfleet.export.torch_runtime import TorchModel, torchscript_model
    from replayfleet.export.torchscript import torchscript_bytes
    from replayfleet.federation.service.torch_setup import prepare_torch
    from replayfleet.models.build import build_task_model

    prepare_torch(trial.num_threads)
    if trial.task is None:
        script = read_file(Path(trial.variant.model))
        return torchscript_model(script, hashlib.sha256(script).hexdigest())
    task = task_from(trial.task)
    module = build_task_model(task)
    load_parameters(module, _with_counters(module.state_dict(), read_parameters(Path(trial.variant.parameters))))
    if trial.runtime == "eager":
        return TorchModel(module, task.image_shape)
    script = torchscript_bytes(module, task.image_shape, {"input": str(list(task.image_shape))})
    return torchscript_model(script, hashlib.sha256(script).hexdigest())


def _with_counters(layout: dict[str, object], parameters: dict[str, Array]) -> dict[str, Array]:
    """Add BatchNorm's counters, which no graph uses, so that a served model may lack them."""
    missing = [name for name in layout if name not in parameters and name.endswith(".num_batches_tracked")]
    return parameters | {name: np.array(0, np.int64) for name in missing}


def _resident_bytes() -> int:
    """Return what this process occupies (``VmRSS``); 0 where Linux doesn't tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
