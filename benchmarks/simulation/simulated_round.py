"""What a simulated round costs beside training: ours and Flower's with Ray, alternately, with clients that don't train.

Both average the same model, our ResNet20 for 28 pixels (122 tensors, 703,598 numbers, 2.8 MB), with FedAvg and without
evaluation, one thread a process. Ours is ``Simulation`` with ``FedAvg.aggregate``. It runs twice: with clients that
return what they got, as Flower's do, and with clients that return a copy of their own, so that no tensor is shared and
all N models are read. A round lasts from the end of the one before to its own end, Flower's from the request for
clients to the end of its aggregation; the longest client's own time is subtracted on both sides, the first round of
every process left out. Before anything is timed, both average clients that differ, and must agree.

Memory is the peak of the simulating process above that of an interpreter that has imported torch, not counting
Flower's actors.

    python -m benchmarks.simulation.simulated_round --rival-python PATH [--out benchmarks/results/simulated_round.json]

The rival needs an environment of its own: ``pip install torch==2.13.0 "flwr[simulation]==1.41.0"``. Without
``--rival-python`` only ours is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.harness import circulating, peak_bytes, run
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.task_records import NoState, TaskDownload, TaskUpload
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.models.specs import TaskSpec

RIVAL = Path(__file__).parents[1] / "rivals" / "flower_simulation.py"
PLAIN = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment of both sides: one thread each, and nothing but the work."""

NUM_CLASSES = 10
TOLERANCE = 1e-6
KINDS = ("same", "copies", "flower")
"""Clients that return what they got; that return copies; the rival's, which return what they got."""

Times = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoTraining(FedAvg):
    """FedAvg without its local half.

    Attributes:
        kind: ``same`` returns the download's tensors, ``copies`` new ones, ``shift`` adds (p + 1) / 100 to client p's
            and weighs it with 10 (p + 1) samples.
    """

    name: ClassVar[str] = "no-training"

    kind: str
    places: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def local_round(
        self, state: NoState, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> tuple[NoState, TaskUpload]:
        """Answer at once."""
        parameters = download.task_parameters
        if self.kind == "copies":
            parameters = {name: tensor.clone() for name, tensor in parameters.items()}
        if self.kind != "shift":
            return state, TaskUpload(parameters, 10)
        place = next(self.places)
        shifted = {
            name: tensor + place / 100 if tensor.is_floating_point() else tensor for name, tensor in parameters.items()
        }
        return state, TaskUpload(shifted, 10 * place)


def simulation(kind: str, num_clients: int, num_rounds: int) -> Simulation:
    """Return a simulation over noise: two images per client and round."""
    names = tuple(f"class-{class_id}" for class_id in range(NUM_CLASSES))
    labels = np.tile(np.arange(NUM_CLASSES, dtype=np.int64), math.ceil(num_rounds / 5))
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28, 1), dtype=np.uint8)
    part = LabelledImages(images, labels, names)
    task = TaskSpec(1, 28, names, "cifar", 16)
    dataset = Dataset("noise", part, part, task)
    return Simulation(
        method=NoTraining(task=task, kind=kind),
        dataset=dataset,
        stream=circulating(
            dataset, num_clients=num_clients, num_rounds=num_rounds, samples_per_class=1, test_samples_per_class=1
        ),
        run_seed=0,
        sampler=eager_sampler(task),
        num_threads=1,
        evaluates=False,
    )


def time_ours(kind: str, num_clients: int, num_rounds: int, out: Path) -> None:
    """Run a simulation in this process; write what the rival's script writes."""
    rounds: list[dict[str, float]] = []
    last: list[Mapping[str, torch.Tensor]] = []
    began = time.perf_counter()

    def on_round(outcome: RoundOutcome) -> None:
        nonlocal began
        record = outcome.record
        rounds.append(
            {
                "num_replies": len(outcome.uploads),
                "round_s": time.perf_counter() - began,
                "aggregate_s": record.aggregate_s,
                "compute_s": max(client.train_s for client in record.clients.values()),
            }
        )
        last[:] = [outcome.downloads["client-0"].task_parameters]
        began = time.perf_counter()

    simulation(kind, num_clients, num_rounds).run(on_round=on_round)
    np.savez(out.with_suffix(".npz"), **{name: tensor.numpy() for name, tensor in last[0].items()})
    out.write_text(json.dumps({"rounds": rounds, "peak_rss_bytes": peak_bytes()}))


def bare_rss_bytes(python: Path) -> int:
    """Return the memory of an interpreter that imported torch and did nothing."""
    script = "import torch; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout)


