"""Tables of accuracies as values: what is measured on what, papers' numbers and their errors, what is asked of ours.

The numbers stand in ``data/*.toml``, as printed. This module imports no torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.service.settings import read_toml
from replayfleet.models.specs import Model

_DATA = Path(__file__).parent / "data"
_FILES = (
    *("pfedgrp.toml", "pfedgrp_v1.toml", "driving.toml", "fedgp.toml", "mfcl.toml", "sdd.toml"),
    *("fedgp_paper.toml", "mfcl_paper.toml", "sdd_paper.toml"),
)

_NONE = "-"

NOISE = 1e-7
"""What a noise floor's initial weights are scaled by, beside 1."""

EXPERIMENTS = {"gradual": "Expt. 1", "circulating": "Expt. 2", "extreme": "Expt. 3"}
"""Scenario -> what the papers call it."""


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a group of numbers was measured on.

    Attributes:
        scenario: a key of ``SCENARIOS``.
        dataset: a key of ``DATASETS``.
        set: settings of the stream, or of every method there, that differ from those of the paper's Table 1.
        model: the task model, one of ``models.specs.ARCHITECTURES``.
    """

    scenario: str
    dataset: str
    set: dict[str, int | float | str] = {}
    model: Model = "resnet20"

    @property
    def title(self) -> str:
        """One line."""
        changed = "".join(f", {key}={value}" for key, value in self.set.items())
        name = f"{EXPERIMENTS[self.scenario]} ({self.scenario})" if self.scenario in EXPERIMENTS else self.scenario
        model = "" if self.model == "resnet20" else f", {self.model}"
        return f"{name}, {self.dataset}{model}{changed}"

    @property
    def slug(self) -> str:
        """A part of file names."""
        return "-".join([self.scenario, self.dataset, *(f"{key}-{value}" for key, value in self.set.items())])


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method of a table.

    Attributes:
        label: what the paper calls it.
        method: our method or variant.
        set: settings of the method that differ from its defaults, as ``--set`` takes them.
        paper_set: further ones of ``method``, for ``--settings paper`` only.
        method_on: data set -> another method or variant there.
        paper_set_on: data set -> what that method has in place of ``paper_set``.
        replay: of Table 10: ``filtered`` by the task model, or ``plain``.
        values: one group of numbers per column, groups parted by ``|``.
        in_paper: False for a method that the operator added.
        perturbed: the same again from weights scaled by 1 + ``NOISE``: how much a difference must be to mean anything.
    """

    label: str
    method: str
    set: dict[str, str] = {}
    paper_set: dict[str, str] = {}
    method_on: dict[str, str] = {}
    paper_set_on: dict[str, dict[str, str]] = {}
    replay: str = "filtered"
    values: str = ""
    in_paper: bool = True
    perturbed: bool = False

    def again(self) -> Row:
        """Return the row of its noise floor."""
        return msgspec.structs.replace(
            self, label=f"{self.label}, again from weights * (1 + {NOISE:g})", values="", in_paper=False, perturbed=True
        )

    def method_for(self, dataset: str) -> str:
        """Return our method or variant on a data set."""
        return self.method_on.get(dataset, self.method)

    def settings_for(self, dataset: str, preset: str) -> dict[str, str]:
        """Return what differs from the method's defaults on a data set, with the paper's schedule under ``paper``."""
        if preset != "paper":
            return self.set
        return {**self.set, **(self.paper_set_on.get(dataset, {}) if dataset in self.method_on else self.paper_set)}


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a note belongs; nothing named means everywhere.

    Attributes:
        rows: labels.
        columns: counted from 1.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[int, ...] = ()


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error of the paper, or what its numbers need to be understood.

    Attributes:
        text: one line.
        on: where it belongs.
        metric: of a note on all tables of a paper: only where they have this metric.
    """

    text: str
    on: Place = Place()
    metric: str = ""

    def concerns(self, label: str, column: int) -> bool:
        """Whether it belongs to the cell of row ``label`` and the column with this index (from 0)."""
        rows, columns = self.on.rows, self.on.columns
        return (bool(rows) or bool(columns)) and (not rows or label in rows) and (not columns or column + 1 in columns)

    @property
    def is_general(self) -> bool:
        """Whether it belongs to the whole table."""
        return not (self.on.rows or self.on.columns)


class Aim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of one method's number beside another's.

    Attributes:
        text: for people.
        method: of the number; of several rows the first one's, or a row's label.
        metric: of the number.
        beside: the method that it is compared with, likewise.
        beside_metric: its metric, where that is another.
        share: whether the number is to be a share of the other, in percent; else points above it.
        at_least: what is asked.
        strict: whether more is asked than that.
    """

    text: str
    method: str
    metric: str
    beside: str
    beside_metric: str = ""
    share: bool = False
    at_least: float
    strict: bool = False


class PaperTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table.

    Attributes:
        number: as printed; ``v1-`` before those of the first version; a name of a table of our own.
        title: what it shows.
        metrics: what each group of numbers holds.
        also: metrics that only ours has, beside them.
        columns: what the groups were measured on.
        rows: methods.
        notes: errors of the paper.
        paper: title of the paper; empty of a table of our own.
        seeds: of its runs, unless the operator names others.
        overrides: settings of all its runs, which the operator's own come after.
        aims: what is asked of ours.
    """

    number: str
    title: str
    metrics: tuple[str, ...]
    also: tuple[str, ...] = ()
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()
    paper: str = ""
    seeds: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()
    aims: tuple[Aim, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a row whose numbers don't fit the columns, and a note on a row or column that doesn't exist."""
        labels = {row.label for row in self.rows}
        for row in self.rows:
            groups = [group.split() for group in row.values.split("|")]
            if [len(group) for group in groups] != [len(self.metrics)] * len(self.columns):
                raise ValueError(f"table {self.number}, {row.label}: the numbers don't fit the columns")
        for note in self.notes:
            if not labels.issuperset(note.on.rows) or any(not 1 <= c <= len(self.columns) for c in note.on.columns):
                raise ValueError(f"table {self.number}: no such place for the note {note.text!r}")

    @property
    def is_ours(self) -> bool:
        """Whether no paper has it."""
        return not self.metrics

    def published(self, row: Row, column: int) -> dict[str, float]:
        """Return metric -> the paper's number, in the paper's unit; metrics that it leaves out are absent."""
        return {metric: float(text) for metric, text in self.printed(row, column).items()}

    def printed(self, row: Row, column: int) -> dict[str, str]:
        """Return what ``published`` does, digit by digit as the paper prints it."""
        if not row.in_paper:
            return {}
        texts = row.values.split("|")[column].split()
        return {metric: text for metric, text in zip(self.metrics, texts, strict=True) if text != _NONE}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    paper: str = ""
    tables: list[PaperTable]
    notes: list[Note] = []


@functools.cache
def paper_tables() -> dict[str, PaperTable]:
    """Return all tables by number, in the order of the papers."""
    tables: dict[str, PaperTable] = {}
    for name in _FILES:
        content = msgspec.convert(read_toml(_DATA / name), type=_File)
        for table in content.tables:
            shared = [note for note in content.notes if note.metric in {"", *table.metrics}]
            changed: dict[str, Any] = {"paper": content.paper, "notes": (*table.notes, *shared)}
            tables[table.number] = msgspec.structs.replace(table, **changed)
    return tables


def paper_table(number: str) -> PaperTable:
    """Return one table.

    Raises:
        SettingsError: No such table; names the nearest.
    """
    tables = paper_tables()
    if number not in tables:
        raise SettingsError(f"unknown table {number!r}{nearest(number, tables)}")
    return tables[number]
