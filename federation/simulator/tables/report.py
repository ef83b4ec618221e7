"""A table as Markdown, JSON and charts: ours beside the paper's, with what is wrong there and what was not run here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.methods import ALL_METHODS
from replayfleet.federation.service.fleet.later import LATER_SETTINGS
from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.charts import Curve, accuracy_chart, loss_chart
from replayfleet.federation.simulator.measures.metrics import Summary
from replayfleet.federation.simulator.records import losses
from replayfleet.federation.simulator.result import Part, Result
from replayfleet.federation.simulator.settings import default_settings
from replayfleet.federation.simulator.tables.measured import Cell, judged, mean_curve
from replayfleet.federation.simulator.tables.paper import Column, PaperTable
from replayfleet.federation.simulator.tables.plan import Choice
from replayfleet.federation.simulator.tables.wording import Footnotes, head, range_of, seeds_named
from replayfleet.federation.streams.datasets import has_boxes
from replayfleet.federation.streams.stream import SCENARIOS

_HEADINGS = {
    **{name: f"{name} [%]" for name in ("AA", "AR", "AFM", "mAP")},
    "AA5": "AA of the last 5 rounds [%]",
    "AR5": "AR of the last 5 rounds [%]",
    "AAS": "AA among classes met [%]",
    "CPU": "CPU time [min]",
    "steps": "samples x epochs [millions]",
    "up": "uploads [MB]",
    "AUC": "AUC",
    "FID": "FID",
    "PA": "per town or task [%]",
    "PAL": "the same, last tenth of the rounds [%]",
    "TA": "with the task known [%]",
    "FA": "last round [%]",
    "SA": "at the end of each task [%]",
    "TF": "forgetting of tasks [%]",
    "KF": "forgetting with the task known [%]",
    "client_s": "a client's round [s]",
    "server_s": "aggregation [s]",
    "AF": "forgetting [%]",
    "before": "earlier towns before [%]",
    "after": "after [%]",
    "kept": "kept share [%]",
}
"""Metric -> heading."""

_LOSSES = "-losses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A table with what our runs gave.

    Attributes:
        table: of the paper.
        choice: what the operator asked for.
        cells: rows of each column, columns in the paper's order.
        command: what was typed.
    """

    table: PaperTable
    choice: Choice
    cells: Sequence[Cell]
    command: Sequence[str] = ()

    def write(self) -> list[Path]:
        """Write all files, and return them."""
        out, stem = self.choice.out, f"table-{self.table.number}"
        out.mkdir(parents=True, exist_ok=True)
        drawn = self._columns() if {"AA", "FA"} & {*self.table.metrics, *self.table.also} else []
        charts = {f"{stem}-{column.slug}.png": self._chart(column) for column in drawn}
        if "FID" not in {*self.table.metrics, *self.table.also}:  # of finished runs, whose own tables show them
            charts |= {f"{stem}-{column.slug}{_LOSSES}.png": self._losses(column) for column in self._columns()}
        files = {
            f"{stem}.md": self.markdown([name for name, png in charts.items() if png]).encode(),
            f"{stem}.json": msgspec.json.format(msgspec.json.encode(self.values()), indent=1) + b"\n",
            **charts,
        }
        for name, content in files.items():
            if content:
                write_atomic(out / name, content)
        return [out / name for name, content in files.items() if content]

    def markdown(self, charts: Sequence[str] = ()) -> str:
        """Return the table for people."""
        lines = [f"# Table {self.table.number}: {self.table.title}", ""]
        lines += [f"Paper: {self.table.paper}.", ""] if self.table.paper else []
        lines += [self._sizes(), ""]
        if self.command:
            lines += ["```sh", shlex.join(self.command), "```", ""]
        for column in self._columns():
            lines += [f"## {column.title}", "", *self._column(column), "", *self._places(column), *self._aims(column)]
            for ending, shown in (("", "accuracy"), (_LOSSES, "training loss")):
                lines += [f"![{shown}]({name})\n" for name in charts if name.endswith(f"-{column.slug}{ending}.png")]
        notes = [note.text for note in self.table.notes if note.is_general]
        lines += ["## Notes", "", *(f"- {text}" for text in [*self._method(), *self._ends_early(), *notes]), ""]
        lines += self._not_run()
        lines += self._settings()
        lines += self._provenance()
        return "\n".join(lines).rstrip() + "\n"

    def values(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "table": self.table.number,
            "title": self.table.title,
            "paper": self.table.paper,
            "settings": self.choice.preset,
            "seeds": list(self.choice.seeds),
            "command": list(self.command),
            "notes": [{"text": note.text, "on": msgspec.to_builtins(note.on)} for note in self.table.notes],
            "cells": [_cell_values(cell) for cell in self.cells],
            "aims": [
                {**msgspec.to_builtins(aim), "measured": msgspec.to_builtins(judged(aim, self._of(column)))}
                for column in self._columns()
                for aim in self.table.aims
            ],
        }

    def _columns(self) -> list[Column]:
        return list({cell.column.slug: cell.column for cell in self.cells}.values())

    def _of(self, column: Column) -> list[Cell]:
        return [cell for cell in self.cells if cell.column.slug == column.slug]

    def _column(self, column: Column) -> list[str]:
        metrics, also, place = self.table.metrics, self.table.also, self.table.columns.index(column)
        names = [f"{_HEADINGS[metric]}, {who}" for metric in metrics for who in ("paper", "ours")]
        names += [_HEADINGS[metric] + (", ours" if metrics else "") for metric in also]
        lines = head(["method", *names, "seeds"])
        footnotes = Footnotes(self.table.notes)
        for cell in self._of(column):
            marks = footnotes.marks(cell.row.label, place)
            printed = self.table.printed(cell.row, place)
            texts = [
                text
                for metric in metrics
                for text in (printed[metric] + marks if metric in printed else "-", _ours(cell, metric))
            ]
            texts += [_ours(cell, metric) for metric in also]
            lines.append(f"| {self._label(cell)} | {' | '.join(texts)} | {len(cell.results) or '-'} |")
        return [*lines, *footnotes.lines()]

    def _label(self, cell: Cell) -> str:
        name = cell.row.method_for(cell.column.dataset)
        if self.table.is_ours or (cell.row.perturbed and not cell.row.in_paper):
            return cell.row.label
        return f"{cell.row.label} (`{name}`)" if cell.row.in_paper else f"`{name}`, not in the paper's table"

    def _places(self, column: Column) -> list[str]:
        """Towns after the last round, where the stream has any."""
        by_cell = {cell.row.label: cell.by_place() for cell in self._of(column)}
        places = sorted({place for own in by_cell.values() for place in own})
        if not places:
            return []
        rows = [
            f"| {label} | {' | '.join(f'{own[place]:.1f}' if place in own else '-' for place in places)} |"
            for label, own in by_cell.items()
        ]
        title = "After the last round by task or town [%], mean over clients and seeds:"
        return [title, "", *head(["method", *places]), *rows, ""]

    def _aims(self, column: Column) -> list[str]:
        if not self.table.aims:
            return []
        lines = head(["asked", "measured", "met"])
        for aim in self.table.aims:
            found = judged(aim, self._of(column))
            text, met = "-", "not measured"
            if found is not None:
                text = f"{_mean(found, '.1f' if aim.share else '+.1f')} {'%' if aim.share else 'points'}"
                met = "yes" if found.mean > aim.at_least or (found.mean == aim.at_least and not aim.strict) else "no"
            lines.append(f"| {aim.text} | {text} | {met} |")
        return [*lines, ""]

    def _sizes(self) -> str:
        preset, changes = self.choice.preset, self._changes()
        settings = f"Settings `{preset}`" + (f", changed by {', '.join(changes)}" if changes else "")
        streams = [result.run["stream"] for cell in self.cells for result in cell.results.values()]
        if not streams:
            return f"{settings}. No run has given a number of this table yet."
        boxes = any(has_boxes(column.dataset) for column in self._columns())
        clients, rounds, samples = (
            range_of([stream[key] for stream in streams], noun)
            for key, noun in (
                ("num_clients", "client"),
                ("num_rounds", "round"),
                ("samples_per_class", "picture" if boxes else "sample"),
            )
        )
        sizes = f"{clients}, {rounds}, {samples} {'a round' if boxes else 'per class and round'}"
        if self.table.is_ours:
            return f"{settings}: {sizes} at most. {self._late_change()}".rstrip()
        if preset == "paper" and not changes:
            return f"{settings}, the paper's own: {sizes}."
        smaller = "That is less than the paper's, and methods are trained for less"
        return (
            f"{settings}: {sizes}. {'That is not what the paper ran' if changes else smaller}: "
            "the paper's numbers stand here for orientation, ours are no reproduction of them."
        )

    def _late_change(self) -> str:
        streams = [result.stream for cell in self.cells for result in cell.results.values()]
        change = next((stream["late_change"] for stream in streams if "late_change" in stream), None)
        return f"{change['client']} alone gets to {change['town']} in round {change['round']}." if change else ""

    def _changes(self) -> list[str]:
        """What the operator changed in the settings, as typed."""
        choice = self.choice
        sizes = [("--clients", choice.clients), ("--rounds", choice.rounds)]
        given = [(option, str(value)) for option, value in sizes if value is not None]
        given += [("--set", override) for override in choice.overrides]
        return [f"`{shlex.join(words)}`" for words in given]

    def _method(self) -> list[str]:
        texts = ["Mean ± sample standard deviation over seeds; a single seed has no spread. Formulas: docs/metrics.md."]
        if "AR" in self.table.metrics:
            texts.append(
                "Our AR is against our own run of Centralized on the same stream and seed. Where that exists for fewer "
                "seeds than the row has, their number stands behind it."
            )
        return texts

    def _ends_early(self) -> list[str]:
        """Say of which columns the rounds don't suffice for the one pass that Expt. 3 is."""
        texts = []
        for cell in self.cells:
            for result in cell.results.values():
                stream = result.run["stream"]
                scenario = SCENARIOS.get(stream["scenario"])
                if scenario is None or not scenario.one_cycle:
                    continue
                num_rounds, num_classes = stream["num_rounds"], len(result.run["task"]["class_names"])
                num_task_types = num_classes // stream["classes_per_task"]
                if num_rounds < num_task_types:
                    texts.append(
                        f"{cell.column.title}: the rounds end before one pass over all classes; clients meet "
                        f"{num_rounds} of their {num_task_types} task types."
                    )
        return list(dict.fromkeys(texts))

    def _not_run(self) -> list[str]:
        reasons: dict[str, dict[str, list[int]]] = {}
        for cell in self.cells:
            for seed, reason in cell.missing.items():
                places = reasons.setdefault(reason, {})
                places.setdefault(f"{cell.row.label} on {cell.column.title}", []).append(seed)
        if not reasons:
            return []
        lines = ["## Not run, or without a number", ""]
        for reason, places in reasons.items():
            where = [f"{place}, {seeds_named(seeds)}" for place, seeds in places.items()]
            lines += [f"- {reason}: {where[0]}"] if len(where) == 1 else [f"- {reason}:", *(f"  - {w}" for w in where)]
        return [*lines, ""]

    def _settings(self) -> list[str]:
        changed: dict[str, dict[str, list[str]]] = {}
        for cell in self.cells:
            for result in cell.results.values():
                method = result.run["method"]
                defaults = default_settings(ALL_METHODS[method]) if method in ALL_METHODS else {}
                later = {key: value for key, value in LATER_SETTINGS.items() if key in defaults}
                settings = {**later, **result.run["settings"]}
                differing = [f"`{key}={value}`" for key, value in settings.items() if value != defaults.get(key, value)]
                datasets = changed.setdefault(cell.row.label, {}).setdefault(", ".join(differing) or "defaults", [])
                if cell.column.dataset not in datasets:
                    datasets.append(cell.column.dataset)
        if not changed:
            return []
        lines = ["## Settings that differ from the methods' defaults", "", "| method | settings |", "|---|---|"]
        for label, texts in changed.items():
            for text, datasets in texts.items():
                where = f" on {', '.join(datasets)}" if len(texts) > 1 else ""
                lines.append(f"| {label}{where} | {text} |")
        return [*lines, ""]

    def _provenance(self) -> list[str]:
        results = [result for cell in self.cells for result in cell.results.values()]
        if not results:
            return []
        makers = [maker for result in results for maker in _makers(result)]
        commits = sorted({maker.commit or "no checkout" for maker in makers})
        machines = sorted({machine(maker.hardware) for maker in makers})
        versions = sorted({f"torch {m.versions.get('torch')}, Python {m.versions.get('python')}" for m in makers})
        return ["## Made with", "", *(f"- {', '.join(texts)}" for texts in (commits, machines, versions)), ""]

    def _chart(self, column: Column) -> bytes:
        ran = [cell for cell in self._of(column) if cell.results]
        if not ran:
            return b""
        differ = len({len(cell.results) for cell in ran}) > 1
        curves = [
            Curve(
                cell.row.label + (f", {count_of(len(cell.results), 'seed')}" if differ else ""),
                mean_curve(list(cell.results.values())),
                _by_seed(cell) if len(cell.results) > 1 else {},
            )
            for cell in ran
        ]
        return accuracy_chart(
            curves,
            band="seed",
            measure="mAP@0.5" if has_boxes(column.dataset) else "accuracy",
            **self._where(column, ran[0]),
        )

    def _losses(self, column: Column) -> bytes:
        ran = [cell for cell in self._of(column) if cell.results]
        found = [(cell.row.label, losses([result.rounds for result in cell.results.values()])) for cell in ran]
        return (ran and loss_chart(found, **self._where(column, ran[0]))) or b""

    def _where(self, column: Column, cell: Cell) -> dict[str, Any]:
        stream = next(iter(cell.results.values())).stream
        title = f"Table {self.table.number}: {column.title}, settings {self.choice.preset}"
        return {"title": title, "changes": stream["changes"], "change_name": stream["change_name"]}


