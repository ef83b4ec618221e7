"""What finished runs gave for the cells of a table: one number per metric and seed, means and spreads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.paths import RESULT
from replayfleet.federation.simulator.measures import metrics
from replayfleet.federation.simulator.measures.metrics import Summary, over_seeds
from replayfleet.federation.simulator.records import costs
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.paper import Aim, Column, PaperTable, Row
from replayfleet.federation.simulator.tables.plan import REFERENCE, PlannedRun, State, read_json
from replayfleet.federation.simulator.tables.running import Failure
from replayfleet.federation.streams.stream import TASK_BY_TASK

_OF_SUMMARY = {
    "PA": "place_accuracy",
    "TA": "in_task_accuracy",
    "FA": "final_accuracy",
    "AF": "average_forgetting",
    "AAS": "accuracy_among_seen",
    "before": "earlier_before",
    "after": "earlier_after",
    "kept": "earlier_kept",
    "mAP": "mean_average_precision",
}
"""Metric -> its key in a run's summary, where it is a share."""

_OF_COSTS = {"CPU": ("cpu_s", 60.0), "steps": ("sample_steps", 1e6), "up": ("bytes_up", 1e6)}
"""Metric -> its key in a run's summary or costs, and the unit that the table has it in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One method on one column.

    Attributes:
        row: the method.
        column: what it was measured on.
        published: metric -> the paper's number.
        values: metric -> seed -> ours, in the paper's unit; AR lacks the seeds that Centralized lacks.
        results: seed -> the run.
        folders: seed -> its folder.
        missing: seed -> why there is no number.
    """

    row: Row
    column: Column
    published: Mapping[str, float]
    values: Mapping[str, Mapping[int, float]]
    results: Mapping[int, Result]
    folders: Mapping[int, Path]
    missing: Mapping[int, str]

    def ours(self, metric: str) -> Summary | None:
        """Return mean and spread over the seeds that have this metric."""
        values = self.values.get(metric)
        return over_seeds(list(values.values())) if values else None

    def by_place(self) -> dict[str, float]:
        """Return town -> accuracy after the last round in percent, mean over clients and seeds; none without towns.

        None either where each seed has towns of its own.
        """
        ends = [one for r in self.results.values() for one in r.rounds[-1].clients.values() if not one.hostile]
        named = [set(client.accuracy_by_place) for client in ends]
        if len(self.results) > 1 and named and not set.intersection(*named):
            return {}
        found: dict[str, list[float]] = {}
        for client in ends:
            for place, value in client.accuracy_by_place.items():
                found.setdefault(place, []).append(100 * value)
        return {place: sum(values) / len(values) for place, values in sorted(found.items())}


def cells(
    table: PaperTable,
    runs: Sequence[PlannedRun],
    references: Mapping[tuple[str, int], PlannedRun],
    failures: Sequence[Failure] = (),
) -> list[Cell]:
    """Return the cells of accuracies that the runs belong to, in the order of columns and rows.

    Args:
        table: of the paper.
        runs: of this table, as they are now.
        references: (slug of the column, seed) -> Centralized on the same stream.
        failures: what went wrong just now.

    Raises:
        SettingsError: A result can't be read.
    """
    uppers = {
        place: read_json(run.folder / RESULT, Result)
        for place, run in references.items()
        if run.state is State.FINISHED
    }
    return cells_of(
        table, runs, failures, lambda run, result: measured(result, uppers.get((run.column.slug, run.seed)))
    )


def cells_of(
    table: PaperTable,
    runs: Sequence[PlannedRun],
    failures: Sequence[Failure],
    values_of: Callable[[PlannedRun, Result], Mapping[str, float]],
) -> list[Cell]:
    """Return the cells that the runs belong to; a finished run that ``values_of`` raises for has no number.

    Args:
        table: of the paper.
        runs: of this table, as they are now.
        failures: what went wrong just now.
        values_of: a finished run and its result -> metric -> number, or a ``ReplayfleetError``.
    """
    reasons = {failure.run.folder: f"failed: {failure.reason}" for failure in failures}
    wanted = (*table.metrics, *table.also)
    grouped: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        grouped.setdefault((run.column.slug, run.row.label), []).append(run)
    found = []
    for same in grouped.values():
        row, column = same[0].row, same[0].column
        values: dict[str, dict[int, float]] = {}
        results: dict[int, Result] = {}
        missing: dict[int, str] = {}
        for run in same:
            if run.state is not State.FINISHED:
                missing[run.seed] = why(run, reasons)
                continue
            result = read_json(run.folder / RESULT, Result)
            try:
                own = values_of(run, result)
            except ReplayfleetError as error:
                missing[run.seed] = str(error)
                continue
            results[run.seed] = result
            for metric, value in own.items():
                if metric in wanted:
                    values.setdefault(metric, {})[run.seed] = value
        found.append(
            Cell(
                row=row,
                column=column,
                published=table.published(row, table.columns.index(column)),
                values=values,
                results=results,
                folders={run.seed: run.folder for run in same if run.seed in results},
                missing=missing,
            )
        )
    return found


