"""What becomes of a fleet in which some clients are always late, by what the aggregator makes of their uploads.

    python -m replayfleet.scripts.experiments.late --out runs/late

Five clients learn the ten classes of Fashion-MNIST, two a round in turn or each two for some rounds, with the settings
of ``poisoned``. Two of them take one and a half rounds for a round: they train every second one, and what they have
trained comes in the next. It is refused, as ``aggregator serve`` does it by itself, counts whole, or counts as with
``--late-rounds 1``; beside that stands a fleet in which nobody is slow. After every run OUT/late.json has all that was
measured and OUT/late.md the table; the same command goes on with the runs that are missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.kit.late import drawn_back
from replayfleet.federation.methods.kit.records import ClientId
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.paths import ANY_PATH
from replayfleet.federation.service.command import run_command
from replayfleet.federation.simulator.client_threads import ClientThreads
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.stream import Stream, StreamSettings, client_id
from replayfleet.scripts.experiments.poisoned import SETTINGS, as_lines, whole_numbers

NUM_CLIENTS, NUM_SLOW, NUM_ROUNDS = 5, 2, 12
SAMPLES_PER_CLASS, TEST_SAMPLES_PER_CLASS = 24, 30
METHOD_NAMES, STREAM_NAMES = ("fedavg", "pfedgrp"), ("circulating", "gradual")

WAYS = {
    "nobody is slow": None,
    "refused": lambda *_: None,
    "counts whole": lambda _method, upload, _newest: upload,
    "drawn to the newest model": lambda method, upload, newest: drawn_back(method, upload, newest, 1),
}
"""What becomes of an upload that is one round late, of (method, upload, newest download)."""


class StreamOfSlow(Stream):
    """A stream whose last clients begin only every second round."""

    def present(self, round_index: int) -> tuple[int, ...]:
        """Clients that begin the round, rising."""
        slow = range(NUM_CLIENTS - NUM_SLOW, NUM_CLIENTS) if round_index % 2 else ()
        return tuple(client for client in super().present(round_index) if client not in slow)


@dataclass(frozen=True, kw_only=True, slots=True)
class LateSimulation(Simulation):
    """A simulation in which what slow clients have trained comes one round later.

    Attributes:
        becomes: a value of ``WAYS``.
    """

    becomes: Callable[[Any, Any, Any], Any]
    _coming: dict[ClientId, Any] = field(default_factory=dict)

    def _local_rounds(
        self,
        round_index: int,
        state: Any,
        threads: ClientThreads,
        on_client: Callable[[int, ClientId], None] | None,
    ) -> dict[ClientId, Any]:
        come, trained = dict(self._coming), Simulation._local_rounds(self, round_index, state, threads, on_client)
        self._coming.clear()
        for index in range(NUM_CLIENTS - NUM_SLOW, NUM_CLIENTS):
            name = client_id(index)
            if name in trained:
                self._coming[name] = trained.pop(name)
            if name in come:
                upload = self.becomes(self.method, come[name].upload, state.downloads[name])
                if upload is not None:
                    trained[name] = dataclasses.replace(come[name], upload=upload)
        return dict(sorted(trained.items()))


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    scenario: str
    method: str
    way: str
    seed: int


def simulation(cell: Cell, dataset: Dataset) -> Simulation:
    """Return a run that has not begun."""
    wanted = StreamSettings(
        scenario=cell.scenario,
        num_clients=NUM_CLIENTS,
        num_rounds=NUM_ROUNDS,
        samples_per_class=SAMPLES_PER_CLASS,
        test_samples_per_class=TEST_SAMPLES_PER_CLASS,
        seed=cell.seed,
    )
    met = wanted, dataset.train.labels, dataset.test.labels, dataset.task.num_classes
    texts = {key: str(value) for key, value in SETTINGS[cell.method].items()}
    method = method_from(METHODS[cell.method], dataset.task, "small", texts)
    shared: dict[str, Any] = {
        "method": method,
        "dataset": dataset,
        "run_seed": cell.seed,
        "sampler": sampler_of(method),
    }
    becomes = WAYS[cell.way]
    if becomes is None:
        return Simulation(stream=Stream(*met), **shared)
    return LateSimulation(stream=StreamOfSlow(*met), becomes=becomes, **shared)


def measured(cell: Cell, dataset: Dataset) -> dict[str, Any]:
    """Run, and return accuracies by round as JSON values: of the whole fleet, and of its slow clients."""
    records = simulation(cell, dataset).run()
    slow = [client_id(index) for index in range(NUM_CLIENTS - NUM_SLOW, NUM_CLIENTS)]
    of_slow = [statistics.mean(record.clients[name].accuracy for name in slow) for record in records]
    return {
        **dataclasses.asdict(cell),
        "accuracy": [round(record.accuracy, 4) for record in records],
        "accuracy_of_slow": [round(value, 4) for value in of_slow],
        "commit": commit(),
    }


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: mean accuracy over all rounds and over the last five, and that of the slow clients, in %."""
    lines = [
        "| stream | method | late uploads | all rounds | last five | slow clients, last five |",
        "|---|---|---|--:|--:|--:|",
    ]
    columns = (("accuracy", 0), ("accuracy", -5), ("accuracy_of_slow", -5))
    for scenario, name, way in itertools.product(STREAM_NAMES, METHOD_NAMES, WAYS):
        if those := [run for run in runs if (run["scenario"], run["method"], run["way"]) == (scenario, name, way)]:
            numbers = " | ".join(_over(those, key, since) for key, since in columns)
            lines.append(f"| {scenario} | `{name}` | {way} | {numbers} |")
    return "\n".join(lines) + "\n"


def _over(runs: Sequence[Mapping[str, Any]], key: str, since: int) -> str:
    """Mean and sample standard deviation over the seeds."""
    values = [100 * statistics.mean(run[key][since:]) for run in runs]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--out", type=ANY_PATH, required=True, help="Folder for results.")
@click.option("--data-root", type=ANY_PATH, help="Folder of data sets, as fleet-sim's.")
@click.option("--seeds", default="0,1,2", help="a,b,c.")
def late(out: Path, data_root: Path | None, seeds: str) -> None:
    """Measure what slow clients of a fleet are worth to it, and it to them."""
    out.mkdir(parents=True, exist_ok=True)
    whole = load_dataset("fashion-mnist", data_root=data_root)
    dataset = dataclasses.replace(whole, task=dataclasses.replace(whole.task, stem="imagenet", generator_width=8))
    path = out / "late.json"
    runs: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["runs"] if path.exists() else []
    done = {Cell(run["scenario"], run["method"], run["way"], run["seed"]) for run in runs}
    for scenario, seed, name, way in itertools.product(STREAM_NAMES, whole_numbers(seeds), METHOD_NAMES, WAYS):
        cell = Cell(scenario, name, way, seed)
        if cell in done:
            continue
        runs.append(measured(cell, dataset))
        average = 100 * statistics.mean(runs[-1]["accuracy"])
        print(f"{scenario:<11} seed {seed}  {name:<8} {way:<26} {average:.1f} %", flush=True)
        found = {"settings": SETTINGS, "hardware": hardware(), "versions": versions(), "runs": runs}
        write_atomic(path, as_lines(found))
        write_atomic(out / "late.md", page(runs).encode())


if __name__ == "__main__":
    run_command(late, "late")
