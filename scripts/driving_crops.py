"""Objects met while driving: pFedGRP beside FedAvg and Centralized on real CARLA frames, several seeds, in one table.

    python -m scripts.driving_crops --out runs/driving --settings small --seeds 0,1,2

Runs scenario ``driving`` over ``carla-crops`` for every method and seed, each as a process of its own in
OUT/runs/<method>/driving/carla-crops/seed-<K>. Finished runs are not run again and interrupted ones go on, so the same
command can be given until all is done. Then OUT/driving.md, driving.json and driving.png are written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from federation.errors import ReplayfleetError
from federation.methods import METHODS
from federation.scenarios.charts import Curve, accuracy_chart
from federation.scenarios.metrics import Summary, over_seeds
from federation.scenarios.result import Result
from federation.scenarios.settings import default_settings
from federation.scenarios.tables.measured import Results, mean_curve, why
from federation.scenarios.tables.paper import Column, PaperTable, Row
from federation.scenarios.tables.plan import Choice, PlannedRun, Planner, State, distinct
from federation.scenarios.tables.running import Failure, Runner, earlier_work, launch_process
from federation.service.atomic import write_atomic
from federation.streams.stream import DRIVING

DATASET = "carla-crops"
METHODS_SHOWN = ("pfedgrp", "fedavg", "fedavg-replay", "centralized")
NUM_CLIENTS = 2

TITLE = "Objects met while driving through all towns"

METRICS = {
    "place_accuracy": "accuracy per town",
    "final_accuracy": "accuracy after the last round",
    "average_accuracy": "AA",
    "average_forgetting": "forgetting",
}
"""Key of a run's summary -> heading, all in percent."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What one method's accuracy per town should be beside another's.

    Attributes:
        better: the method that should be ahead.
        other: the method that it is compared with.
        at_least: percentage points that ``better`` should be ahead of ``other``; negative: no further behind.
        text: the same for people.
    """

    better: str
    other: str
    at_least: float
    text: str


AIMS = (
    Aim("pfedgrp", "fedavg", 10.0, "pfedgrp above fedavg by at least 10 points"),
    Aim("pfedgrp", "centralized", -5.0, "pfedgrp at most 5 points below centralized"),
)


def plan(choice: Choice) -> list[PlannedRun]:
    """Return the runs of all methods, seed by seed."""
    column = Column(scenario=DRIVING, dataset=DATASET, set={"num_clients": choice.clients or NUM_CLIENTS})
    rows = tuple(Row(label=name, method=name, in_paper=False) for name in METHODS_SHOWN)
    return Planner(choice).runs(
        PaperTable(number=DRIVING, title=TITLE, metrics=(), columns=(column,), rows=rows),
    )


def run(choice: Choice, num_jobs: int) -> list[Failure]:
    """Run what is missing."""
    runs = plan(choice)
    for planned in runs:
        if planned.state is State.IMPOSSIBLE:
            print(f"not possible: {planned.row.method}, seed {planned.seed}: {planned.problem}")
    to_do = [*distinct(runs, State.BEGUN), *distinct(runs, State.MISSING)]
    earlier = earlier_work(distinct(runs, State.FINISHED))
    runner = Runner(to_do, num_jobs, launch=launch_process, earlier=earlier)
    print(f"{len(to_do)} runs to do, {len(distinct(runs, State.FINISHED))} finished before; {runner.estimate()}")
    return runner.run_all()


@dataclass(frozen=True, slots=True)
class Table:
    """What all runs gave.

    Attributes:
        results: method -> seed -> its finished run.
        missing: why others have no numbers, one line each.
        settings: name of ``--settings``.
        command: what was typed.
    """

    results: Mapping[str, Mapping[int, Result]]
    missing: Sequence[str]
    settings: str
    command: Sequence[str]

    @classmethod
    def of(cls, choice: Choice, failures: Sequence[Failure], command: Sequence[str]) -> Table:
        """Read what is finished now."""
        reader, results, missing = Results(), dict[str, dict[int, Result]](), []
        reasons = {failure.run.folder: f"failed: {failure.reason}" for failure in failures}
        for planned in plan(choice):
            own = results.setdefault(planned.row.method, {})
            result = reader.of(planned)
            if result is None:
                missing.append(f"{planned.row.method}, seed {planned.seed}: {why(planned, reasons)}")
            else:
                own[planned.seed] = result
        return cls(results, missing, choice.preset, command)

    def summary(self, method: str, metric: str) -> Summary | None:
        """Return a metric of a method over its seeds, in percent."""
        values = [100 * result.summary[metric] for result in self.results[method].values()]
        return over_seeds(values) if values else None

    def by_town(self, method: str) -> dict[str, float]:
        """Return town -> accuracy after the last round in percent, mean over clients and seeds."""
        found: dict[str, list[float]] = {}
        for result in self.results[method].values():
            for client in result.rounds[-1].clients.values():
                for town, value in client.accuracy_by_place.items():
                    found.setdefault(town, []).append(100 * value)
        return {town: sum(values) / len(values) for town, values in sorted(found.items())}

    def lead(self, aim: Aim) -> Summary | None:
        """Return by how many points one method is ahead of the other, over the seeds that both have."""
        better, other = (self.results.get(name, {}) for name in (aim.better, aim.other))
        leads = [
            100 * (better[seed].summary["place_accuracy"] - other[seed].summary["place_accuracy"])
            for seed in sorted(better.keys() & other.keys())
        ]
        return over_seeds(leads) if leads else None

    def markdown(self) -> str:
        """Return the table for people."""
        headings = ["method", *(f"{heading} [%]" for heading in METRICS.values()), "sub-generator updates", "seeds"]
        lines = [f"# {TITLE}", "", self._sizes(), "", "```sh", " ".join(self.command), "```", ""]
        lines += _rows(headings, [self._row(method) for method in self.results])
        towns = sorted({town for method in self.results for town in self.by_town(method)})
        by_town = {method: self.by_town(method) for method in self.results}
        lines += ["", "Accuracy after the last round by town [%], mean over clients and seeds:", ""]
        lines += _rows(
            ["method", *towns],
            [
                [method, *(f"{own[town]:.1f}" if town in own else "-" for town in towns)]
                for method, own in by_town.items()
            ],
        )
        lines += ["", *_rows(["asked of the accuracy per town", "points ahead", "met"], map(self._aim, AIMS))]
        lines += ["", "![accuracy](driving.png)", "", "## Notes", ""]
        lines += [
            "- Accuracy per town: mean over the towns of the accuracy on a town's held-out crops, then over clients "
            "(docs/metrics.md). Towns count alike; the other columns count every crop alike.",
            "- Mean ± sample standard deviation over seeds; a single seed has no spread.",
            *(f"- {line}." for line in self._provenance()),
            *(f"- No numbers of {reason}." for reason in self.missing),
        ]
        return "\n".join(lines) + "\n"

    def values(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "title": TITLE,
            "settings": self.settings,
            "command": list(self.command),
            "runs": [
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
            ],
            "aims": [
                {"asked": aim.text, "points_ahead": msgspec.to_builtins(self.lead(aim)), "at_least": aim.at_least}
                for aim in AIMS
            ],
            "missing": list(self.missing),
        }

    def chart(self) -> bytes:
        """Return accuracies over rounds as a PNG, mean and band over seeds; nothing if no run is finished."""
        curves, stream = [], dict[str, Any]()
        for method, own in self.results.items():
            if own:
                bands = {str(seed): [record.accuracy for record in result.rounds] for seed, result in own.items()}
                curves.append(Curve(method, mean_curve(list(own.values())), bands))
                stream = next(iter(own.values())).stream
        if not curves:
            return b""
        changes, name = stream["changes"], stream["change_name"]
        return accuracy_chart(curves, title=f"{DATASET}, {DRIVING}", changes=changes, change_name=name, band="seed")

    def write(self, out: Path) -> list[Path]:
        """Write all files, and return them."""
        files = {
            "driving.md": self.markdown().encode(),
            "driving.json": msgspec.json.format(msgspec.json.encode(self.values()), indent=1) + b"\n",
            "driving.png": self.chart(),
        }
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content:
                write_atomic(out / name, content)
        return [out / name for name, content in files.items() if content]

    def _row(self, method: str) -> list[str]:
        updates = [result.summary["sub_generator_updates"] for result in self.results[method].values()]
        return [
            method,
            *(_text(self.summary(method, metric)) for metric in METRICS),
            f"{sum(updates) / len(updates):.1f}" if updates else "-",
            str(len(updates)),
        ]

    def _aim(self, aim: Aim) -> list[str]:
        lead = self.lead(aim)
        met = "not measured" if lead is None else "yes" if lead.mean >= aim.at_least else "no"
        return [aim.text, _text(lead, signed=True), met]

    def _sizes(self) -> str:
        runs = [result.run for own in self.results.values() for result in own.values()]
        if not runs:
            return f"Settings `{self.settings}`. Nothing has been run yet."
        stream = runs[0]["stream"]
        return (
            f"Settings `{self.settings}`: {stream['num_clients']} clients, {stream['num_rounds']} rounds, at most "
            f"{stream['samples_per_class']} samples of one class in a round."
        )

    def _provenance(self) -> list[str]:
        lines = []
        for method, own in self.results.items():
            for seed, result in own.items():
                took = sum(record.round_s for record in result.rounds)
                where = f"{result.hardware['processor']}, {result.run['num_threads']} threads"
                lines.append(f"{method}, seed {seed}: {took:.0f} s of rounds on {where}, commit {result.commit or '?'}")
            if own:
                settings = next(iter(own.values())).run["settings"]
                defaults = default_settings(METHODS[method]) if method in METHODS else {}
                changed = [f"`{key}={value}`" for key, value in settings.items() if value != defaults.get(key, value)]
                lines.append(f"{method} differs from its defaults in {', '.join(changed) or 'nothing'}")
        return lines


def _rows(headings: Sequence[str], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def _text(summary: Summary | None, *, signed: bool = False) -> str:
    if summary is None:
        return "-"
    mean = f"{summary.mean:+.1f}" if signed else f"{summary.mean:.1f}"
    return mean if summary.spread is None else f"{mean} ± {summary.spread:.1f}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(word) for word in _words(text)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/driving"))
    parser.add_argument("--settings", default="small", help="paper, small, demo or tiny")
    parser.add_argument("--seeds", type=_seeds, default=(0, 1, 2), help="comma-separated")
    parser.add_argument("--methods", type=_words, default=(), help=f"comma-separated; else {', '.join(METHODS_SHOWN)}")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--rounds", type=int, help="of every run, divided over the towns")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data-root", type=Path, help="folder that holds carla/; else $REPLAYFLEET_DATA")
    parser.add_argument("--torch-device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each gets cores / jobs threads")
    return parser


def main() -> None:
    """Run what is missing and write the table; exit 1 if a run failed, 2 if nothing could be run."""
    options = _parser().parse_args()
    num_jobs = max(1, options.jobs)
    try:
        choice = Choice(
            out=options.out,
            preset=options.settings,
            seeds=options.seeds,
            methods=options.methods,
            clients=options.clients,
            rounds=options.rounds,
            overrides=tuple(options.overrides),
            data_root=options.data_root,
            torch_device=options.torch_device,
            threads=max(1, (os.cpu_count() or 1) // num_jobs),
        )
        failures = run(choice, num_jobs)
        table = Table.of(choice, failures, ["python", "-m", "scripts.driving_crops", *sys.argv[1:]])
        print(f"wrote {', '.join(str(path) for path in table.write(choice.out))}")
    except ReplayfleetError as error:
        print(f"driving_crops: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if failures or table.missing else 0)


if __name__ == "__main__":
    main()
