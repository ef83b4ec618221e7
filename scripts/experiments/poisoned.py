"""What poisoned learning costs the honest clients, with every robust average and without.

    python -m replayfleet.scripts.experiments.poisoned --out runs/poisoned

Five clients learn four classes of Fashion-MNIST, two a round in turn, with a task model whose first convolution has
stride 2, so that all runs fit into ten minutes of one idle core. After four rounds without an attack, which all runs of
a method and a seed share, the last client is hostile in the two that follow. Beside that stands what the other four
reach in these rounds if it is gone. Seeds come one after the other. After every run OUT/poisoned.json has all that was
measured and OUT/poisoned.md the table; the same command goes on with the runs that are missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.artefact_codec import encode_artefacts
from replayfleet.federation.service.command import run_command
from replayfleet.federation.simulator.attacks import ATTACKS, Attack
from replayfleet.federation.simulator.checkpoints import Checkpoints, holds_run
from replayfleet.federation.simulator.measures.accounts import DigestOnly
from replayfleet.federation.simulator.records import RoundRecord
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.federation.streams.stream import Stream, StreamSettings, client_id

NUM_CLASSES = 4
NUM_CLIENTS = 5
NUM_BEFORE, NUM_ATTACKED = 4, 2
"""Rounds without and with an attack."""

SAMPLES_PER_CLASS, TEST_SAMPLES_PER_CLASS = 24, 30
SETTINGS = {
    "fedavg": {"local_epochs": 4},
    "pfedgrp": {
        "local_epochs": 4,
        "sub_generator_epochs": 60,
        "gate_samples": 32,
        "max_tries_factor": 3,
        "replay_per_client": 48,
        "aggregation_batch_size": 16,
        "aggregation_epochs": 3,
    },
}
"""On top of preset ``small``."""

LIMIT_POINTS = 2.0
"""How much accuracy honest clients may lose to a hostile one."""


@dataclass(frozen=True)
class Row:
    """One way to stand an attack.

    Attributes:
        method: that trains and aggregates.
        robust: its robust average.
        quarantine: whether uploads are screened too, as in a fleet.
    """

    method: str
    robust: str = "none"
    quarantine: bool = False

    @property
    def name(self) -> str:
        """For people."""
        parts = [self.method, self.robust] if self.robust != "none" else [self.method]
        return "+".join([*parts, "quarantine"] if self.quarantine else parts)


_RULES = ("none", "median", "trimmed-mean", "krum", "multi-krum")
ROWS = (
    *(Row("pfedgrp", rule) for rule in _RULES),
    *(Row("fedavg", rule) for rule in _RULES),
    Row("pfedgrp", quarantine=True),
    Row("fedavg", quarantine=True),
)


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        row: how it stands the attack.
        attack: a key of ``ATTACKS``; empty for the honest clients alone.
        seed: of stream, models and training.
    """

    row: Row
    attack: str
    seed: int


def few_classes(dataset: Dataset) -> Dataset:
    """Return the data set with its first ``NUM_CLASSES`` classes alone, and smaller models."""

    def part(images: LabelledImages) -> LabelledImages:
        places = np.flatnonzero(images.labels < NUM_CLASSES)
        return dataclasses.replace(images, images=images.images[places], labels=images.labels[places])

    names = dataset.task.class_names[:NUM_CLASSES]
    task = dataclasses.replace(dataset.task, class_names=names, stem="imagenet", generator_width=8)
    return dataclasses.replace(dataset, task=task, train=part(dataset.train), test=part(dataset.test))


