"""Who should filter the replay of Eq. 3: each client's own model, as the paper has it, or the round's average?

Takes what the aggregator of a finished `make demo` holds after its last round, solves Eq. 3 with either filter, and
measures the mixed models on the clients' cumulative test images; the clients' own models and the average stand beside.

    make demo && python -m benchmarks.aggregation_filter runs/demo [--out benchmarks/results/aggregation_filter.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aggregator.aggregation import restore_artefacts
from benchmarks.environment import write_result
from federation.methods.pfedgrp import PFedGRP
from federation.methods.pfedgrp_records import Upload
from federation.methods.records import Parameters
from federation.methods.seeding import seeded_generator
from federation.methods.steps.replay import eager_sampler
from federation.methods.steps.task_model import judge_with
from federation.scenarios.evaluation import evaluate
from federation.service.presets import settings_for
from federation.service.torch_setup import prepare_torch
from federation.streams.datasets import Dataset, load_dataset
from federation.streams.stream import Stream, StreamSettings, client_id
from scripts.report.facts import stored_state


def stream_of(demo: Path, dataset: Dataset) -> Stream:
    """Return the stream that a finished demo ran over."""
    plan = json.loads((demo / "demo.json").read_text(encoding="utf-8"))
    settings = StreamSettings(
        scenario="circulating",
        num_clients=plan["clients"],
        num_rounds=plan["rounds"],
        samples_per_class=plan["samples"],
        test_samples_per_class=plan.get("test_samples"),
        seed=plan["seed"],
    )
    return Stream(settings, dataset.train.labels, dataset.test.labels, dataset.task.num_classes)


def main() -> None:
    """Print the accuracies; write JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="Repetitions with other replay.")
    parser.add_argument("--data-root", type=Path)
    arguments = parser.parse_args()
    prepare_torch(1)
    dataset = load_dataset("fashion-mnist", data_root=arguments.data_root)
    stream = stream_of(arguments.demo, dataset)
    reference, blobs = stored_state(arguments.demo / "aggregator")
    state = PFedGRP.AggregatorState.unpack(restore_artefacts(reference, blobs))
    method = PFedGRP(task=dataset.task, **settings_for("pfedgrp", "demo"))
    names = {client_id(index): index for index in range(stream.settings.num_clients)}

    def accuracy(models: Mapping[str, Parameters]) -> float:
        return statistics.mean(
            evaluate(
                judge_with(dataset.task, parameters),
                dataset.test,
                stream.test_indices(names[name], stream.num_rounds - 1),
            ).accuracy
            for name, parameters in models.items()
        )

    uploads = {
        name: Upload(client.task_parameters, {}, client.seen, num_samples=1) for name, client in state.clients.items()
    }
    result: dict[str, list[float]] = {
        "own models": [accuracy({name: client.task_parameters for name, client in state.clients.items()})],
        "average model": [accuracy(dict.fromkeys(state.clients, state.average))],
    }
    for chosen in ("own", "average"):
        found = []
        for seed in range(arguments.seeds):
            _, downloads = replace(method, aggregation_filter=chosen).aggregate(
                state,
                uploads,
                seeded_generator(seed, stream.num_rounds, "benchmark"),
                sampler=eager_sampler(dataset.task),
            )
            found.append(accuracy({name: download.personalised for name, download in downloads.items()}))
        result[f"personalised, replay filtered by {chosen}"] = found
    for name, values in result.items():
        print(f"{name}: {100 * statistics.mean(values):.1f} % ({', '.join(f'{100 * value:.1f}' for value in values)})")
    if arguments.out:
        write_result(arguments.out, {"mean_accuracies": result, "round": stream.num_rounds - 1})


if __name__ == "__main__":
    main()
