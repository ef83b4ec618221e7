"""Which runs a table needs, which of them exist already, and why some can't be made.

A run is known by its identity (``run`` of ``result.json``), so what one table has run serves every other one. The
number of threads is left out of the comparison: it changes how sums are rounded and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replayfleet.devices.probing import probe
from replayfleet.federation.errors import UNREADABLE, SettingsError, nearest
from replayfleet.federation.methods import ALL_METHODS
from replayfleet.federation.methods.kit.placement import torch_device
from replayfleet.federation.paths import RESULT
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.service.settings import split_overrides
from replayfleet.federation.simulator.checkpoints import as_noted_now, difference
from replayfleet.federation.simulator.job import can_train_in_step, identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import check_types, method_fields
from replayfleet.federation.simulator.tables.paper import NOISE, Column, PaperTable, Row
from replayfleet.federation.streams.datasets import AnyDataset, load_any_dataset
from replayfleet.federation.streams.stream import StreamSize

T = TypeVar("T")

REFERENCE = "centralized"
"""The method that regret is measured against."""

_RUN = Path("state") / "run.json"

_OPTIONS = ("num_clients", "overlap", "num_absent")
"""Settings of a stream that ``RunSpec`` has fields for; the others are overrides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the operator asked for; ``fleet-sim table --help`` says what each means.

    Attributes:
        methods, scenarios, datasets: those of the table that are to be run; all, if none is named.
        overrides: of all runs; a setting that a method lacks is left out there.
        noise_floor: run each row again, with the first seed, from weights scaled by 1 + ``NOISE``.
        workers: clients of one run that train at the same time; None is one per core.
    """

    out: Path
    preset: str = "small"
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    clients: int | None = None
    rounds: int | None = None
    overrides: tuple[str, ...] = ()
    data_root: Path | None = None
    download: bool = False
    torch_device: str = "cpu"
    in_step: bool | None = None
    noise_floor: bool = False
    workers: int | None = None


class State(str, Enum):
    """How far a run is."""

    FINISHED = "finished"
    BEGUN = "begun"
    MISSING = "missing"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a table.

    Attributes:
        row: whose numbers it gives.
        column: what it is measured on.
        spec: what is run; ``spec.out`` is its folder.
        state: how far it is.
        problem: why it is impossible.
        num_rounds: T; 0 of an impossible run.
        num_clients: of the fleet; 0 of an impossible run.
    """

    row: Row
    column: Column
    spec: RunSpec
    state: State
    problem: str = ""
    num_rounds: int = 0
    num_clients: int = 0

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.spec.seed

    @property
    def folder(self) -> Path:
        """Where its results are or will be."""
        return self.spec.out

    @property
    def name(self) -> str:
        """Its folder below ``runs``, for people."""
        return "/".join(self.folder.parts[-4:])