def _cell_values(cell: Cell) -> dict[str, Any]:
    ours = {
        metric: {**msgspec.to_builtins(cell.ours(metric)), "values": {str(seed): own[seed] for seed in own}}
        for metric, own in cell.values.items()
    }
    return {
        "method": cell.row.label,
        "name": cell.row.method,
        "set": cell.row.set,
        "scenario": cell.column.scenario,
        "dataset": cell.column.dataset,
        "stream": cell.column.set,
        "paper": dict(cell.published),
        "ours": ours,
        "by_place": cell.by_place(),
        "runs": {str(seed): str(folder) for seed, folder in cell.folders.items()},
        "not_run": {str(seed): reason for seed, reason in cell.missing.items()},
    }


def _by_seed(cell: Cell) -> Mapping[str, list[float]]:
    return {f"seed {seed}": [record.accuracy for record in result.rounds] for seed, result in cell.results.items()}


def _makers(result: Result) -> Sequence[Result | Part]:
    if result.parts:
        return result.parts
    return [result]


def machine(hardware: Mapping[str, Any]) -> str:
    """Return in words what a run computed on."""
    text = f"{hardware.get('processor')}, {hardware.get('num_cores')} cores"
    return f"{text}, {hardware['gpu']} with CUDA {hardware.get('cuda')}" if "gpu" in hardware else text


def _ours(cell: Cell, metric: str) -> str:
    """A mean and its spread, with the number of seeds where that isn't the row's."""
    summary = cell.ours(metric)
    if summary is None:
        return "-"
    text = _mean(summary, ".2f")
    num_seeds = summary.num_seeds
    return text if num_seeds == len(cell.results) else f"{text} ({count_of(num_seeds, 'seed')})"


def _mean(summary: Summary, how: str) -> str:
    return f"{summary.mean:{how}}" + ("" if summary.spread is None else f" ± {summary.spread:{how.lstrip('+')}}")
