r"""What replay is worth: a task model is trained on what sub-generators draw, and tested on real images.

    python -m replayfleet.scripts.experiments.replay_quality --set sub_generator=pca-gaussian --noise 1 --out FILE

Each class's sub-generator learns from as many training images as there are drawn of it; ``real`` is those images
themselves. One task model for each, from the same weights, at the preset's schedule.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import torch

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.privacy import epsilon_of
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.memory import epochs_of
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with, train_task_model
from replayfleet.federation.paths import NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.models.specs import LATENT_SIZE


def drawn(method: PFedGRP, real: RoundData, seed: int) -> tuple[RoundData, dict[str, Any]]:
    """Return as many drawn images of each class as there are real ones to learn from, and what learning cost."""
    kind = method.sub_generator_kind()
    images, labels, epsilon, began = [], [], 0.0, time.process_time()
    for class_id in real.labels.unique().tolist():
        own, rng = real.images[real.labels == class_id], seeded_generator(seed, class_id, "sub-generator")
        trained = kind.train(kind.new(rng), own, epochs_of(method, first=True), rng)
        images.append(kind.sampler()(trained.generator)(torch.randn(len(own), LATENT_SIZE, generator=rng)))
        labels.append(torch.full((len(own),), class_id, dtype=torch.int64))
        epsilon = max(epsilon, epsilon_of(trained.history, method.dp_delta))
    cost = {"cpu_s": round(time.process_time() - began, 2), "epsilon": epsilon or None}
    return RoundData(torch.cat(images), torch.cat(labels)), cost


def accuracy_of(method: PFedGRP, data: RoundData, test: Any, seed: int) -> float:
    """Train a task model on images and test it on all of ``test``."""
    start = first_download(method, seed, None).average
    rng = seeded_generator(seed, 0, "task-model")
    parameters = train_task_model(method.task, start, data.images, data.labels, Optimisation.of(method), rng)
    return evaluate(judge_with(method.task, parameters), test, np.arange(len(test.labels))).accuracy


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=NEW_FILE, required=True, help="JSON file to write.")
@click.option("--dataset", default="fashion-mnist", help="Data set.")
@click.option("--data-root", type=click.Path(path_type=Path), default=None, help="Folder of data sets.")
@click.option("--settings", default="small", help="Preset of both trainings.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Changes one setting of pfedgrp.")
@click.option("--noise", type=float, multiple=True, default=(0.0,), help="Noise multipliers; 0 is no privacy.")
@click.option("--samples", type=click.IntRange(2), default=100, help="Of each class.")
@click.option("--seeds", type=click.IntRange(1), default=3, help="From 0.")
def experiment(**options: Any) -> None:
    """Train task models on replay and test them on real images."""
    given = SimpleNamespace(**options)
    torch.set_num_threads(1)
    data = load_dataset(given.dataset, data_root=given.data_root)
    overrides = dict(text.partition("=")[::2] for text in given.overrides)
    spec = make_spec("quality", "pfedgrp", data.task, preset=given.settings, overrides=overrides, run_seed=0)
    method: Any = method_of(spec)
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        rng = seeded_generator(seed, 0, "samples")
        places = [np.flatnonzero(data.train.labels == class_id) for class_id in range(data.task.num_classes)]
        chosen = [own[torch.randperm(len(own), generator=rng)[: given.samples].numpy()] for own in places]
        real = round_data(data.train, np.concatenate(chosen))
        rows.append({"seed": seed, "what": "real", "accuracy": accuracy_of(method, real, data.test, seed)})
        for noise in given.noise:
            private = dataclasses.replace(method, dp_noise_multiplier=noise)
            replay, cost = drawn(private, real, seed)
            accuracy = accuracy_of(method, replay, data.test, seed)
            rows.append(
                {"seed": seed, "what": f"{method.sub_generator}, noise {noise:g}", "accuracy": accuracy, **cost}
            )
            print(rows[-1], flush=True)
    told = {name: str(value) if isinstance(value, Path) else value for name, value in options.items() if name != "out"}
    found = {
        "options": told,
        "settings": spec.settings,
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "summary": summary(rows),
        "rows": rows,
    }
    write_atomic(given.out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean accuracies and their standard deviations over seeds."""
    found = []
    for what in dict.fromkeys(row["what"] for row in rows):
        values = [row["accuracy"] for row in rows if row["what"] == what]
        spread = statistics.stdev(values) if len(values) > 1 else None
        found.append({"what": what, "mean": statistics.fmean(values), "standard_deviation": spread})
    return found


if __name__ == "__main__":
    run_command(experiment, "replay_quality")
