"""The local rounds of a simulation on two cores: more threads per operation, or more clients at a time.

pFedGRP at size ``small`` on Fashion-MNIST, its first round (new classes, so sub-generators too) with fewer epochs per
sub-generator; in turns, so that all meet the same noise. Idle threads are to sleep, as in ``fleet-sim``.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.simulation.simulated_clients [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import circulating, paired_ratio, run
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.simulator.settings import SIZES, method_from
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.streams.datasets import Dataset, load_dataset

WAYS = {
    "one client, one thread": (1, 1),
    "one client, two threads": (1, 2),
    "two clients, one thread each": (2, 1),
}
"""Name -> (clients at a time, threads of one operation)."""


def seconds(dataset: Dataset, num_epochs: int, num_workers: int, num_threads: int) -> float:
    """Return the wall time of all clients' local rounds in round 0."""
    size = SIZES["small"]
    overrides = {"sub_generator_epochs": str(num_epochs), "aggregation_epochs": "1"}  # nobody times the latter
    method = method_from(METHODS["pfedgrp"], dataset.task, "small", overrides)
    (record,) = Simulation(
        method=method,
        dataset=dataset,
        stream=circulating(
            dataset,
            num_clients=size.num_clients,
            num_rounds=1,
            samples_per_class=size.samples_per_class,
            test_samples_per_class=1,
        ),
        run_seed=0,
        sampler=sampler_of(method),
        num_threads=num_threads,
        num_workers=num_workers,
        evaluates=False,
    ).run()
    return record.round_s - record.aggregate_s


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dataset = load_dataset("fashion-mnist", data_root=options.data_root)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(1 + options.repeats):  # the first warms up
        for name, way in WAYS.items():
            taken = seconds(dataset, options.epochs if turn else 1, *way)
            times[name] += [taken] if turn else []
    first, *others = WAYS
    ratios = {name: paired_ratio(times[first], times[name]) for name in others}
    for name, values in times.items():
        faster = f", {ratios[name]:.2f}x as fast" if name in ratios else ""
        print(f"{name}: {statistics.median(values):.1f} s{faster}")
    return {"epochs": options.epochs, "seconds": times, "ratios": ratios}


if __name__ == "__main__":
    run(measure, __doc__, epochs=(10, "per sub-generator"), repeats=3, data_root=None)
