r"""Settings for every method at the same price: as many trials for each, on a stream that no table uses.

    python -m replayfleet.scripts.experiments.search pfedgrp pfedgrp-plus fedcil --trials 8 --out runs/search

Trial 0 is the method as tables have it, the others draw each of its settings below from a few values, with the number
of the trial as the seed. Training and test images are both of the training set, so that no test image of a table is
looked at. The score is the mean accuracy of the last five rounds. Every trial is a line of ``trials.jsonl``, whatever
came out; the same command goes on with those that are missing.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import ALL_METHODS
from replayfleet.federation.paths import FOLDER
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.torch_setup import let_idle_threads_sleep
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.records import costs, summarise
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_fields
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.scripts.experiments.reproduce import ROWS

SEED = 1000
"""Of the validation stream; tables have 0, 1, 2."""

TEST_SHARE = 6
"""One of so many training images of a class is a test image here, as in Fashion-MNIST's own division."""

SHARED: dict[str, tuple[str, ...]] = {
    "learning_rate": ("0.003", "0.01", "0.03"),
    "weight_decay": ("0", "0.001", "0.01"),
    "local_epochs": ("4", "8", "16"),
}
"""Settings of every method that has them -> values."""

OWN: dict[str, dict[str, tuple[str, ...]]] = {
    "pfedgrp": {
        "sub_generator_epochs": ("50", "120", "200"),
        "alignment_weight": ("0.1", "0.3", "1"),
        "aggregation_learning_rate": ("0.01", "0.03", "0.07"),
    },
    "pfedgrp-plus": {
        "pca_dims": ("16", "32", "64"),
        "alignment_weight": ("0.1", "0.3", "1"),
        "replay_credit": ("0", "0.25", "0.5", "1"),
        "choose": ("false", "true"),
    },
    "fedavg-replay": {"sub_generator_epochs": ("50", "120", "200")},
    "fedcil": {"local_iterations": ("90", "200", "400"), "gan_learning_rate": ("0.0001", "0.0003", "0.001")},
    "mfcl": {"generator_steps": ("40", "100", "200")},
    "lander": {"student_steps": ("10", "30", "50"), "synthesis_rounds": ("4", "10")},
    "target": {"synthesis_rounds": ("4", "10"), "passes": ("apart", "joined")},
    "affcl": {"local_iterations": ("40", "100", "200"), "flow_learning_rate": ("0.0001", "0.0003", "0.001")},
    "fedprox": {"mu": ("0.001", "0.01", "0.1")},
}
"""Method -> settings of its own -> values."""


_STREAM = (
    *(("--dataset", "dataset", "dataset"), ("--settings", "preset", "preset"), ("--scenario", "scenario", "scenario")),
    *(("--clients", "clients", "num_clients"), ("--rounds", "rounds", "num_rounds")),
)
"""Options that all trials of a file share, by their names here and in what a run was."""


