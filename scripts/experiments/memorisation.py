r"""How much of its training samples a sub-generator shows, with and without differential privacy.

    python -m replayfleet.scripts.experiments.memorisation --noise 0 --noise 1 --noise 4 --out runs/memorisation.json

Of every class asked for, and for every seed, one sub-generator is trained on samples of the training set, and measured
against as many that it never saw (``federation.simulator.measures.memorisation``). Beside them stand two bounds: real
samples that nothing was trained on (``fresh``, where nothing can be found), and training samples with a little noise
(``copies``, where all must be).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import torch
from torch import Tensor

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.privacy import epsilon_of
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.memory import epochs_of
from replayfleet.federation.paths import NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.simulator.measures.memorisation import memorisation
from replayfleet.federation.simulator.result import hardware, versions
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.models.specs import LATENT_SIZE

COPY_NOISE = 0.05
"""Standard deviation of what is added to ``copies``; pixels are in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one class: (N, C, H, W) that a generator learns, as many that it doesn't, and as many for ``fresh``."""

    trained: Tensor
    held_out: Tensor
    fresh: Tensor


def samples(data: Any, class_id: int, count: int, rng: torch.Generator) -> Samples:
    """Draw three disjoint sets from the training set.

    Raises:
        SettingsError: The class has too few samples.
    """
    places = np.flatnonzero(data.train.labels == class_id)
    if len(places) < 3 * count:
        raise SettingsError(
            f"class {data.train.class_names[class_id]!r} has {len(places)} samples, {3 * count} are needed"
        )
    chosen = places[torch.randperm(len(places), generator=rng)[: 3 * count].numpy()]
    parts = (round_data(data.train, part).images for part in np.split(chosen, 3))
    return Samples(*parts)


def measured(method: PFedGRP, drawn: Samples, num_generated: int, rng: torch.Generator) -> dict[str, Any]:
    """Train one sub-generator and measure it."""
    kind = method.sub_generator_kind()
    began = time.process_time()
    trained = kind.train(kind.new(rng), drawn.trained, epochs_of(method, first=True), rng)
    train_cpu_s = time.process_time() - began
    generated = kind.sampler()(trained.generator)(torch.randn(num_generated, LATENT_SIZE, generator=rng))
    return {
        "noise_multiplier": method.dp_noise_multiplier,
        "epsilon": epsilon_of(trained.history, method.dp_delta) if trained.history else None,
        "train_cpu_s": round(train_cpu_s, 1),
        **compared(generated, drawn, rng),
    }


def compared(generated: Tensor, drawn: Samples, rng: torch.Generator) -> dict[str, Any]:
    """Return ``memorisation`` as JSON has it."""
    return dataclasses.asdict(memorisation(generated, drawn.trained, drawn.held_out, rng))


def bounds(drawn: Samples, rng: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield what nothing memorised, and what nothing but memory, would look like."""
    copies = drawn.trained + COPY_NOISE * torch.randn(drawn.trained.shape, generator=rng)
    for what, generated in (("fresh", drawn.fresh), ("copies", copies)):
        yield {"bound": what, **compared(generated, drawn, rng)}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over classes and seeds, with the standard error of each, by noise or bound."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("bound") or f"noise {row['noise_multiplier']:g}", []).append(row)
    return [
        {
            "what": what,
            "runs": len(group),
            "epsilon": group[0].get("epsilon"),
            **{
                name: {
                    "mean": statistics.fmean(row[name]["value"] for row in group),
                    "standard_error": statistics.stdev(row[name]["value"] for row in group) / len(group) ** 0.5
                    if len(group) > 1
                    else None,
                    "floor_std": statistics.fmean(row[name]["floor_std"] for row in group),
                    "runs_with_p_below_5_percent": sum(row[name]["p"] < 0.05 for row in group),
                }
                for name in ("nearer", "membership")
            },
            "distance_ratio": statistics.fmean(row["distance_ratio"] for row in group),
        }
        for what, group in groups.items()
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=NEW_FILE, required=True, help="JSON file to write.")
@click.option("--dataset", default="fashion-mnist", help="Data set.")
@click.option("--data-root", type=click.Path(path_type=Path), default=None, help="Folder of data sets.")
@click.option("--settings", default="small", help="Preset of the sub-generator's training.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Changes one setting of pfedgrp.")
@click.option("--noise", type=float, multiple=True, default=(0.0,), help="Noise multipliers; 0 is no privacy.")
@click.option("--classes", type=click.IntRange(1), default=3, help="The first so many.")
@click.option("--samples", "num_samples", type=click.IntRange(2), default=100, help="That one is trained on.")
@click.option("--generated", type=click.IntRange(1), default=1000, help="Samples that it is measured by.")
@click.option("--seeds", type=click.IntRange(1), default=3, help="From 0.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, help="Of PyTorch.")
def experiment(**options: Any) -> None:
    """Train sub-generators with different noise, and measure what they memorised."""
    given = SimpleNamespace(**options)
    torch.set_num_threads(given.threads)
    data = load_dataset(given.dataset, data_root=given.data_root)
    overrides = dict(text.partition("=")[::2] for text in given.overrides)
    spec = make_spec("memorisation", "pfedgrp", data.task, preset=given.settings, overrides=overrides, run_seed=0)
    method: Any = method_of(spec)
    rows = []
    for seed in range(given.seeds):
        for class_id in range(given.classes):
            drawn = samples(data, class_id, given.num_samples, seeded_generator(seed, class_id, "samples"))
            of = {"seed": seed, "class": class_id}
            rows += [{**of, **row} for row in bounds(drawn, seeded_generator(seed, class_id, "bounds"))]
            for noise in given.noise:
                private = dataclasses.replace(method, dp_noise_multiplier=noise)
                row = measured(private, drawn, given.generated, seeded_generator(seed, class_id, "training"))
                rows.append({**of, **row})
                print(f"seed {seed}, class {class_id}, noise {noise:g}:", end=" ")
                print(f"nearer {row['nearer']['value']:.3f}, membership {row['membership']['value']:.3f}", flush=True)
    told = {name: str(value) if isinstance(value, Path) else value for name, value in options.items() if name != "out"}
    found = {
        "options": told,
        "settings": spec.settings,
        "hardware": hardware(),
        "versions": versions(),
        "summary": summary(rows),
        "rows": rows,
    }
    write_atomic(given.out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    run_command(experiment, "memorisation")
