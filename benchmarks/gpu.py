"""What a GPU is worth, and whether it computes what the CPU does: methods, Eq. 3, networks as one, serving, a fleet.

``parity``: two rounds of every method on both; the largest distance of a parameter set, relative to its length, and
the share of answers that agree. ``grouped``: training ten sub-generators, or task models, as one and one by one.
``graphs``: a training step of one network as one launch (a CUDA graph) against kernel by kernel.
``mixing``: Eq. 3 for many clients, as one and one by one. ``rounds``: ``fleet-sim`` at ``small``, on a GPU and on one
core. ``latency``: ONNX Runtime on the GPU against the CPU. ``serving``: answers of ``edge-client start --device cuda
--training-device cuda`` beside its training (``benchmarks.camera.serving_while_training``). ``fleet``: a deployed fleet
whose aggregator and clients all compute on it, over a real broker. A part that fails is told as such; the others go on.

    python -m benchmarks.gpu [--parts parity mixing] [--out benchmarks/results/gpu.json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import re
import statistics
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks import aggregation
from benchmarks.camera import latency, serving_while_training
from benchmarks.harness import in_turns, run
from benchmarks.simulation import grouped_training
from replayfleet.devices.profiles import CUDA
from replayfleet.export.graphs.graph import sub_generator_graph, task_graph
from replayfleet.export.parity import check_parity, eager_run
from replayfleet.export.running.runtime import OnnxModel
from replayfleet.federation.methods.kit.placement import CPU, proved_device
from replayfleet.federation.methods.steps.personalisation.mixtures import nearest, personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import StackedParameters, WeightSearch
from replayfleet.federation.methods.steps.replay import Replay
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import PENALTY_WEIGHT, new_sub_generator
from replayfleet.federation.methods.steps.task_model import trainable, trainable_task_model
from replayfleet.federation.streams.datasets import load_dataset, task_for
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.models.build import build_critic, build_generator, build_task_model, initialise
from replayfleet.models.specs import LATENT_SIZE, TaskSpec
from replayfleet.scripts.launch.plan import stream_source
from replayfleet.scripts.launch.processes import Child, Children
from replayfleet.scripts.launch.record import JOURNAL, FleetRecord, JournalTail
from tests.support.method_rounds import VARIANTS, apart, method_named, on_the_cpu, rounds_on, toy_rounds

GPU = torch.device("cuda", 0)
Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIMULATED = ("fedavg", "pfedgrp", "pfedgrp-plus", "mfcl", "lander", "fedcil")
CLIENTS, ROUNDS = 3, 2
LIMIT_S = 150.0
_NUMBER = re.compile(r"[\d.:T-]*\d[\d.Z]*")
"""Alike lines of a log differ in times and process ids."""


def parity(_options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in VARIANTS:
        try:
            seconds, held = {}, {}
            for device in (GPU, CPU):
                began = time.perf_counter()
                held[device.type] = [on_the_cpu(one) for one in rounds_on(device, method_named(name), toy_rounds())]
                seconds[device.type] = time.perf_counter() - began
        except Exception as error:  # another method may do better
            found[name] = {"failed": _why(error)}
        else:
            there, here = held["cuda"], held["cpu"]
            answers = [one[-1].parameter_sets["answers"][""].argmax(dim=1) for one in (there, here)]
            distance = max(apart(one, other) for one, other in zip(there[:-1], here[:-1], strict=True))
            agree = float((answers[0] == answers[1]).double().mean())
            found[name] = {"apart": distance, "agree": agree, "seconds": seconds}
        print(f"parity, {name}: {found[name]}", flush=True)
    return found


def grouped(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spec = task_for("fashion-mnist")
    for kind in ("sub-generators", "task-models"):
        ways = grouped_training.both_ways(kind, spec, 10, GPU)
        times = in_turns(ways, options.repeats, warm_ups=1, after=torch.cuda.synchronize)
        one_by_one = grouped_training.both_ways(kind, spec, 10, CPU)["one by one"]
        times["one by one on one core"] = in_turns({"": one_by_one}, 1)[""]
        found[kind] = times
        print(
            f"ten {kind}: " + ", ".join(f"{way} {statistics.median(s):.2f} s" for way, s in times.items()), flush=True
        )
    return found


def graphs(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spec, rng = task_for("fashion-mnist"), torch.Generator().manual_seed(0)
    for size in (16, 64):
        images, labels = torch.rand(size, *spec.image_shape, device=GPU), torch.arange(size, device=GPU) % 10
        for name, learnt, loss in (_task_model(spec, rng), _critic(spec, rng)):
            adam = torch.optim.Adam(learnt, lr=1e-4, betas=(0.5, 0.9), capturable=True)

            def step(adam: torch.optim.Adam = adam, loss: Loss = loss, inputs: Any = (images, labels)) -> None:
                adam.zero_grad(set_to_none=True)
                loss(*inputs).backward()
                adam.step()

            ways = {"kernel by kernel": step, "one launch": _recorded(step)}
            times = in_turns(ways, 100 * options.repeats, warm_ups=5, after=torch.cuda.synchronize)
            found[f"{name}, {size} samples"] = {way: statistics.median(seconds) for way, seconds in times.items()}
            print(f"graphs, {name}, {size} samples: {found[f'{name}, {size} samples']}", flush=True)
    return found


def _task_model(spec: TaskSpec, rng: torch.Generator) -> tuple[str, list[torch.Tensor], Loss]:
    model = trainable_task_model(spec, initialise(build_task_model(spec), rng).to(GPU).state_dict())
    return "task model", list(model.parameters()), lambda images, labels: F.cross_entropy(model(images), labels)


def _critic(spec: TaskSpec, rng: torch.Generator) -> tuple[str, list[torch.Tensor], Loss]:
    start = new_sub_generator(spec, rng).on(GPU)
    generator, critic = trainable(build_generator(spec), start.generator), trainable(build_critic(spec), start.critic)

    def loss(images: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        latents = torch.randn(len(images), LATENT_SIZE, device=GPU)
        share = torch.rand(len(images), 1, 1, 1, device=GPU)
        fake = generator(latents).detach()
        between = (share * images + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
        scores = critic(torch.cat([images, fake])).flatten()
        return scores[len(images) :].mean() - scores[: len(images)].mean() + PENALTY_WEIGHT * penalty

    return "critic", list(critic.parameters()), loss


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step's kernels as one launch, a CUDA graph; it is taken a few times first."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def mixing(options: argparse.Namespace) -> dict[str, Any]:
    spec, models, replays = aggregation.make_problem(load_dataset("fashion-mnist", data_root=options.data_root))
    rng = torch.Generator().manual_seed(3)
    found: dict[str, Any] = {}
    for fleet in (10, 100, 1000):
        noisy = [
            {name: aggregation.nearby(tensor, rng) for name, tensor in models[place % len(models)].items()}
            for place in range(fleet)
        ]
        solved = min(fleet, 100)
        counts = [{class_id % 10: 50, (class_id + 1) % 10: 50} for class_id in range(fleet)]
        near = nearest(counts, aggregation.NEAREST - 1)
        for precision in ("float32", "bfloat16"):
            search = WeightSearch(
                num_epochs=aggregation.EPOCHS,
                batch_size=aggregation.BATCH_SIZE,
                learning_rate=aggregation.PRESET_STEP,
                momentum=aggregation.PRESET_MOMENTUM,
                precision=precision,
            )
            for device, together, number in ((GPU, True, solved), (GPU, False, 10), (CPU, False, 2)):
                stacked = StackedParameters([{k: t.to(device) for k, t in one.items()} for one in noisy])
                asked = [(place, _on(replays[place % len(replays)][1], device)) for place in range(number)]
                solve = functools.partial(personalise_all, spec, stacked, asked, search, near=near, together=together)
                solve(torch.Generator().manual_seed(7))  # warms up
                began = time.perf_counter()
                mixtures = solve(torch.Generator().manual_seed(7))
                seconds = (time.perf_counter() - began) / number
                loss = statistics.mean(mixture.loss for mixture in mixtures[:2])
                name = f"{fleet} clients, {precision}, {device.type}, {'as one' if together else 'one by one'}"
                found[name] = {"seconds_a_client": seconds, "solved": number, "mean_loss_of_two": loss}
                print(f"Eq. 3, {name}: {1e3 * seconds:.1f} ms a client, mean loss of two {loss:.4f}", flush=True)
    return found


def _on(replay: Replay, device: torch.device) -> Replay:
    return Replay(replay.images.to(device), replay.labels.to(device), replay.num_tries, replay.num_filled)


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        running = {}
        for method in SIMULATED:
            out = Path(folder) / method
            command = ["fleet-sim", method, "--settings", "small", "--rounds", "2", "--workers", "1", "--threads", "1"]
            command += ["--data-root", str(options.data_root)] if options.data_root else []
            # One after the other on the GPU, beside which the cores compute theirs.
            running[method] = children.start(f"{method}-cpu", [*command, "--out", f"{out}-cpu"]), time.monotonic()
            began = time.monotonic()
            child = children.start(f"{method}-cuda", [*command, "--torch-device", "cuda", "--out", f"{out}-cuda"])
            _ended(child)
            found[method] = {"cuda": _simulated(Path(f"{out}-cuda"), time.monotonic() - began, child.log)}
            print(f"rounds, {method}: {found[method]}", flush=True)
        for method, (child, began) in running.items():
            _ended(child)
            found[method]["cpu"] = _simulated(Path(folder) / f"{method}-cpu", time.monotonic() - began, child.log)
            print(f"rounds, {method}: {found[method]}", flush=True)
    return found


def _ended(child: Child) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):  # told as one without a result
        child.process.wait(LIMIT_S)


def _simulated(out: Path, seconds: float, log: Path) -> dict[str, Any]:
    try:
        (path,) = out.rglob("result.json")
    except ValueError:
        return {"failed": log.read_text()[-500:]}
    told = ("accuracy", "round_s", "aggregate_s")
    found = {name: [one[name] for one in json.loads(path.read_text())["rounds"]] for name in told}
    return {"seconds_with_start": seconds, **found}


def compared_latency(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    spec, rng = latency.SPEC, torch.Generator().manual_seed(0)
    models = {
        "task model": (build_task_model(spec), task_graph(spec), spec.image_shape),
        "sub-generator": (build_generator(spec), sub_generator_graph(spec), (LATENT_SIZE,)),
    }
    for name, (module, graph, shape) in models.items():
        initialise(module, rng)
        arrays = {key: tensor.numpy() for key, tensor in module.state_dict().items()}
        began = time.perf_counter()
        on_gpu = OnnxModel(graph, arrays, num_threads=1, providers=((CUDA, {}), "CPUExecutionProvider"))
        load_s = time.perf_counter() - began
        check_parity("cuda", on_gpu.run, eager_run(module), shape)
        again = in_turns({"": lambda: OnnxModel(graph, arrays, num_threads=1, providers=(CUDA,))}, 3)[""]  # noqa: B023
        found[name] = {"providers": on_gpu.active_providers, "first_load_s": load_s, "load_s": again}
        on_cpu = OnnxModel(graph, arrays, num_threads=1)
        for batch in (1, 16, 64, 100, 256):
            x = np.random.default_rng(0).standard_normal((batch, *shape), dtype=np.float32)
            calls: dict[str, Callable[[], object]] = {
                "cuda": functools.partial(on_gpu.run, x),
                "cpu": functools.partial(on_cpu.run, x),
            }
            turns = latency.timed_turns(calls, 20)
            found[name][f"batch {batch}"] = {way: statistics.median(seconds) for way, seconds in turns.items()}
        print(f"latency, {name}: {found[name]}", flush=True)
    return found


def serving(options: argparse.Namespace) -> dict[str, Any]:
    measured = serving_while_training.fleet
    return {device: measured(options.seconds, 30.0, "pfedgrp", device) for device in options.devices}


def fleet(options: argparse.Namespace) -> dict[str, Any]:
    return {device: _fleet_on(device, options.data_root) for device in options.devices}


def _fleet_on(device: str, data_root: Path | None) -> dict[str, Any]:
    """Run a fleet with a round's rehearsal for each of its processes' device; returns rounds and accuracies."""
    with tempfile.TemporaryDirectory() as name, open_broker(log=logging.getLogger(__name__)) as broker:
        folder, clients = Path(name), list[Child]()
        with Children(folder) as children:
            command = ["aggregator", "serve", "--broker", broker.url, "--data-dir", str(folder / "aggregator")]
            command += ["--clients", str(CLIENTS), "--min-clients", str(CLIENTS), "--rounds", str(ROUNDS)]
            command += ["--method", "pfedgrp", "--settings", "demo", "--threads", "1", "--torch-device", device]
            aggregator = children.start("aggregator", command)
            for index in range(CLIENTS):
                source = stream_source("demo", index, clients=CLIENTS, rounds=ROUNDS, seed=0, rate=100.0)
                command = ["edge-client", "start", "--device", device, "--training-device", device, "--threads", "1"]
                command += ["--broker", broker.url, "--client-id", f"c{index}", "--source", source]
                command += ["--data-dir", str(folder / f"c{index}")]
                command += ["--data-root", str(data_root)] if data_root else []
                clients.append(children.start(f"c{index}", command))
            began = time.monotonic()
            while time.monotonic() - began < LIMIT_S and not any(one.is_over for one in (aggregator, *clients)):
                time.sleep(0.5)
            seconds = time.monotonic() - began
            over = [one.process.poll() for one in (aggregator, *clients)]
            record = FleetRecord(JournalTail(folder / "aggregator" / JOURNAL).new_events())
            logs = "".join(path.read_text() for path in folder.glob("*.log"))
    found = {
        "seconds": seconds,
        "over": over,
        "round_s": [one.round_s for one in record.committed_rounds()],
        "mean_accuracy": [one.mean_accuracy for one in record.committed_rounds()],
        "log": Counter(_NUMBER.sub("#", line) for line in logs.splitlines() if "INFO" not in line[:60]),
    }
    print(f"fleet on {device}: {found}", flush=True)
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "parity": parity,
    "latency": compared_latency,
    "mixing": mixing,
    "grouped": grouped,
    "graphs": graphs,
    "fleet": fleet,
    "serving": serving,
    "rounds": rounds,
}


def _why(error: Exception) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines)[-1500:]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device, why = proved_device("auto")
    print(f"auto: {device} {why}", flush=True)
    result: dict[str, Any] = {"auto": str(device)}
    if torch.cuda.is_available():
        result["gpu"] = {
            "name": torch.cuda.get_device_name(),
            "bytes": torch.cuda.get_device_properties(0).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    for part in options.parts:
        began = time.monotonic()
        try:
            result[part] = PARTS[part](options)
        except Exception as error:  # the machine is lent: what else can be measured is
            result[part] = {"failed": _why(error)}
            print(f"{part} failed: {_why(error)}", flush=True)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        if options.out is not None:  # whatever ends us later
            Path(f"{options.out}.part").write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        parts=(list(PARTS), "what to measure"),
        devices=(["cuda", "cpu"], "of the fleets"),
        repeats=3,
        seconds=40.0,
        threads=1,
        data_root=None,
    )
