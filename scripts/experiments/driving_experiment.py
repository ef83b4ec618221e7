"""What tables of driving share: their runs, what is read from them, rows, charts and the command line.

An experiment is one data set, driven through by several methods under several seeds, each run a process of its own in
OUT/runs/<method>/driving/<data set>/seed-<K>. Finished runs are not run again and interrupted ones go on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.simulator.charts import Curve, accuracy_chart
from replayfleet.federation.simulator.measures.metrics import Summary, over_seeds
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.settings import default_settings
from replayfleet.federation.simulator.tables.measured import Results, mean_curve, why
from replayfleet.federation.simulator.tables.paper import Column, PaperTable, Row
from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun, Planner, State, distinct, workers_each
from replayfleet.federation.simulator.tables.running import Failure, Runner, earlier_work, launch_process
from replayfleet.federation.streams.stream import DRIVING

NUM_CLIENTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What is run.

    Attributes:
        title: of the table.
        dataset: its name.
        methods: those of the table, unless the operator names others.
        measure: what accuracies are, for people.
    """

    title: str
    dataset: str
    methods: tuple[str, ...]
    measure: str = "accuracy"

    def plan(self, choice: Choice) -> list[PlannedRun]:
        """Return the runs of all methods, seed by seed."""
        column = Column(scenario=DRIVING, dataset=self.dataset, set={"num_clients": choice.clients or NUM_CLIENTS})
        rows = tuple(Row(label=name, method=name, in_paper=False) for name in self.methods)
        return Planner(choice).runs(
            PaperTable(number=DRIVING, title=self.title, metrics=(), columns=(column,), rows=rows)
        )

    def run(self, choice: Choice, num_jobs: int) -> list[Failure]:
        """Run what is missing."""
        runs = self.plan(choice)
        for planned in runs:
            if planned.state is State.IMPOSSIBLE:
                print(f"not possible: {planned.row.method}, seed {planned.seed}: {planned.problem}")
        to_do = [*distinct(runs, State.BEGUN), *distinct(runs, State.MISSING)]
        earlier = earlier_work(distinct(runs, State.FINISHED))
        runner = Runner(to_do, num_jobs, launch=launch_process, earlier=earlier)
        print(f"{len(to_do)} runs to do, {len(distinct(runs, State.FINISHED))} finished before; {runner.estimate()}")
        return runner.run_all()

    def finished(self, choice: Choice, failures: Sequence[Failure]) -> FinishedRuns:
        """Read what is finished now."""
        reader, results, missing = Results(), dict[str, dict[int, Result]](), []
        reasons = {failure.run.folder: f"failed: {failure.reason}" for failure in failures}
        for planned in self.plan(choice):
            own = results.setdefault(planned.row.method, {})
            result = reader.of(planned)
            if result is None:
                missing.append(f"{planned.row.method}, seed {planned.seed}: {why(planned, reasons)}")
            else:
                own[planned.seed] = result
        return FinishedRuns(results, missing)


