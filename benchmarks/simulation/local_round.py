"""One client's half of a round, and the sub-generator updates that dominate it.

Three rounds of a ``circulating`` stream over Fashion-MNIST: the very first one (two new classes, no replay), one with
two new classes and replay of two, and one that meets the first two classes again, where the drift gate decides. Both
with WGAN-GPs as sub-generators and with Gaussians.

    python -m benchmarks.simulation.local_round [--settings paper] [--out benchmarks/results/local_round.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from typing import Any

import torch

from benchmarks.harness import circulating, run
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.sub_generators.wgan_gp import (
    GanSchedule,
    new_sub_generator,
    train_sub_generator,
)
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.settings import SIZES
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.stream import Stream

ROUNDS = {"first round": 0, "new classes and replay": 1, "known classes": 5}
"""What a round is like -> its index in a stream of five task types."""

KINDS = ("wgan-gp", "pca-gaussian")
CLIENT = "client-0"


def one_update(method: PFedGRP, dataset: Dataset, stream: Stream) -> float:
    """Return the seconds that a sub-generator takes to train on one class's samples of one round."""
    data = round_data(dataset.train, stream.train_indices(0, 0))
    schedule = GanSchedule(
        num_epochs=method.sub_generator_epochs,
        batch_size=method.gan_batch_size,
        learning_rate=method.gan_learning_rate,
        betas=(method.gan_beta1, method.gan_beta2),
        critic_steps_per_generator_step=method.critic_steps_per_generator_step,
    )
    rng = torch.Generator().manual_seed(0)
    images = data.images[data.labels == data.labels[0]]
    began = time.perf_counter()
    train_sub_generator(method.task, new_sub_generator(method.task, rng), images, schedule, rng)
    return time.perf_counter() - began


def three_rounds(method: PFedGRP, dataset: Dataset, stream: Stream) -> dict[str, tuple[float, float, int]]:
    """Return (seconds of the local round, CPU seconds of it, sub-generators it trained) by kind of round."""
    sampler = method.sub_generator_kind().sampler()
    state, aggregator = method.initial_states()
    download = method.initial_download(seeded_generator(0, 0, "initial"))
    found = {}
    for kind, index in ROUNDS.items():
        data = round_data(dataset.train, stream.train_indices(0, index))
        began, used = time.perf_counter(), time.process_time()
        state, upload = method.local_round(state, data, download, seeded_generator(0, index, CLIENT), sampler=sampler)
        found[kind] = (time.perf_counter() - began, time.process_time() - used, upload.num_updates)
        rng = seeded_generator(0, index, "aggregator")
        aggregator, downloads = method.aggregate(aggregator, {CLIENT: upload}, rng, sampler=sampler)
        download = downloads[CLIENT]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dataset = load_dataset("fashion-mnist", data_root=options.data_root)
    samples = SIZES[options.settings].samples_per_class
    stream = circulating(dataset, num_clients=1, num_rounds=6, samples_per_class=samples)
    method = PFedGRP(task=dataset.task, **settings_for("pfedgrp", options.settings))
    methods = {kind: dataclasses.replace(method, sub_generator=kind) for kind in KINDS}
    updates: list[float] = []
    rounds: dict[str, list[dict[str, tuple[float, float, int]]]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        updates.append(one_update(method, dataset, stream))
        for kind, one in methods.items():
            rounds[kind].append(three_rounds(one, dataset, stream))
    size = f"{samples} images, {method.sub_generator_epochs} epochs"
    print(f"sub-generator update ({size})  {statistics.median(updates):7.2f} s", flush=True)
    result: dict[str, Any] = {"settings": options.settings, "threads": options.threads, "update_s": updates}
    totals = {kind: statistics.median(sum(one[r][1] for r in ROUNDS) for one in rounds[kind]) for kind in KINDS}
    for kind, what in itertools.product(KINDS, ROUNDS):
        wall, cpu = ([each[what][place] for each in rounds[kind]] for place in (0, 1))
        trained = rounds[kind][0][what][2]
        found = {"local_round_s": wall, "local_round_cpu_s": cpu, "sub_generators_trained": trained}
        result.setdefault(kind, {})[what] = found
        print(
            f"{kind}: local round, {what:<23} {statistics.median(wall):7.2f} s, {statistics.median(cpu):7.2f} CPU s, "
            f"{trained} sub-generators trained",
            flush=True,
        )
    result["cpu_ratio"] = totals["pca-gaussian"] / totals["wgan-gp"]
    print(f"CPU seconds of the three rounds, pca-gaussian to wgan-gp: {result['cpu_ratio']:.2f}")
    return result


if __name__ == "__main__":
    run(measure, __doc__, settings="demo", repeats=3, threads=1, data_root=None)