def measured(result: Result, upper: Result | None) -> dict[str, float]:
    """Return metric -> number of one run, in the paper's unit; AR only beside Centralized's run."""
    acc = [record.accuracy for record in result.rounds]
    values = {
        "AA": 100 * metrics.average_accuracy(acc),
        "AA5": 100 * metrics.average_accuracy(acc[-metrics.LATE_ROUNDS :]),
        "AFM": 100 * metrics.average_forgetting_measure(acc),
    }
    values |= {metric: 100 * result.summary[key] for metric, key in _OF_SUMMARY.items() if key in result.summary}
    values |= _of_tasks(result)
    known = {**result.summary, **costs(result.rounds)}
    values |= {metric: known[key] / unit for metric, (key, unit) in _OF_COSTS.items() if key in known}
    if upper is not None:
        best = [record.accuracy for record in upper.rounds]
        values["AR"] = 100 * metrics.average_regret(acc, best)
        values["AR5"] = 100 * metrics.average_regret(acc[-metrics.LATE_ROUNDS :], best[-metrics.LATE_ROUNDS :])
    if result.run["method"] != REFERENCE:
        values["AUC"] = result.summary["sub_generator_updates"]
    return values


def _of_tasks(result: Result) -> dict[str, float]:
    """Return what the other papers measure at the end of each task, in percent, and seconds of a round."""
    rounds = result.rounds
    trained = [client.train_s for record in rounds for client in record.clients.values() if client.present]
    values = {
        "client_s": sum(trained) / max(1, len(trained)),
        "server_s": sum(record.aggregate_s for record in rounds) / len(rounds),
    }
    if result.run["stream"]["scenario"] not in TASK_BY_TASK:
        return values
    ends = [rounds[place] for place in metrics.task_ends(len(rounds), result.stream["changes"])]
    late = [
        {name: client.accuracy_by_place for name, client in record.clients.items() if not client.hostile}
        for record in rounds[-max(1, len(rounds) // 10) :]
    ]
    if all(tested for by_place in late for tested in by_place.values()):
        values["PAL"] = 100 * metrics.average_accuracy([metrics.place_accuracy(by_place) for by_place in late])
    values["SA"] = 100 * metrics.average_accuracy([record.accuracy for record in ends])
    for metric, key in (("TF", "accuracy_by_place"), ("KF", "accuracy_in_task")):
        honest = [name for name, client in sorted(ends[-1].clients.items()) if not client.hostile]
        by_client = [[getattr(record.clients[name], key) for record in ends] for name in honest]
        if all(met for found in by_client for met in found):
            lost = [metrics.task_forgetting(found) for found in by_client]
            values[metric] = 100 * sum(lost) / len(lost)
    return values


def judged(aim: Aim, cells: Sequence[Cell]) -> Summary | None:
    """Return an aim's number over the seeds that both methods have; None without any, or with nothing to compare with.

    Args:
        aim: of a table.
        cells: of one of its columns.
    """
    named = {name: cell.values for cell in reversed(cells) for name in (cell.row.method, cell.row.label)}
    own = named.get(aim.method, {}).get(aim.metric, {})
    other = named.get(aim.beside, {}).get(aim.beside_metric or aim.metric, {})
    seeds = sorted(own.keys() & other.keys())
    if not seeds or (aim.share and not all(other[seed] for seed in seeds)):
        return None
    return over_seeds([100 * own[s] / other[s] if aim.share else own[s] - other[s] for s in seeds])


def mean_curve(results: Sequence[Result]) -> list[float]:
    """Return Acc^t, the mean over runs, for as many rounds as the shortest has."""
    rounds = zip(*([record.accuracy for record in result.rounds] for result in results), strict=False)
    return [sum(accuracies) / len(accuracies) for accuracies in rounds]


def why(run: PlannedRun, reasons: Mapping[Path, str]) -> str:
    """Return why an unfinished run has no number.

    Args:
        run: which.
        reasons: folder -> what went wrong just now.
    """
    if run.state is State.IMPOSSIBLE:
        return run.problem
    return reasons.get(run.folder, "begun, not finished" if run.state is State.BEGUN else "not run")