class Fleet:
    """The fleet of one method and one seed when the attack begins.

    Args:
        method: its name.
        seed: of stream, models and training.
        dataset: what is learned.
        folder: for its state; what an interrupted run has left there is used.
    """

    def __init__(self, method: str, seed: int, dataset: Dataset, folder: Path) -> None:
        self._method, self._seed, self._dataset, self._folder = method, seed, dataset, folder
        self._known: dict[str, Any] = {}
        before = Checkpoints(folder)
        if before.num_rounds() < NUM_BEFORE:
            before.begin({"method": method, "seed": seed, **described()}, resume=holds_run(folder))
            self._simulation(Row(method), NUM_CLIENTS, NUM_BEFORE).run(checkpoints=before)

    def attacked(self, row: Row, attack: str) -> list[RoundRecord]:
        """Return the rounds with an attack, or without the last client where ``attack`` is empty."""
        num_clients = NUM_CLIENTS if attack else NUM_CLIENTS - 1
        simulation = self._simulation(row, num_clients, NUM_BEFORE + NUM_ATTACKED)
        simulation = dataclasses.replace(
            simulation,
            method=_remembering(simulation.method, self._known),
            attack=Attack(attack) if attack else None,
            screens=row.quarantine,
        )
        with tempfile.TemporaryDirectory(dir=self._folder.parent) as own:
            state = Path(own) / "state"
            shutil.copytree(self._folder, state)
            return simulation.run(checkpoints=Checkpoints(state))[NUM_BEFORE:]

    def _simulation(self, row: Row, num_clients: int, num_rounds: int) -> Simulation:
        train, test = self._dataset.train, self._dataset.test
        wanted = StreamSettings(
            scenario="circulating",
            num_clients=num_clients,
            num_rounds=num_rounds,
            samples_per_class=SAMPLES_PER_CLASS,
            test_samples_per_class=TEST_SAMPLES_PER_CLASS,
            seed=self._seed,
        )
        changes = {**SETTINGS[self._method], "robust": row.robust, "hostile_share": 1 / NUM_CLIENTS}
        texts = {key: str(value) for key, value in changes.items()}
        method = method_from(METHODS[self._method], self._dataset.task, "small", texts)
        return Simulation(
            method=method,
            dataset=self._dataset,
            stream=Stream(wanted, train.labels, test.labels, NUM_CLASSES),
            run_seed=self._seed,
            sampler=sampler_of(method),
        )


