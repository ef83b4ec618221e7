"""Table 10: the distance between what clients met and what their sub-generators replay, from finished runs.

Per seed, over all clients together: up to 1000 of the training samples that each client met, and as many replayed ones
in the same proportions of classes, drawn and filtered as the method draws them for the client's next round. Every row
is measured in the features of one model, the average task model of pFedGRP's own run, so that rows compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayfleet.federation.errors import ArtefactRejected, ReplayfleetError, SettingsError
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator, split_generator
from replayfleet.federation.methods.steps.memory import Memory, MemorySettings, draw, drawable, sampler_of
from replayfleet.federation.methods.steps.replay import counts_for_distribution
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service.artefact_codec import decode_artefacts
from replayfleet.federation.simulator.checkpoints import Checkpoints, Snapshot
from replayfleet.federation.simulator.job import simulation_of, wanted_stream
from replayfleet.federation.simulator.measures.fid import fid_inception, fid_task_features, task_features
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.simulator.tables.measured import Cell, cells_of
from replayfleet.federation.simulator.tables.paper import PaperTable
from replayfleet.federation.simulator.tables.plan import PlannedRun, State
from replayfleet.federation.simulator.tables.running import Failure
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.stream import client_id

SAMPLES_PER_CLIENT = 1000

_EXTRACTOR = "pfedgrp"
"""Whose average model gives the features."""

_PLAIN = "plain"
_STATE = "state"


@dataclass(frozen=True, slots=True)
class FinishedClient:
    """One client at the end of a run.

    Attributes:
        real: (B, C, H, W), training samples that it met.
        memory: its sub-generators, and how much it has seen of each class.
        personalised: the task model that filters its replay.
    """

    real: Tensor
    memory: Memory
    personalised: Parameters


@dataclass(frozen=True, slots=True)
class FinishedFleet:
    """A run of pFedGRP at its end.

    Attributes:
        method: with its settings.
        clients: in the order of their ids.
        average: the mean of all task models.
    """

    method: Any
    clients: Sequence[FinishedClient]
    average: Parameters


def fid_cells(
    table: PaperTable,
    runs: Sequence[PlannedRun],
    failures: Sequence[Failure],
    *,
    features: str,
    show: Callable[[str], None],
) -> list[Cell]:
    """Return the cells of Table 10; a run whose checkpoints are gone or damaged has no number, and its cell says so.

    Args:
        table: of the paper.
        runs: of this table, as they are now.
        failures: what went wrong just now.
        features: ``task`` or ``inception``.
        show: takes a line for the operator.
    """
    extractors = {
        (run.column.slug, run.seed): run
        for run in runs
        if run.spec.method == _EXTRACTOR and run.row.method == _EXTRACTOR and run.state is State.FINISHED
    }

    def fid(run: PlannedRun, _result: Result) -> dict[str, float]:
        extractor = extractors.get((run.column.slug, run.seed))
        if features == "task" and extractor is None:
            raise SettingsError(f"the features are those of {_EXTRACTOR}'s run, which is not finished")
        name = f"{run.row.label} on {run.column.title}, seed {run.seed}"
        show(f"measures: {name}")
        try:
            return {"FID": measured_fid(run, extractor if features == "task" else None)}
        except ReplayfleetError as error:
            show(f"not measured: {name}: {error}")
            raise

    return cells_of(table, runs, failures, fid)


def measured_fid(run: PlannedRun, extractor: PlannedRun | None) -> float:
    """Return the distance for one finished run, in the features of ``extractor``'s average model, else Inception's.

    Raises:
        SettingsError: The checkpoints of one of them are gone or damaged.
    """
    fleet = finished_fleet(run)
    real = torch.cat([client.real for client in fleet.clients])
    generated = replayed(fleet, filtered=run.row.replay != _PLAIN, seed=run.seed)
    if extractor is None:
        return fid_inception(real, generated)
    average = fleet.average if extractor.folder == run.folder else _average_of(extractor)
    return fid_task_features(task_features(fleet.method.task, average), real, generated)


def _average_of(extractor: PlannedRun) -> Parameters:
    try:
        return finished_fleet(extractor).average
    except ReplayfleetError as error:
        raise SettingsError(f"the features are those of {_EXTRACTOR}'s run: {error}") from error


def finished_fleet(run: PlannedRun) -> FinishedFleet:
    """Return what a finished run's checkpoints hold of its last round.

    Raises:
        SettingsError: They are gone or damaged.
    """
    try:
        return _fleet_after(_last_snapshot(run), run)
    except ArtefactRejected as error:
        raise SettingsError(f"its checkpoints can't be used: {error}") from error


def _last_snapshot(run: PlannedRun) -> Snapshot:
    snapshots = Checkpoints(run.folder / _STATE).load()
    if len(snapshots) < run.num_rounds:
        held = f"end after {len(snapshots)} of {run.num_rounds} rounds" if snapshots else "are gone"
        raise SettingsError(f"its checkpoints {held}, and FID needs those of the last round")
    return snapshots[-1]


def _fleet_after(last: Snapshot, run: PlannedRun) -> FinishedFleet:
    spec = run.spec
    data = load_dataset(spec.dataset, data_root=spec.data_root, download=spec.download)
    simulation = simulation_of(spec, wanted_stream(spec), data)
    checkpoints = Checkpoints(run.folder / _STATE)
    method = simulation.method
    state = method.AggregatorState.unpack(decode_artefacts(last.aggregator.blobs, last.aggregator.facts, checkpoints))
    clients = []
    for index in range(simulation.stream.settings.num_clients):
        name = client_id(index)
        stored = last.clients[name]
        memory = method.ClientState.unpack(decode_artefacts(stored.blobs, stored.facts, checkpoints))
        download = method.download_for(state, name, None)
        clients.append(FinishedClient(_met(simulation, index, run.seed), memory, download.personalised))
    return FinishedFleet(method, clients, state.average)


def replayed(fleet: FinishedFleet, *, filtered: bool, seed: int) -> Tensor:
    """Return as many replayed images as the clients' real ones, in the proportions of the classes that each has met.

    Args:
        fleet: at its end.
        filtered: keep only what the client's personalised model recognises; a single generator needs that for labels.
        seed: of the latents.
    """
    settings: MemorySettings = dataclasses.replace(fleet.method, filter_replay=filtered)
    sampler = sampler_of(settings)
    rng = seeded_generator(seed, 0, "fid")
    images = []
    for client in fleet.clients:
        generators = {key: sub_generator.generator for key, sub_generator in client.memory.sub_generators.items()}
        known: Mapping[int, int] = drawable(generators, client.memory.seen)
        counts = counts_for_distribution(known, len(client.real))
        judge = judge_with(settings.task, client.personalised)
        images.append(draw(settings, generators, counts, judge, split_generator(rng), sampler).images)
    return torch.cat(images)


def _met(simulation: Simulation, client: int, seed: int) -> Tensor:
    """Training samples that a client met in all rounds; at most ``SAMPLES_PER_CLIENT``, chosen at random."""
    stream = simulation.stream
    indices = torch.cat([torch.from_numpy(stream.train_indices(client, index)) for index in range(stream.num_rounds)])
    order = torch.randperm(len(indices), generator=seeded_generator(seed, 0, f"fid/{client_id(client)}"))
    chosen = indices[order[:SAMPLES_PER_CLIENT]].sort().values
    return round_data(simulation.dataset.train, chosen.numpy()).images
