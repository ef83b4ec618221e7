"""Detectors that forget: FedGP beside FedAvg, DER, A-GEM and Ideal on real CARLA frames with a late change of domain.

    python -m replayfleet.scripts.experiments.driving_boxes --out runs/driving-boxes --settings small --seeds 0,1,2

Two vehicles drive through all towns but one; in the last seventh of the rounds the first of them gets to that one
(``--late-town``), as one of FedGP's gets on the highway at round 60 of 70. Runs scenario ``driving`` over
``carla-boxes`` for every method and seed, each as a process of its own in
OUT/runs/<method>/driving/carla-boxes/seed-<K>. Finished runs are not run again and interrupted ones go on, so the same
command can be given until all is done. Then OUT/driving-boxes.md, driving-boxes.json and driving-boxes.png are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.simulator.measures.metrics import Summary
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.plan import Choice
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

LATE_TOWN = "Town05"

EXPERIMENT = Experiment(
    title="What detectors keep of the earlier towns after a late change of domain",
    dataset="carla-boxes",
    methods=("fedavg", "der", "agem", "fedgp", "der-fedgp", "ideal"),
    measure="mAP@0.5",
)

METRICS = {
    "earlier_before": "mAP@0.5 on earlier towns before",
    "earlier_after": "after",
    "earlier_kept": "kept share",
    "place_accuracy": "mAP@0.5 per town, all towns",
    "final_accuracy": "mAP@0.5",
    "mean_average_precision": "mAP@0.5:0.95",
}
"""Key of a run's summary -> heading, all in percent."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What is asked of a method's mAP on the earlier towns.

    Attributes:
        first: the method.
        second: what it is compared with; itself where before and after are.
        unit: of the number.
        at_least: what the number must reach.
        text: the same for people.
    """

    first: str
    second: str
    unit: str
    at_least: float
    text: str

    def measure(self, first: Result, second: Result) -> float:
        """Return the number of one seed.

        Raises:
            KeyError: There was nothing to keep.
        """
        one, other = first.summary, second.summary
        if self.unit == "points lost":
            return 100 * (one["earlier_before"] - one["earlier_after"])
        key = "earlier_kept" if self.unit == "% of its kept share" else "earlier_after"
        return 100 * one[key] / other[key]


AIMS = (
    Aim("fedavg", "fedavg", "points lost", 0.0, "fedavg loses mAP on the earlier towns"),
    Aim(
        "der-fedgp", "ideal", "% of its kept share", 80.0, "der-fedgp keeps at least 80 % of the share that ideal keeps"
    ),
    Aim("der-fedgp", "ideal", "% of its mAP", 80.0, "der-fedgp has at least 80 % of ideal's mAP on the earlier towns"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """What all runs gave.

    Attributes:
        runs: those that are finished.
        settings: name of ``--settings``.
        late_town: where one vehicle gets to.
        command: what was typed.
    """

    runs: FinishedRuns
    settings: str
    late_town: str
    command: Sequence[str]

    @classmethod
    def of(cls, choice: Choice, failures: Sequence[Failure], command: Sequence[str], *, late_town: str) -> Table:
        """Read what is finished now."""
        return cls(EXPERIMENT.finished(choice, failures), choice.preset, late_town, command)

    @property
    def missing(self) -> Sequence[str]:
        """Why runs have no numbers, one line each."""
        return self.runs.missing

    def judged(self, aim: Aim) -> Summary | None:
        """Return an aim's number over the seeds that both methods have; None without any, or with nothing to keep."""
        try:
            return self.runs.over_both(aim.first, aim.second, aim.measure)
        except (KeyError, ZeroDivisionError):
            return None

    def markdown(self) -> str:
        """Return the table for people."""
        sizes = self.runs.sizes(self.settings, "pictures")
        change = f"The first client alone gets to {self.late_town}{self._change_round()}."
        lines = [f"# {EXPERIMENT.title}", "", f"{sizes} {change}", "", "```sh", " ".join(self.command), "```", ""]
        headings = ["method", *(f"{heading} [%]" for heading in METRICS.values()), "seeds"]
        lines += table_rows(headings, [self._row(method) for method in self.runs.results])
        lines += ["", "mAP@0.5 after the last round by town [%], mean over clients and seeds:", ""]
        lines += self.runs.town_rows()
        lines += ["", *table_rows(["asked", "measured", "met"], map(self._aim, AIMS))]
        lines += ["", "![mAP](driving-boxes.png)", "", "## Notes", ""]
        lines += [
            "- Earlier towns: all that the first client drove through before the change. Before: after the last round "
            "without it. After: after the last round of all. Both on the same held-out pictures, mean over towns "
            "(docs/metrics.md). Kept share: after / before.",
            "- Mean ± sample standard deviation over seeds; a single seed has no spread.",
            "- der, agem, fedgp and der-fedgp keep up to `buffer_size` real pictures on a client, ideal keeps all.",
            *self.runs.provenance(),
        ]
        return "\n".join(lines) + "\n"

    def values(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "title": EXPERIMENT.title,
            "settings": self.settings,
            "late_town": self.late_town,
            "command": list(self.command),
            "runs": self.runs.values(),
            "aims": [
                {
                    "asked": aim.text,
                    "measured": msgspec.to_builtins(self.judged(aim)),
                    "unit": aim.unit,
                    "at_least": aim.at_least,
                }
                for aim in AIMS
            ],
            "missing": list(self.missing),
        }

    def write(self, out: Path) -> list[Path]:
        """Write all files, and return them."""
        files = {
            "driving-boxes.md": self.markdown().encode(),
            "driving-boxes.json": msgspec.json.format(msgspec.json.encode(self.values()), indent=1) + b"\n",
            "driving-boxes.png": self.runs.chart(EXPERIMENT),
        }
        return write_files(out, files)

    def _change_round(self) -> str:
        streams = [result.stream for own in self.runs.results.values() for result in own.values()]
        return f" in round {streams[0]['late_change']['round']}" if streams else ""

    def _row(self, method: str) -> list[str]:
        cells = [number(self.runs.summary(method, metric)) for metric in METRICS]
        return [method, *cells, str(len(self.runs.results[method]))]

    def _aim(self, aim: Aim) -> list[str]:
        found = self.judged(aim)
        measured = "-" if found is None else f"{number(found)} {aim.unit}"
        if aim.unit == "points lost":
            return [aim.text, measured, "not measured" if found is None else "yes" if found.mean > 0 else "no"]
        return [aim.text, measured, met(found, aim.at_least)]


def main() -> None:
    """Run what is missing and write the table; exit 1 if a run failed, 2 if nothing could be run."""
    parser = driving_parser(__doc__, EXPERIMENT, "runs/driving-boxes")
    parser.add_argument("--late-town", default=LATE_TOWN, help="where the first client gets to in the last rounds")
    options = parser.parse_args()
    choice = choice_of(options, [f"late_town={options.late_town}"])
    table = partial(Table.of, late_town=options.late_town)
    run_and_write("driving_boxes", EXPERIMENT, choice, options.jobs, table)


if __name__ == "__main__":
    main()
