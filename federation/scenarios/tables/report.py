"""A table as Markdown, JSON and charts: ours beside the paper's, with what is wrong there and what was not run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from federation.methods import METHODS
from federation.scenarios.charts import Curve, accuracy_chart
from federation.scenarios.metrics import Summary
from federation.scenarios.settings import default_settings
from federation.scenarios.tables.footnotes import Footnotes
from federation.scenarios.tables.measured import Cell, mean_curve
from federation.scenarios.tables.paper import Column, PaperTable
from federation.scenarios.tables.plan import Choice
from federation.service.atomic import write_atomic

_UNITS = {"AA": "AA [%]", "AR": "AR [%]", "AFM": "AFM [%]", "AUC": "AUC", "FID": "FID"}


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
        drawn = self._columns() if "AA" in self.table.metrics else []
        charts = {f"{stem}-{column.slug}.png": self._chart(column) for column in drawn}
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
        lines = [f"# Table {self.table.number}: {self.table.title}", "", f"Paper: {self.table.paper}.", ""]
        lines += [self._sizes(), ""]
        if self.command:
            lines += ["```sh", " ".join(self.command), "```", ""]
        for column in self._columns():
            lines += [f"## {column.title}", "", *self._column(column), ""]
            lines += [f"![accuracy]({name})\n" for name in charts if name.endswith(f"-{column.slug}.png")]
        notes = [note.text for note in self.table.notes if note.is_general]
        lines += ["## Notes", "", *(f"- {text}" for text in [*self._method(), *notes]), ""]
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
        }

    def _columns(self) -> list[Column]:
        return list({cell.column.slug: cell.column for cell in self.cells}.values())

    def _of(self, column: Column) -> list[Cell]:
        return [cell for cell in self.cells if cell.column.slug == column.slug]

    def _column(self, column: Column) -> list[str]:
        metrics, also, place = self.table.metrics, self.table.also, self.table.columns.index(column)
        names = [f"{_UNITS[metric]}, {who}" for metric in metrics for who in ("paper", "ours")]
        names += [f"{_UNITS[metric]}, ours" for metric in also]
        lines = [f"| method | {' | '.join(names)} | seeds |", f"|---|{'--:|' * (len(names) + 1)}"]
        footnotes = Footnotes(self.table.notes)
        for cell in self._of(column):
            marks = footnotes.marks(cell.row.label, place)
            printed = self.table.printed(cell.row, place)
            texts = [
                text
                for metric in metrics
                for text in (printed[metric] + marks if metric in printed else "-", _ours(cell.ours(metric)))
            ]
            texts += [_ours(cell.ours(metric)) for metric in also]
            lines.append(f"| {_label(cell)} | {' | '.join(texts)} | {len(cell.results) or '-'} |")
        return [*lines, *footnotes.lines()]

    def _sizes(self) -> str:
        preset = self.choice.preset
        streams = [result.run["stream"] for cell in self.cells for result in cell.results.values()]
        if not streams:
            return f"Settings `{preset}`. Nothing of this table has been run yet."
        sizes = ", ".join(
            f"{_range([stream[key] for stream in streams])} {name}"
            for key, name in (
                ("num_clients", "clients"),
                ("num_rounds", "rounds"),
                ("samples_per_class", "samples per class and round"),
            )
        )
        if preset == "paper":
            return f"Settings `paper`, the paper's own: {sizes}."
        return (
            f"Settings `{preset}`: {sizes}. That is less than the paper's, and methods are trained for less: "
            "the paper's numbers stand here for orientation, ours are no reproduction of them."
        )

    def _method(self) -> list[str]:
        texts = ["Mean ± sample standard deviation over seeds; a single seed has no spread. Formulas: docs/metrics.md."]
        if "AR" in self.table.metrics:
            texts.append("Our AR is against our own run of Centralized on the same stream and seed, where that exists.")
        return texts

    def _not_run(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for cell in self.cells:
            for seed, reason in cell.missing.items():
                reasons.setdefault(reason, []).append(f"{cell.row.label} on {cell.column.title}, seed {seed}")
        if not reasons:
            return []
        lines = ["## Not run", ""]
        return [*lines, *(f"- {reason}: {'; '.join(where)}." for reason, where in reasons.items()), ""]

    def _settings(self) -> list[str]:
        changed: dict[str, str] = {}
        for cell in self.cells:
            for result in cell.results.values():
                defaults = default_settings(METHODS[result.run["method"]]) if result.run["method"] in METHODS else {}
                settings = result.run["settings"]
                differing = [f"`{key}={value}`" for key, value in settings.items() if value != defaults.get(key, value)]
                changed.setdefault(cell.row.label, ", ".join(differing) or "defaults")
        if not changed:
            return []
        lines = ["## Settings that differ from the methods' defaults", "", "| method | settings |", "|---|---|"]
        return [*lines, *(f"| {label} | {text} |" for label, text in changed.items()), ""]

    def _provenance(self) -> list[str]:
        results = [result for cell in self.cells for result in cell.results.values()]
        if not results:
            return []
        commits = sorted({result.commit or "no checkout" for result in results})
        machines = sorted({f"{r.hardware.get('processor')}, {r.hardware.get('num_cores')} cores" for r in results})
        versions = sorted({f"torch {r.versions.get('torch')}, Python {r.versions.get('python')}" for r in results})
        return ["## Made with", "", *(f"- {', '.join(texts)}" for texts in (commits, machines, versions)), ""]

    def _chart(self, column: Column) -> bytes:
        ran = [cell for cell in self._of(column) if cell.results]
        if not ran:
            return b""
        any_result = next(iter(ran[0].results.values()))
        curves = [
            Curve(
                cell.row.label,
                mean_curve(list(cell.results.values())),
                _by_seed(cell) if len(cell.results) > 1 else {},
            )
            for cell in ran
        ]
        return accuracy_chart(
            curves,
            title=f"Table {self.table.number}: {column.title}, settings {self.choice.preset}",
            changes=any_result.stream["changes"],
            change_name=any_result.stream["change_name"],
            band="seed",
        )


def _cell_values(cell: Cell) -> dict[str, Any]:
    ours = {metric: cell.ours(metric) for metric in cell.values}
    return {
        "method": cell.row.label,
        "name": cell.row.method,
        "set": cell.row.set,
        "scenario": cell.column.scenario,
        "dataset": cell.column.dataset,
        "stream": cell.column.set,
        "paper": dict(cell.published),
        "ours": {metric: {**msgspec.to_builtins(ours[metric]), "values": cell.values[metric]} for metric in ours},
        "runs": {str(seed): str(folder) for seed, folder in cell.folders.items()},
        "not_run": {str(seed): reason for seed, reason in cell.missing.items()},
    }


def _by_seed(cell: Cell) -> Mapping[str, list[float]]:
    return {f"seed {seed}": [record.accuracy for record in result.rounds] for seed, result in cell.results.items()}


def _label(cell: Cell) -> str:
    name = cell.row.method_for(cell.column.dataset)
    return f"{cell.row.label} (`{name}`)" if cell.row.in_paper else f"`{name}`, not in the paper's table"


def _ours(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    return f"{summary.mean:.2f}" + ("" if summary.spread is None else f" ± {summary.spread:.2f}")


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