def validation(data: Dataset) -> Dataset:
    """Return the training part alone, divided into training and test images class by class."""
    held_out = np.zeros(len(data.train.labels), dtype=np.bool_)
    for class_id in range(len(data.train.class_names)):
        places = np.flatnonzero(data.train.labels == class_id)
        held_out[places[len(places) - len(places) // TEST_SHARE :]] = True

    def part(chosen: Any) -> LabelledImages:
        places = np.flatnonzero(chosen)
        return dataclasses.replace(data.train, images=data.train.images[places], labels=data.train.labels[places])

    return dataclasses.replace(data, train=part(~held_out), test=part(held_out))


def trial_settings(method: str, trial: int) -> dict[str, str]:
    """Return what a trial changes in the method's row; nothing for trial 0.

    Raises:
        SettingsError: There is no such method.
    """
    known = method_fields(ALL_METHODS.named(method))
    choices = {name: values for name, values in {**SHARED, **OWN.get(method, {})}.items() if name in known}
    drawn = random.Random(f"{method}/{trial}")  # noqa: S311  # which settings to try is no secret
    return {name: drawn.choice(values) for name, values in choices.items()} if trial else {}


def run_trial(spec: RunSpec, data: Dataset) -> dict[str, Any]:
    """Run one trial and return its line."""
    simulation = simulation_of(spec, wanted_stream(spec), data)
    began = time.process_time()
    records = simulation.run()
    summary = summarise(records)
    return {
        "score": summary["late_accuracy"],
        "average_accuracy": summary["average_accuracy"],
        "accuracies": [record.accuracy for record in records],
        **costs(records),
        "process_cpu_s": time.process_time() - began,
        "run": identity_of(spec, simulation),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("methods", nargs=-1, required=True)
@click.option("--trials", type=click.IntRange(1), default=8, help="Of each method.")
@click.option("--scenario", default="gradual", help="Of the stream.")
@click.option("--dataset", default="fashion-mnist", help="Data set.")
@click.option("--settings", "preset", default="small", help="Preset that trial 0 is and others change.")
@click.option("--clients", type=click.IntRange(1), default=2, help="Of the stream.")
@click.option("--rounds", type=click.IntRange(1), default=10, help="Of the stream.")
@click.option("--set", "fixed", multiple=True, metavar="NAME=VALUE", help="In all trials of methods that have it.")
@click.option("--minutes", type=click.FloatRange(min=0), default=None, help="Begin no trial later.")
@click.option("--data-root", type=click.Path(path_type=Path), default=None, help="Folder of data sets.")
@click.option("--out", type=FOLDER, required=True, help="Folder of trials.jsonl.")
def search(
    methods: tuple[str, ...], trials: int, fixed: tuple[str, ...], minutes: float | None, out: Path, **given: Any
) -> int:
    """Try settings of METHODS, as many of each; exit code 3: the same command goes on."""
    let_idle_threads_sleep()
    everyones = {name for method in methods for name in method_fields(ALL_METHODS.named(method))}
    for word in fixed:
        if word.partition("=")[0] not in everyones:
            raise SettingsError(f"--set {word}: none of these methods has such a setting; expected NAME=VALUE")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "trials.jsonl"
    earlier = lines_of(path)
    if any(line["fixed"] != list(fixed) for line in earlier):
        was = ", ".join(earlier[0]["fixed"]) or "nothing"
        raise SettingsError(f"{path} has trials with {was} as --set; expected the same, or another --out")
    for ran in ({**line["run"].get("stream", {}), **line["run"]} for line in earlier):
        other = [f"{option} {ran[key]}" for option, name, key in _STREAM if ran.get(key, given[name]) != given[name]]
        if other:
            raise SettingsError(f"{path} has trials with {', '.join(other)}; expected the same, or another --out")
    done = {(line["method"], line["trial"]) for line in earlier}
    wanted = [(method, trial) for trial in range(trials) for method in methods if (method, trial) not in done]
    settings = {key: trial_settings(*key) for key in wanted}
    data = validation(load_dataset(given["dataset"], data_root=given["data_root"]))
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    for key in wanted:
        if ends is not None and time.monotonic() >= ends:
            click.echo(f"stopped: {minutes:g} minutes have passed; the same command goes on")
            return UNFINISHED
        row, known = ROWS.get(key[0], {}), method_fields(ALL_METHODS[key[0]])
        own = [word for word in fixed if word.partition("=")[0] in known]
        overrides = (*own, *(f"{name}={text}" for name, text in {**row, **settings[key]}.items()))
        spec = RunSpec(method=key[0], seed=SEED, overrides=overrides, workers=1, out=out, **given)
        line = {"method": key[0], "trial": key[1], "settings": settings[key], "fixed": fixed, **run_trial(spec, data)}
        line |= {"hardware": hardware(), "versions": versions(), "commit": commit()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
        click.echo(f"{key[0]}, trial {key[1]}: {100 * line['score']:.1f} % {' '.join(overrides)}".rstrip())
    for text in best_of(lines_of(path)):
        click.echo(text)
    return 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the trials of a file; none if there is no file.

    Raises:
        SettingsError: A line is no trial.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise SettingsError(f"{path} holds a line that is no trial ({error}); remove the line") from error


def best_of(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Return the best trial of each method in words, beside the preset's."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_method.setdefault(line["method"], []).append(line)
    return [_best(method, own) for method, own in by_method.items()]


def _best(method: str, lines: Sequence[dict[str, Any]]) -> str:
    best = max(lines, key=lambda line: (line["score"], -line["trial"]))
    preset = next((f", the preset {100 * line['score']:.1f} %" for line in lines if line["trial"] == 0), "")
    changed = ", ".join(f"{name}={text}" for name, text in best["settings"].items()) or "the preset itself"
    return f"{method}: best of {len(lines)} trials {100 * best['score']:.1f} %{preset}: {changed}"


if __name__ == "__main__":
    run_command(search, "search")