@dataclass(frozen=True, slots=True)
class FinishedRuns:
    """What all runs gave.

    Attributes:
        results: method -> seed -> its finished run.
        missing: why others have no numbers, one line each.
    """

    results: Mapping[str, Mapping[int, Result]]
    missing: Sequence[str] = field(default_factory=tuple)

    def summary(self, method: str, metric: str) -> Summary | None:
        """Return a metric of a method over the seeds that have it, in percent."""
        results = self.results.get(method, {}).values()
        values = [100 * result.summary[metric] for result in results if metric in result.summary]
        return over_seeds(values) if values else None

    def over_both(self, first: str, second: str, value: Callable[[Result, Result], float]) -> Summary | None:
        """Return a comparison of two methods over the seeds that both have."""
        one, other = self.results.get(first, {}), self.results.get(second, {})
        values = [value(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]
        return over_seeds(values) if values else None

    def by_town(self, method: str) -> dict[str, float]:
        """Return town -> accuracy after the last round in percent, mean over clients and seeds."""
        found: dict[str, list[float]] = {}
        for result in self.results[method].values():
            for client in result.rounds[-1].clients.values():
                for town, value in client.accuracy_by_place.items():
                    found.setdefault(town, []).append(100 * value)
        return {town: sum(values) / len(values) for town, values in sorted(found.items())}

    def town_rows(self) -> list[str]:
        """Return the table of ``by_town``."""
        by_town = {method: self.by_town(method) for method in self.results}
        towns = sorted({town for own in by_town.values() for town in own})
        rows = [
            [method, *(f"{own[town]:.1f}" if town in own else "-" for town in towns)] for method, own in by_town.items()
        ]
        return table_rows(["method", *towns], rows)

    def sizes(self, settings: str, most: str) -> str:
        """Return a line on how large the runs are; ``most`` says what ``samples_per_class`` counts."""
        runs = [result.run for own in self.results.values() for result in own.values()]
        if not runs:
            return f"Settings `{settings}`. Nothing has been run yet."
        stream = runs[0]["stream"]
        return (
            f"Settings `{settings}`: {stream['num_clients']} clients, {stream['num_rounds']} rounds, at most "
            f"{stream['samples_per_class']} {most} in a round."
        )

    def provenance(self) -> list[str]:
        """Return where and how every run was made, as items of a list."""
        lines = []
        for method, own in self.results.items():
            for seed, result in own.items():
                took = sum(record.round_s for record in result.rounds)
                where = f"{result.hardware['processor']}, {result.run['num_threads']} threads"
                lines.append(f"{method}, seed {seed}: {took:.0f} s of rounds on {where}, commit {result.commit or '?'}")
            if own:
                run = next(iter(own.values())).run
                defaults = default_settings(METHODS[run["method"]]) if run["method"] in METHODS else {}
                changed = [
                    f"`{key}={value}`" for key, value in run["settings"].items() if value != defaults.get(key, value)
                ]
                lines.append(f"{method} differs from its defaults in {', '.join(changed) or 'nothing'}")
        return [*(f"- {line}." for line in lines), *(f"- No numbers of {reason}." for reason in self.missing)]

    def values(self) -> list[dict[str, Any]]:
        """Return the runs as JSON values."""
        return [
            {
                "method": method,
                "seed": seed,
                "summary": result.summary,
                "by_town": {name: client.accuracy_by_place for name, client in result.rounds[-1].clients.items()},
                "seconds": sum(record.round_s for record in result.rounds),
                "run": result.run,
                "commit": result.commit,
                "hardware": result.hardware,
                "versions": result.versions,
            }
            for method, own in self.results.items()
            for seed, result in own.items()
        ]

    def chart(self, experiment: Experiment) -> bytes:
        """Return accuracies over rounds as a PNG, mean and band over seeds; nothing if no run is finished."""
        curves, stream = [], dict[str, Any]()
        for method, own in self.results.items():
            if own:
                bands = {str(seed): [record.accuracy for record in result.rounds] for seed, result in own.items()}
                curves.append(Curve(method, mean_curve(list(own.values())), bands))
                stream = next(iter(own.values())).stream
        if not curves:
            return b""
        return accuracy_chart(
            curves,
            title=f"{experiment.dataset}, {DRIVING}",
            changes=stream["changes"],
            change_name=stream["change_name"],
            band="seed",
            measure=experiment.measure,
        )


class Written(Protocol):
    """A table that was put together."""

    @property
    def missing(self) -> Sequence[str]:
        """Why runs have no numbers."""

    def write(self, out: Path) -> list[Path]:
        """Write all files, and return them."""


def write_files(out: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write those that aren't empty, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content:
            write_atomic(out / name, content)
    return [out / name for name, content in files.items() if content]


def table_rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table, line by line."""
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def number(summary: Summary | None, *, signed: bool = False) -> str:
    """Return mean and spread for a cell."""
    if summary is None:
        return "-"
    mean = f"{summary.mean:+.1f}" if signed else f"{summary.mean:.1f}"
    return mean if summary.spread is None else f"{mean} ± {summary.spread:.1f}"


def met(summary: Summary | None, at_least: float) -> str:
    """Return whether a mean reaches what was asked."""
    return "not measured" if summary is None else "yes" if summary.mean >= at_least else "no"


def driving_parser(description: str | None, experiment: Experiment, out: str) -> argparse.ArgumentParser:
    """Return the options that all experiments have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--settings", default="small", help="paper, small, demo or tiny")
    parser.add_argument("--seeds", type=_seeds, default=(0, 1, 2), help="comma-separated")
    methods = ", ".join(experiment.methods)
    parser.add_argument("--methods", type=_words, default=(), help=f"comma-separated; else {methods}")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--rounds", type=int, help="of every run, divided over the towns")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data-root", type=Path, help="folder that holds carla/; else $REPLAYFLEET_DATA")
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each trains cores / jobs clients")
    return parser


def choice_of(options: argparse.Namespace, overrides: Sequence[str] = ()) -> Choice:
    """Return what the options ask for; the operator's own settings come after ``overrides``."""
    return Choice(
        out=options.out,
        preset=options.settings,
        seeds=options.seeds,
        methods=options.methods,
        clients=options.clients,
        rounds=options.rounds,
        overrides=(*overrides, *options.overrides),
        data_root=options.data_root,
        torch_device=options.torch_device,
        workers=workers_each(options.jobs, options.torch_device),
    )


def run_and_write(
    name: str,
    experiment: Experiment,
    choice: Choice,
    num_jobs: int,
    table: Callable[[Choice, Sequence[Failure], Sequence[str]], Written],
) -> None:
    """Run what is missing and write the table; exit 0, 1 if a run failed, 2 if nothing could be run."""
    try:
        failures = experiment.run(choice, max(1, num_jobs))
        written = table(choice, failures, ["python", "-m", f"scripts.{name}", *sys.argv[1:]])
        print(f"wrote {', '.join(str(path) for path in written.write(choice.out))}")
    except ReplayfleetError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if failures or written.missing else 0)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(word) for word in _words(text)))