def _remembering(method: Any, known: dict[str, Any]) -> Any:
    """Return the method with a memory of its first local rounds: the honest ones in the first round of every attack."""

    class Remembering(type(method)):  # type: ignore[misc]
        __slots__ = ()

        def local_round(self, state: Any, data: Any, download: Any, rng: Any, **others: Any) -> Any:
            key = hashlib.sha256(rng.get_state().numpy().tobytes())
            for value in (state, download):
                encoded = encode_artefacts(value.pack(), DigestOnly())
                key.update(msgspec.msgpack.encode((encoded.blobs, encoded.facts)))
            key.update(data.images.numpy().tobytes() + data.labels.numpy().tobytes())
            found = known.get(key.hexdigest())
            if found is None:
                found = super().local_round(state, data, download, rng, **others)
                if len(known) < NUM_CLIENTS - 1:
                    known[key.hexdigest()] = found
            return found

    return Remembering(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


def cells(rows: Sequence[Row], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all runs, seed by seed and method by method; the honest clients alone first."""
    for seed in seeds:
        for method in dict.fromkeys(row.method for row in rows):
            for attack in ("", *ATTACKS):
                for row in rows:
                    if row.method == method:
                        yield Cell(row, attack, seed)


def measured(cell: Cell, fleet: Fleet) -> dict[str, Any]:
    """Run a cell, and return what it found as JSON values: accuracies of the honest clients, round by round."""
    began = time.process_time()
    records = fleet.attacked(cell.row, cell.attack)
    left_out: dict[str, list[int]] = {}
    for record in records:
        for name, client in record.clients.items():
            if client.quarantined:
                left_out.setdefault(name, []).append(record.round)
    return {
        "row": cell.row.name,
        "attack": cell.attack,
        "seed": cell.seed,
        "accuracy": [round(record.accuracy, 4) for record in records],
        "left_out_in_rounds": left_out,
        "cpu_s": round(time.process_time() - began, 1),
        "commit": commit(),
    }


def average_accuracy(run: Mapping[str, Any]) -> float:
    """Return the mean over the rounds with an attack, in percent."""
    return 100 * float(statistics.mean(run["accuracy"]))


def losses(runs: Sequence[Mapping[str, Any]], row: str, attack: str) -> list[float]:
    """Return what honest clients lose to an attack, in points, one value a seed."""
    at = {(run["row"], run["attack"], run["seed"]): average_accuracy(run) for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    pairs = [(at.get((row, "", seed)), at.get((row, attack, seed))) for seed in seeds]
    return [alone - attacked for alone, attacked in pairs if alone is not None and attacked is not None]


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: accuracy without the hostile client, and what is lost with it; bold where it is too much."""
    lines = [
        f"| method | without, % | {' | '.join(ATTACKS)} | left out, of {NUM_ATTACKED} rounds a seed |",
        f"|---|--:|{'--:|' * len(ATTACKS)}---|",
    ]
    for row in dict.fromkeys(run["row"] for run in runs):
        alone = [average_accuracy(run) for run in runs if (run["row"], run["attack"]) == (row, "")]
        found = [losses(runs, row, attack) for attack in ATTACKS]
        texts = [
            f"**{_with_spread(one)}**" if one and statistics.mean(one) > LIMIT_POINTS else _with_spread(one)
            for one in found
        ]
        lines.append(f"| `{row}` | {_with_spread(alone)} | {' | '.join(texts)} | {_left_out(runs, row)} |")
    return "\n".join(lines) + "\n"


def _with_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _left_out(runs: Sequence[Mapping[str, Any]], row: str) -> str:
    """How often the hostile client was left out, and how often any honest one."""
    hostile = client_id(NUM_CLIENTS - 1)
    found = []
    for attack in ("", *ATTACKS):
        those = [run["left_out_in_rounds"] for run in runs if (run["row"], run["attack"]) == (row, attack)]
        guilty = sum(len(rounds) for one in those for name, rounds in one.items() if attack and name == hostile)
        others = sum(len(rounds) for one in those for rounds in one.values()) - guilty
        if guilty or others:
            found.append(f"{attack or 'nobody'} {guilty}" + (f", honest {others}" if others else ""))
    return "; ".join(found)


def described() -> dict[str, Any]:
    """Return what all runs have in common."""
    return {
        "dataset": "fashion-mnist",
        "num_classes": NUM_CLASSES,
        "stem": "imagenet",
        "generator_width": 8,
        "scenario": "circulating",
        "num_clients": NUM_CLIENTS,
        "rounds_before": NUM_BEFORE,
        "rounds_attacked": NUM_ATTACKED,
        "samples_per_class": SAMPLES_PER_CLASS,
        "test_samples_per_class": TEST_SAMPLES_PER_CLASS,
        "preset": "small",
        "settings": SETTINGS,
    }


def whole_numbers(seeds: str) -> list[int]:
    """Return the numbers of ``--seeds a,b,c``; raises SettingsError."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise SettingsError(f"--seeds is {seeds!r}, expected whole numbers with commas between") from error


def as_lines(found: Mapping[str, Any]) -> bytes:
    """Return JSON with a line for each run."""
    runs = b",\n".join(msgspec.json.encode(run) for run in found["runs"])
    rest: bytes = msgspec.json.format(msgspec.json.encode({**found, "runs": []}), indent=1)
    return rest.replace(b'"runs": []', b'"runs": [\n' + runs + b"\n]") + b"\n"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=ANY_PATH, required=True, help="Folder for states and results.")
@click.option("--data-root", type=ANY_PATH, help="Folder of data sets, as fleet-sim's.")
@click.option("--seeds", default="0,1,2", help="a,b,c.")
@click.option("--rows", default="", help="a,b,c of those in the table; all if not given.")
@click.option("--minutes", type=click.FloatRange(0), help="Begin no run after that; the same command goes on.")
def poisoned(out: Path, data_root: Path | None, seeds: str, rows: str, minutes: float | None) -> None:
    """Measure what one hostile client of five costs the others."""
    numbers = whole_numbers(seeds)
    wanted = rows.split(",") if rows else [row.name for row in ROWS]
    chosen = [row for row in ROWS if row.name in wanted]
    if len(chosen) < len(wanted):
        raise SettingsError(f"--rows {rows}: expected some of {', '.join(row.name for row in ROWS)}")
    out.mkdir(parents=True, exist_ok=True)
    dataset = few_classes(load_dataset("fashion-mnist", data_root=data_root))
    path = out / "poisoned.json"
    runs: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["runs"] if path.exists() else []
    done = {(run["row"], run["attack"], run["seed"]) for run in runs}
    fleets: dict[tuple[str, int], Fleet] = {}
    started = time.monotonic()
    for cell in cells(chosen, numbers):
        if (cell.row.name, cell.attack, cell.seed) in done:
            continue
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            print("stopped: the same command goes on")
            break
        place = (cell.row.method, cell.seed)
        if place not in fleets:
            fleets = {place: Fleet(*place, dataset, out / f"{cell.row.method}-seed-{cell.seed}")}
        runs.append(measured(cell, fleets[place]))
        print(
            f"seed {cell.seed}  {cell.row.name:<20} {cell.attack or 'nobody':<10} "
            f"{average_accuracy(runs[-1]):.1f} %  {runs[-1]['cpu_s']} s of CPU",
            flush=True,
        )
        found = {"settings": described(), "hardware": hardware(), "versions": versions(), "runs": runs}
        write_atomic(path, as_lines(found))
        write_atomic(out / "poisoned.md", page(runs).encode())


if __name__ == "__main__":
    run_command(poisoned, "poisoned")