@dataclass(frozen=True, slots=True)
class Contest:
    """Both sides, each run in a process of its own.

    Attributes:
        folder: for what they write.
        rival_python: runs the rival; None leaves it out.
    """

    folder: Path
    rival_python: Path | None

    def kinds(self) -> list[str]:
        """Return who takes part."""
        return [kind for kind in KINDS if kind != "flower" or self.rival_python]

    def run(self, kind: str, num_clients: int, num_rounds: int, *, shift: bool = False) -> Times:
        """Run one process and return what it wrote, with the load before it."""
        out = self.folder / f"{kind}.json"
        sizes = ["--clients", str(num_clients), "--rounds", str(num_rounds), "--out", str(out)]
        if kind == "flower":
            command = [str(self.rival_python), str(RIVAL), "--model", str(self._model()), *sizes]
            command += ["--shift"] if shift else []
        else:
            command = [
                sys.executable,
                "-m",
                "benchmarks.simulation.simulated_round",
                "--kind",
                "shift" if shift else kind,
            ]
            command += [*sizes[:-2], "--raw", str(out)]
        load = os.getloadavg()[0]
        done = subprocess.run(command, env={**os.environ, **PLAIN}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return {**json.loads(out.read_text()), "load": load}

    def largest_difference(self) -> float:
        """Average three clients that differ on both sides and return the largest absolute difference of a number."""
        averages = []
        for kind in ("same", "flower"):
            self.run(kind, 3, 1, shift=True)
            with np.load(self.folder / f"{kind}.npz") as stored:
                averages.append({name: stored[name] for name in stored.files})
        ours, rivals = averages
        if ours.keys() != rivals.keys():
            sys.exit(f"the averages differ in names: {sorted(ours.keys() ^ rivals.keys())[:4]}")
        return max(float(np.abs(ours[name] - rivals[name]).max()) for name in ours)

    def _model(self) -> Path:
        path = self.folder / "model.npz"
        if not path.exists():
            download = simulation("same", 1, 1).method.initial_download(seeded_generator(0, 0, "initial"))
            np.savez(path, **{name: tensor.numpy() for name, tensor in download.task_parameters.items()})
        return path


def overheads(run: Times) -> list[float]:
    """Return the seconds of each round but the first, without the longest client's own time."""
    return [entry["round_s"] - entry["compute_s"] for entry in run["rounds"][1:]]


def summary(runs: Mapping[str, list[Times]], bare_bytes: Mapping[str, int]) -> dict[str, Times]:
    """Return, for every kind, quantiles over all its rounds, its memory, and how much longer the rival takes."""
    found: dict[str, Times] = {}
    for kind, own in runs.items():
        rounds = sorted(value for run in own for value in overheads(run))
        aggregations = [entry["aggregate_s"] for run in own for entry in run["rounds"][1:]]
        found[kind] = {
            "num_rounds": len(rounds),
            "round_p50_s": statistics.median(rounds),
            "round_p95_s": rounds[math.ceil(0.95 * len(rounds)) - 1],
            "aggregate_p50_s": statistics.median(aggregations),
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run in own),
            "rss_above_bare_bytes": max(run["peak_rss_bytes"] for run in own) - bare_bytes[kind],
            "loads": [run["load"] for run in own],
        }
        if "flower" in runs and kind != "flower":
            found[kind]["rival_takes_times_as_long"] = statistics.median(
                statistics.median(overheads(theirs)) / statistics.median(overheads(ours))
                for ours, theirs in zip(own, runs["flower"], strict=True)
            )
    return found


def show(num_clients: int, found: Mapping[str, Times]) -> None:
    """Print one line per kind."""
    for kind, values in found.items():
        ratio = values.get("rival_takes_times_as_long")
        print(
            f"{num_clients:>4} clients, {kind:<7} p50 {1000 * values['round_p50_s']:7.1f} ms, "
            f"p95 {1000 * values['round_p95_s']:7.1f} ms, aggregation {1000 * values['aggregate_p50_s']:6.1f} ms, "
            f"{values['rss_above_bare_bytes'] / 1e9:5.2f} GB above a bare interpreter"
            + (f", Flower takes {ratio:.1f} times as long" if ratio else ""),
            flush=True,
        )


def usable(rival_python: Path | None) -> Path | None:
    """Return the rival's interpreter; None, and a message, if there is none."""
    named = os.environ.get("RIVAL_PYTHON")
    rival_python = rival_python or (Path(named) if named else None)
    if rival_python and rival_python.exists():
        return rival_python
    missing = f"{rival_python} doesn't exist" if rival_python else "no --rival-python or $RIVAL_PYTHON"
    print(f"{missing}: only ours is measured, without ratios")
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.kind:
        time_ours(options.kind, int(options.clients), options.rounds, options.raw)
        return {}
    rival_python = usable(options.rival_python)
    bare = {kind: bare_rss_bytes(Path(sys.executable)) for kind in KINDS[:2]}
    if rival_python:
        bare["flower"] = bare_rss_bytes(rival_python)
    result: dict[str, Any] = {"bare_rss_bytes": bare, "clients": {}, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(Path(folder), rival_python)
        if rival_python:
            result["largest_difference_of_averages"] = difference = contest.largest_difference()
            print(f"averages of three clients that differ: largest difference {difference:.1e}")
            if not difference <= TOLERANCE:
                sys.exit("the two sides don't compute the same average")
        for num_clients in map(int, options.clients.split(",")):
            runs: dict[str, list[Times]] = {kind: [] for kind in contest.kinds()}
            for _ in range(options.repeats):
                for kind, done in runs.items():
                    done.append(contest.run(kind, num_clients, options.rounds))
            result["clients"][num_clients] = found = summary(runs, bare)
            result["runs"][num_clients] = runs
            show(num_clients, found)
    return result


if __name__ == "__main__":
    run(
        measure,
        __doc__,
        clients=("2,10,100", "fleet sizes, by commas"),
        rounds=(12, "of each process; the first doesn't count"),
        repeats=3,
        rival_python=(None, "interpreter of an environment that has Flower and Ray  [default: $RIVAL_PYTHON]"),
        kind=("", "one run of ours in this process: same, copies or shift"),
        raw=(None, "where that writes its times"),
    )
