"""Objects met while driving: pFedGRP beside FedAvg and Centralized on real CARLA frames, several seeds, in one table.

    python -m replayfleet.scripts.experiments.driving_crops --out runs/driving --settings small --seeds 0,1,2

Runs scenario ``driving`` over ``carla-crops`` for every method and seed, each as a process of its own in
OUT/runs/<method>/driving/carla-crops/seed-<K>. Finished runs are not run again and interrupted ones go on, so the same
command can be given until all is done. Then OUT/driving.md, driving.json and driving.png are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.simulator.measures.metrics import Summary
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun
from replayfleet.federation.simulator.tables.running import Failure
from replayfleet.scripts.experiments.driving_experiment import (
    Experiment,
    FinishedRuns,
    choice_of,
    driving_parser,
    met,
    number,
    run_and_write,
    table_rows,
    write_files,
)

METHODS_SHOWN = ("pfedgrp", "fedavg", "fedavg-replay", "centralized")

EXPERIMENT = Experiment(
    title="Objects met while driving through all towns", dataset="carla-crops", methods=METHODS_SHOWN
)

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
    return EXPERIMENT.plan(choice)


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
        runs = EXPERIMENT.finished(choice, failures)
        return cls(runs.results, runs.missing, choice.preset, command)

    @property
    def runs(self) -> FinishedRuns:
        """The runs."""
        return FinishedRuns(self.results, self.missing)

    def lead(self, aim: Aim) -> Summary | None:
        """Return by how many points one method is ahead of the other, over the seeds that both have."""
        return self.runs.over_both(aim.better, aim.other, _points_ahead)

    def markdown(self) -> str:
        """Return the table for people."""
        headings = ["method", *(f"{heading} [%]" for heading in METRICS.values()), "sub-generator updates", "seeds"]
        sizes = self.runs.sizes(self.settings, "samples of one class")
        lines = [f"# {EXPERIMENT.title}", "", sizes, "", "```sh", " ".join(self.command), "```", ""]
        lines += table_rows(headings, [self._row(method) for method in self.results])
        lines += ["", "Accuracy after the last round by town [%], mean over clients and seeds:", ""]
        lines += self.runs.town_rows()
        lines += ["", *table_rows(["asked of the accuracy per town", "points ahead", "met"], map(self._aim, AIMS))]
        lines += ["", "![accuracy](driving.png)", "", "## Notes", ""]
        lines += [
            "- Accuracy per town: mean over the towns of the accuracy on a town's held-out crops, then over clients "
            "(docs/metrics.md). Towns count alike; the other columns count every crop alike.",
            "- Mean ± sample standard deviation over seeds; a single seed has no spread.",
            *self.runs.provenance(),
        ]
        return "\n".join(lines) + "\n"

    def values(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "title": EXPERIMENT.title,
            "settings": self.settings,
            "command": list(self.command),
            "runs": self.runs.values(),
            "aims": [
                {"asked": aim.text, "points_ahead": msgspec.to_builtins(self.lead(aim)), "at_least": aim.at_least}
                for aim in AIMS
            ],
            "missing": list(self.missing),
        }

    def chart(self) -> bytes:
        """Return accuracies over rounds as a PNG, mean and band over seeds; nothing if no run is finished."""
        return self.runs.chart(EXPERIMENT)

    def write(self, out: Path) -> list[Path]:
        """Write all files, and return them."""
        files = {
            "driving.md": self.markdown().encode(),
            "driving.json": msgspec.json.format(msgspec.json.encode(self.values()), indent=1) + b"\n",
            "driving.png": self.chart(),
        }
        return write_files(out, files)

    def _row(self, method: str) -> list[str]:
        updates = [result.summary["sub_generator_updates"] for result in self.results[method].values()]
        return [
            method,
            *(number(self.runs.summary(method, metric)) for metric in METRICS),
            f"{sum(updates) / len(updates):.1f}" if updates else "-",
            str(len(updates)),
        ]

    def _aim(self, aim: Aim) -> list[str]:
        lead = self.lead(aim)
        return [aim.text, number(lead, signed=True), met(lead, aim.at_least)]


def _points_ahead(better: Result, other: Result) -> float:
    return 100 * (better.summary["place_accuracy"] - other.summary["place_accuracy"])


def main() -> None:
    """Run what is missing and write the table; exit 1 if a run failed, 2 if nothing could be run."""
    options = driving_parser(__doc__, EXPERIMENT, "runs/driving").parse_args()
    run_and_write("driving_crops", EXPERIMENT, choice_of(options), options.jobs, Table.of)


if __name__ == "__main__":
    main()
