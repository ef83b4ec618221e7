"""Tables 6 to 9 of pFedGRP as values: sizes of models, and what training generators costs. Imports no torch."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from replayfleet.federation.service.settings import read_toml
from replayfleet.federation.simulator.tables.paper import Note

_PATH = Path(__file__).parent / "data" / "pfedgrp_costs.toml"

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}

COST_TITLES = {
    "6": "FLOPs and parameters of all models",
    "7": "Cost of training generators: Fashion-MNIST",
    "8": "Cost of training generators: CIFAR-10",
    "9": "Cost of training generators: ImageNet-10",
}
"""Table -> title."""


class SizeRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of Table 6.

    Attributes:
        label: what the paper calls it.
        model: a key of ``federation.simulator.measures.costs.MODELS``.
        values: FLOPs and parameters, one pair per series, pairs parted by ``|``.
    """

    label: str
    model: str
    values: str

    def published(self, series: int) -> tuple[str, str]:
        """Return (FLOPs, parameters) of the series with this index, as printed; ``-`` where there is none."""
        flops, parameters = self.values.split("|")[series].split()
        return flops, parameters


class SizeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table 6."""

    number: str
    title: str
    series: tuple[str, ...]
    rows: tuple[SizeRow, ...]
    notes: tuple[Note, ...] = ()

    def notes_on(self, model: str, series: str) -> list[Note]:
        """Return the notes on one model in one series; Tables 7 to 9 print the same figures."""
        labels, place = [row.label for row in self.rows if row.model == model], self.series.index(series)
        return [note for note in self.notes if any(note.concerns(label, place) for label in labels)]


class CostRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One method of Tables 7 to 9.

    Attributes:
        label: what the paper calls it.
        method: our method or variant.
        model: its generator, a key of ``federation.simulator.measures.costs.MODELS``.
        updates: of a generator in all rounds, mean over clients.
        share: of the round's data that an update sees.
        epochs: per update, on the client; 0 if it trains none.
        flops: of the generator per sample, as printed.
        cost: of all local updates per sample, as printed; empty if there are none.
        global_epochs: per update, on the server; 0 if it trains none.
        global_cost: as ``cost``.
        accuracy: AA of Expt. 1 and Expt. 2.
    """

    label: str
    method: str
    model: str
    updates: float
    share: float = 1.0
    epochs: int = 0
    flops: str
    cost: str = ""
    global_epochs: int = 0
    global_cost: str = ""
    accuracy: tuple[float, float]


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of Tables 7 to 9.

    Attributes:
        dataset: a key of ``DATASETS``.
        series: which column of Table 6 belongs to it.
    """

    number: str
    title: str
    dataset: str
    series: str
    rows: tuple[CostRow, ...]
    notes: tuple[Note, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sizes: SizeTable
    training: list[CostTable]


def size_table() -> SizeTable:
    """Return Table 6."""
    return _file().sizes


def cost_tables() -> dict[str, CostTable]:
    """Return Tables 7 to 9 by number."""
    return {table.number: table for table in _file().training}


def amount(text: str) -> float:
    """Return ``"7.19M"`` as a number: K is 1e3, M 1e6, B 1e9."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


@functools.cache
def _file() -> _File:
    return msgspec.convert(read_toml(_PATH), type=_File)
