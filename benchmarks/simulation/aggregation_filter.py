"""What Eq. 3's mixture is worth beside the models that it mixes, and who should filter its replay.

Takes what the aggregator holds after the last complete round of a run of ``pfedgrp``, solves Eq. 3 on replay that is
filtered by each client's own model (as the paper has it) or by the round's average, and on real training images of the
same classes, which no aggregator has: what is lost between the last two is lost by the sub-generators. The mixed models
are measured on the clients' cumulative test images; the clients' own models and the average stand beside.

    make demo && python -m benchmarks.simulation.aggregation_filter runs/demo [--out FILE]
    python -m benchmarks.simulation.aggregation_filter OUT [--out FILE]    # of fleet-sim pfedgrp: reads its checkpoints
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run
from replayfleet.aggregator.aggregation import restore_artefacts
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, Upload
from replayfleet.federation.methods.steps.averaging import weighted_average
from replayfleet.federation.methods.steps.personalisation.mixtures import personalise_all
from replayfleet.federation.methods.steps.personalisation.personalise import StackedParameters
from replayfleet.federation.methods.steps.replay import Replay, eager_sampler
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service.artefact_codec import decode_own
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.simulator.checkpoints import Checkpoints
from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.stream import Stream, StreamSettings, client_id
from replayfleet.scripts.demo.facts import stored_state

DATASET = "fashion-mnist"


@dataclass(frozen=True, slots=True)
class Finished:
    """A run and what its aggregator held after its last complete round.

    Attributes:
        method: as it was set.
        stream: what the clients met.
        round_index: of that round.
        state: of the aggregator.
    """

    method: PFedGRP
    stream: Stream
    round_index: int
    state: AggregatorState


def finished_demo(folder: Path, dataset: Dataset) -> Finished:
    """Return what ``make demo`` left."""
    plan = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    settings = StreamSettings(
        scenario="circulating",
        num_clients=plan["clients"],
        num_rounds=plan["rounds"],
        samples_per_class=plan["samples"],
        test_samples_per_class=plan.get("test_samples"),
        seed=plan["seed"],
    )
    stream = stream_of(settings, dataset)
    state = AggregatorState.unpack(restore_artefacts(*stored_state(folder / "aggregator")))
    method = PFedGRP(task=dataset.task, **settings_for("pfedgrp", "demo"))
    return Finished(method, stream, stream.num_rounds - 1, state)


def finished_simulation(folder: Path, dataset: Dataset) -> Finished:
    """Return what ``fleet-sim pfedgrp`` left in ``folder/state``, also of a run that goes on.

    Raises:
        SettingsError: It is a run of something else, or no round of it is complete.
    """
    ran = json.loads((folder / "state" / "run.json").read_text(encoding="utf-8"))
    if (ran["method"], ran["dataset"]) != ("pfedgrp", DATASET):
        raise SettingsError(f"{folder} is a run of {ran['method']} on {ran['dataset']}, expected pfedgrp on {DATASET}")
    checkpoints = Checkpoints(folder / "state")
    snapshots = checkpoints.load()
    if not snapshots:
        raise SettingsError(f"{folder} has no complete round yet")
    last = snapshots[-1]
    state = AggregatorState.unpack(decode_own(last.aggregator.blobs, last.aggregator.facts, checkpoints))
    stream = stream_of(StreamSettings(**ran["stream"]), dataset)
    return Finished(PFedGRP(task=dataset.task, **ran["settings"]), stream, last.record.round, state)


def stream_of(settings: StreamSettings, dataset: Dataset) -> Stream:
    """Return the stream of a run over a data set."""
    return Stream(settings, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)


def real_replay(finished: Finished, client: int, dataset: Dataset, rng: torch.Generator) -> Replay:
    """Return real training images that a client has met, as many as the aggregator replays, with their labels."""
    rounds = range(finished.round_index + 1)
    met = np.concatenate([finished.stream.train_indices(client, index) for index in rounds])
    chosen = torch.randperm(len(met), generator=rng)[: finished.method.replay_per_client].numpy()
    data = round_data(dataset.train, met[chosen])
    return Replay(data.images, data.labels, num_tries=len(chosen), num_filled=0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dataset = load_dataset(DATASET, data_root=options.data_root)
    if (options.folder / "demo.json").exists():
        finished = finished_demo(options.folder, dataset)
    elif (options.folder / "state" / "run.json").exists():
        finished = finished_simulation(options.folder, dataset)
    else:
        sys.exit(f"{options.folder} holds neither demo.json nor state/run.json: run make demo or fleet-sim first")
    method, state, stream = finished.method, finished.state, finished.stream
    names = {client_id(index): index for index in range(stream.settings.num_clients)}

    def accuracy(models: Mapping[str, Parameters]) -> float:
        return statistics.mean(
            evaluate(
                judge_with(dataset.task, parameters),
                dataset.test,
                stream.test_indices(names[name], finished.round_index),
            ).accuracy
            for name, parameters in models.items()
        )

    uploads = {
        name: Upload(client.task_parameters, {}, client.seen, num_samples=1) for name, client in state.clients.items()
    }
    own = {name: client.task_parameters for name, client in state.clients.items()}
    result: dict[str, list[float]] = {
        "own models": [accuracy(own)],
        "average model": [accuracy(dict.fromkeys(state.clients, state.average))],
    }
    for chosen in ("own", "average"):
        found = []
        for seed in range(options.seeds):
            _, downloads = replace(method, aggregation_filter=chosen).aggregate(
                state,
                uploads,
                seeded_generator(seed, finished.round_index + 1, "benchmark"),
                sampler=eager_sampler(dataset.task),
            )
            found.append(accuracy({name: download.personalised for name, download in downloads.items()}))
        result[f"personalised, replay filtered by {chosen}"] = found
    result["personalised, on real images"] = []
    for seed in range(options.seeds):
        rng = seeded_generator(seed, finished.round_index + 1, "real")
        replays = [(place, real_replay(finished, names[name], dataset, rng)) for place, name in enumerate(own)]
        mixtures = personalise_all(
            dataset.task, StackedParameters(list(own.values())), replays, method.weight_search(), rng
        )
        weights = [mixture.weights.to(torch.float64) for mixture in mixtures]
        mixed = [weighted_average(list(own.values()), one / one.sum()) for one in weights]
        result["personalised, on real images"].append(accuracy(dict(zip(own, mixed, strict=True))))
    for name, values in result.items():
        print(f"{name}: {100 * statistics.mean(values):.1f} % ({', '.join(f'{100 * value:.1f}' for value in values)})")
    return {"mean_accuracies": result, "round": finished.round_index}


if __name__ == "__main__":
    run(measure, __doc__, "folder", seeds=(3, "repetitions with other replay"), threads=1, data_root=None)