def workers_each(num_jobs: int, device_name: str) -> int | None:
    """Return how many clients each of ``num_jobs`` runs trains at a time; None on a GPU, where each run decides."""
    return max(1, probe().num_cores // max(1, num_jobs)) if device_name.partition(":")[0] == "cpu" else None


class Planner:
    """Finds the runs of tables below one folder.

    Raises:
        SettingsError: From every method that plans: a method, a column or a setting that the operator named is unknown.
    """

    def __init__(self, choice: Choice) -> None:
        """Look at what is below ``choice.out``."""
        self._choice = choice
        self._overrides = split_overrides(choice.overrides)
        self._data: dict[str, AnyDataset | SettingsError] = {}
        self._finished = _finished_below(choice.out)
        self._device_problem = _device_problem(choice.torch_device)

    def runs(self, table: PaperTable) -> list[PlannedRun]:
        """Return the runs of a table, seed by seed, so that every method has one seed before any has two."""
        rows, columns = self.rows(table), self.columns(table)
        self._check_types(row.method_for(column.dataset) for row in rows for column in columns)
        planned = [
            self.run(row, column, seed)
            for seed in self._choice.seeds
            for column in columns
            for row in rows
            if not row.in_paper or table.published(row, table.columns.index(column))
            if not row.perturbed or seed == self._choice.seeds[0]
        ]
        if not planned:
            who, where = ", ".join(row.label for row in rows), "; ".join(column.title for column in columns)
            raise SettingsError(f"table {table.number} has no number of {who} on {where}; name others")
        used = {override for run in planned for override in run.spec.overrides}
        wanted = self._overrides.items() - split_overrides(table.overrides).items()
        unused = sorted(key for key, text in wanted if f"{key}={text}" not in used)
        if unused and any(run.state is not State.IMPOSSIBLE for run in planned):
            known = sorted({name for run in planned for name in _known_settings(run.spec.method)})
            if unused[0] in known:
                raise SettingsError(f"--set {unused[0]}: all rows or columns of this table set it themselves")
            raise SettingsError(f"--set {unused[0]}: no method of this table has it{nearest(unused[0], known)}")
        return planned

    def _check_types(self, names: Iterable[str]) -> None:
        """Raise SettingsError if a value of ``--set`` isn't of the type of a method's setting."""
        for method in {VARIANTS.get(name, (name, {}))[0] for name in names} & ALL_METHODS.keys():
            check_types(ALL_METHODS[method], self._overrides)

    def rows(self, table: PaperTable) -> list[Row]:
        """Return the chosen rows, with their noise floors if asked for.

        A method that the table lacks becomes a row without published numbers.
        """
        rows = self._chosen_rows(table)
        return rows + [row.again() for row in rows] if self._choice.noise_floor else rows

    def _chosen_rows(self, table: PaperTable) -> list[Row]:
        wanted = self._choice.methods
        if not wanted:
            return list(table.rows)
        known = {*ALL_METHODS, *VARIANTS}
        for name in wanted:
            if name not in known and all(name != row.method for row in table.rows):
                raise SettingsError(f"unknown method {name!r}{nearest(name, known)}")
        added = [name for name in wanted if all(name != row.method for row in table.rows)]
        return [
            *(row for row in table.rows if row.method in wanted),
            *(Row(label=name, method=name, in_paper=False) for name in added),
        ]

    def columns(self, table: PaperTable) -> list[Column]:
        """Return the chosen columns."""
        scenarios, datasets = self._choice.scenarios, self._choice.datasets
        chosen = [
            column
            for column in table.columns
            if column.scenario in (scenarios or [column.scenario]) and column.dataset in (datasets or [column.dataset])
        ]
        known = {name for column in table.columns for name in (column.scenario, column.dataset)}
        lacking = [f" {name!r}" for name in (*scenarios, *datasets) if name not in known]
        if lacking or not chosen:
            offered = "; ".join(column.title for column in table.columns)
            raise SettingsError(f"table {table.number} has no such column{''.join(lacking[:1])}; it has {offered}")
        return chosen

    def run(self, row: Row, column: Column, seed: int) -> PlannedRun:
        """Return one run."""
        name = row.method_for(column.dataset)
        try:
            _require_built(name)
            changes = row.settings_for(column.dataset, self._choice.preset)
            spec, identity = self._assembled(name, changes, column, seed)
            named = self._name(name, changes, column, seed, identity)
            if row.perturbed:
                spec, named = dataclasses.replace(spec, perturb_weights=NOISE), f"{named}+perturbed"
                identity = _key({**json.loads(identity), "perturb_weights": NOISE})
        except (SettingsError, ModuleNotFoundError) as error:
            spec = self._spec(name, {}, column, seed)
            return PlannedRun(row=row, column=column, spec=spec, state=State.IMPOSSIBLE, problem=str(error))
        unnoted = _without(identity, "samples")  # by earlier versions
        finished = self._finished.get(_without_machine(identity)) or self._finished.get(_without_machine(unnoted))
        folder = finished or self._choice.out / "runs" / named / column.scenario / column.dataset / f"seed-{seed}"
        spec = dataclasses.replace(spec, out=folder)
        state, problem = State.FINISHED if finished else State.MISSING, ""
        try:
            earlier = None if finished else _earlier_run(folder)
        except SettingsError as error:
            return PlannedRun(row=row, column=column, spec=spec, state=State.IMPOSSIBLE, problem=str(error))
        if earlier is not None and _key(earlier) in {identity, unnoted}:
            state = State.BEGUN
            spec = dataclasses.replace(spec, threads=earlier["num_threads"], resume=True)
        elif earlier is not None:
            one, other = (
                {"torch_device": "cpu", **run, "num_threads": None} for run in (earlier, json.loads(identity))
            )
            if one["torch_device"] != other["torch_device"]:
                one["in_step"] = other["in_step"] = None  # which follows from it
            differs = difference(one, other)
            state, problem = State.IMPOSSIBLE, f"{folder} holds another run: {differs}; choose another --out"
        if state in {State.BEGUN, State.MISSING} and self._device_problem:
            state, problem = State.IMPOSSIBLE, self._device_problem
        stream = json.loads(identity)["stream"]
        return PlannedRun(
            row=row,
            column=column,
            spec=spec,
            state=state,
            problem=problem,
            num_rounds=stream["num_rounds"],
            num_clients=stream["num_clients"],
        )

    def reference(self, column: Column, seed: int) -> PlannedRun:
        """Return the run of Centralized on the same stream, which regret is measured against."""
        return self.run(Row(label="Centralized", method=REFERENCE, in_paper=False), column, seed)

    def _name(self, name: str, changes: Mapping[str, str], column: Column, seed: int, identity: str) -> str:
        """Return the method's name with those changes that make a difference under this preset."""

        def differs(changes: Mapping[str, str], column: Column) -> bool:
            try:
                return self._assembled(name, changes, column, seed)[1] != identity
            except SettingsError:  # without it nothing can be run, so it does
                return True

        parts = [name]
        for key, text in changes.items():
            if differs({other: value for other, value in changes.items() if other != key}, column):
                parts.append(f"{key}={text}")
        for key, number in column.set.items():
            without = {other: value for other, value in column.set.items() if other != key}
            if differs(changes, msgspec.structs.replace(column, set=without)):
                parts.append(f"{key}={number}")
        return "+".join(parts)

    def _assembled(self, name: str, changes: Mapping[str, str], column: Column, seed: int) -> tuple[RunSpec, str]:
        spec = self._spec(name, changes, column, seed)
        spec.check_overrides()
        wanted = wanted_stream(spec)
        simulation = simulation_of(spec, wanted, self._dataset(column.dataset))
        return spec, _key(identity_of(spec, simulation))

    def _spec(self, name: str, changes: Mapping[str, str], column: Column, seed: int) -> RunSpec:
        choice = self._choice
        method, settings = resolved(name, choice.preset)
        known = _known_settings(method)
        general = {key: text for key, text in self._overrides.items() if key in known and key not in column.set}
        stream = {key: str(value) for key, value in column.set.items() if key not in _OPTIONS}
        overrides = {**general, **settings, **changes, **stream}
        numbers = {key: int(column.set[key]) for key in _OPTIONS if key in column.set}
        return RunSpec(
            method=method,
            scenario=column.scenario,
            dataset=column.dataset,
            model=column.model,
            preset=choice.preset,
            out=choice.out,
            seed=seed,
            clients=numbers.get("num_clients", choice.clients),
            rounds=choice.rounds,
            overlap=numbers.get("overlap"),
            absent=numbers.get("num_absent"),
            data_root=choice.data_root,
            download=choice.download,
            overrides=tuple(f"{key}={text}" for key, text in overrides.items()),
            workers=choice.workers,
            torch_device=choice.torch_device,
            in_step=choice.in_step if can_train_in_step(ALL_METHODS.get(method)) else None,
        )

    def _dataset(self, name: str) -> AnyDataset:
        if name not in self._data:
            choice = self._choice
            try:
                self._data[name] = load_any_dataset(name, data_root=choice.data_root, download=choice.download)
            except SettingsError as error:
                self._data[name] = error
        found = self._data[name]
        if isinstance(found, SettingsError):
            raise found
        return found


def distinct(runs: Iterable[PlannedRun], state: State) -> list[PlannedRun]:
    """Return the runs in one state, those that share a folder once."""
    return list({run.folder: run for run in reversed(list(runs)) if run.state is state}.values())[::-1]


def _device_problem(device_name: str) -> str:
    """Return why nothing can be run on this device; empty if it can. What has been run there can be read anywhere."""
    try:
        torch_device(device_name)
    except SettingsError as error:
        return str(error)
    return ""


def _require_built(name: str) -> None:
    method, _ = VARIANTS.get(name, (name, {}))
    if method not in ALL_METHODS:
        raise SettingsError(f"{name} is not built" if name == method else f"{name} needs {method}, which is not built")


def _known_settings(method: str) -> list[str]:
    stream = [field.name for field in dataclasses.fields(StreamSize)]
    return [*stream, *(method_fields(ALL_METHODS[method]) if method in ALL_METHODS else [])]


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of a file in the folder of a run.

    Raises:
        SettingsError: It can't be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise SettingsError(f"{path} can't be read ({error}); remove its folder") from error


class _Known(msgspec.Struct, frozen=True):
    """The part of ``result.json`` that says which run it is."""

    run: dict[str, Any]


def _finished_below(out: Path) -> dict[str, Path]:
    finished = {}
    for path in sorted(out.glob(f"runs/*/*/*/seed-*/{RESULT}")):
        with contextlib.suppress(SettingsError):  # a damaged one is made again, from the rounds beside it
            finished[_without_machine(_key(as_noted_now(read_json(path, _Known).run)))] = path.parent
    return finished


def _earlier_run(folder: Path) -> dict[str, Any] | None:
    """What an unfinished run in this folder was, if there is one."""
    path = folder / _RUN
    if not path.exists():
        return as_noted_now(read_json(folder / RESULT, _Known).run) if (folder / RESULT).exists() else None
    return as_noted_now(read_json(path, dict[str, Any]))


def _without_machine(key: str) -> str:
    """Return what a finished run is known by: on a GPU, or in step, it would differ in rounding."""
    return _without(key, "torch_device", "in_step")


def _without(key: str, *names: str) -> str:
    return _key({name: value for name, value in json.loads(key).items() if name not in names})


def _key(run: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in run.items() if key != "num_threads"}, sort_keys=True)
