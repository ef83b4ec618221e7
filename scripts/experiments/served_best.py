r"""Would clients be better off if each served what proves best on its own evidence? ``downloaded`` beside ``best``.

    python -m replayfleet.scripts.experiments.served_best pfedgrp-plus --settings demo --out runs/served.json

Training is that of ``fleet-sim``: only what is served differs. After each aggregation a client judges its personalised
model, the average, the one that it trained itself and the one that it serves, on replay of the classes met before and
on labelled images of the round's classes that it never trains on, a tenth as many as it trained on. All are then
measured on its cumulative test set, which chooses nothing. In simulation alone: devices serve what they download.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import torch

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.memory import drawable
from replayfleet.federation.methods.steps.replay import counts_for_distribution, draw_replay
from replayfleet.federation.methods.steps.serving import Evidence, best_served
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.paths import NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.torch_setup import let_idle_threads_sleep
from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.simulator.measures.metrics import weighted_accuracy
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import load_dataset

HELD_OUT = 10
"""One labelled image for so many that a round trains on."""

SERVED, DOWNLOADED = "served", "personalised"


class Clients:
    """What each client serves, round by round.

    Args:
        simulation: whose clients they are; of a method with replay.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._data: Any = simulation.dataset
        self._served: dict[str, Parameters] = {}
        self.rounds: list[dict[str, Any]] = []

    def after(self, outcome: RoundOutcome) -> None:
        """Let each client choose, and note what every choice would have been worth."""
        clients = {}
        for index in range(self._simulation.stream.settings.num_clients):
            name = f"client-{index}"
            if name in outcome.uploads:
                clients[name] = self._chosen(name, index, outcome)
        seen = {name: outcome.record.clients[name].num_seen for name in clients}
        accuracy = {
            how: weighted_accuracy({name: client["accuracy"][client[how]] for name, client in clients.items()}, seen)
            for how in ("best", "downloaded")
        }
        self.rounds.append({"round": outcome.record.round, **accuracy, "clients": clients})

    def _chosen(self, name: str, index: int, outcome: RoundOutcome) -> dict[str, Any]:
        download, method = outcome.downloads[name], self._simulation.method
        candidates: dict[str, Parameters] = {
            DOWNLOADED: download.personalised,
            "average": download.average,
            "own": outcome.uploads[name].task_parameters,
        }
        before = DOWNLOADED
        if name in self._served:
            candidates, before = {SERVED: self._served[name], **candidates}, SERVED
        found = best_served(method.task, candidates, before, self._evidence(name, index, outcome))
        tests = self._simulation.stream.test_indices(index, outcome.record.round)
        accuracy = {
            own: evaluate(judge_with(method.task, parameters), self._data.test, tests).accuracy
            for own, parameters in candidates.items()
        }
        self._served[name] = candidates[found.name]
        return {
            "best": found.name,
            "downloaded": DOWNLOADED,
            "scores": dict(found.scores),
            "gain": found.gain,
            "error": found.error,
            "accuracy": accuracy,
        }

    def _evidence(self, name: str, index: int, outcome: RoundOutcome) -> Evidence:
        simulation, state = self._simulation, outcome.client_states[name]
        round_index, method = outcome.record.round, simulation.method
        rng = seeded_generator(simulation.run_seed, round_index, f"{name}/evidence")
        real = self._held_out(index, round_index, rng)
        generators = {class_id: own.generator for class_id, own in state.sub_generators.items()}
        counts = drawable(generators, state.seen)
        wanted = counts_for_distribution(counts, method.replay_per_client) if counts else {}
        replay = draw_replay(generators, wanted, simulation.sampler, None, rng, spec=method.task)
        return Evidence(
            torch.cat([real.images, replay.images]), torch.cat([real.labels, replay.labels]), dict(state.seen)
        )

    def _held_out(self, index: int, round_index: int, rng: torch.Generator) -> Any:
        """Images of the round's classes that this client trains on in no round."""
        stream, train = self._simulation.stream, self._data.train
        met = np.concatenate([stream.train_indices(index, other) for other in range(stream.num_rounds)])
        free = np.setdiff1d(np.arange(len(train.labels)), met)
        free = free[np.isin(train.labels[free], stream.class_ids(index, round_index))]
        count = max(1, len(stream.train_indices(index, round_index)) // HELD_OUT)
        return round_data(train, free[torch.randperm(len(free), generator=rng)[:count].numpy()])


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return average accuracies, how far a client fell below the best that it held, and what was chosen how often."""
    clients = [client for one in rounds for client in one["clients"].values()]
    falls = {
        how: [max(client["accuracy"].values()) - client["accuracy"][client[how]] for client in clients]
        for how in ("best", "downloaded")
    }
    chosen = [client["best"] for client in clients]
    return {
        "average_accuracy": {how: statistics.fmean(one[how] for one in rounds) for how in falls},
        "largest_fall": {how: max(own) for how, own in falls.items()},
        "falls_over_5_points": {how: sum(value > 0.05 for value in own) for how, own in falls.items()},
        "chosen": {name: chosen.count(name) for name in dict.fromkeys(chosen)},
        "choices": len(clients),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("method")
@click.option("--out", type=NEW_FILE, required=True, help="JSON file to write.")
@click.option("--scenario", default="circulating", help="Of the stream.")
@click.option("--dataset", default="fashion-mnist", help="Data set.")
@click.option("--settings", "preset", default="demo", help="Preset of stream and method.")
@click.option("--clients", type=click.IntRange(1), default=None, help="Of the stream.  [default: of the settings]")
@click.option("--rounds", type=click.IntRange(1), default=None, help="Of the stream.  [default: of the settings]")
@click.option("--seed", type=int, default=0, help="Of stream, models and training.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Changes one setting.")
@click.option("--data-root", type=click.Path(path_type=Path), default=None, help="Folder of data sets.")
def experiment(**options: Any) -> None:
    """Simulate METHOD, and let each client serve what proves best beside what it downloads."""
    given = SimpleNamespace(**options)
    let_idle_threads_sleep()
    spec = RunSpec(workers=1, **{name: value for name, value in options.items() if name != "data_root"})
    simulation = simulation_of(spec, wanted_stream(spec), load_dataset(given.dataset, data_root=given.data_root))
    if not isinstance(simulation.method, PFedGRP) or simulation.method.generators == "single":
        raise SettingsError(
            f"{given.method} keeps no replay of single classes to judge by; take pfedgrp or pfedgrp-plus"
        )
    clients = Clients(simulation)

    def after(outcome: RoundOutcome) -> None:
        clients.after(outcome)
        told = clients.rounds[-1]
        print(
            f"round {told['round']}: best {100 * told['best']:.1f} %, downloaded {100 * told['downloaded']:.1f} %",
            flush=True,
        )

    simulation.run(on_round=after)
    found: dict[str, Any] = {
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in options.items() if name != "out"
        },
        "run": identity_of(spec, simulation),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "summary": summary(clients.rounds),
        "rounds": clients.rounds,
    }
    write_atomic(given.out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(said(found["summary"]))


def said(found: Mapping[str, Any]) -> str:
    """Return a summary in a line."""
    falls = found["largest_fall"]
    mean = found["average_accuracy"]
    return (
        f"average accuracy {100 * mean['best']:.1f} % (downloaded {100 * mean['downloaded']:.1f} %), at most "
        f"{100 * falls['best']:.1f} points below the best model held (downloaded {100 * falls['downloaded']:.1f}), "
        f"{found['chosen']} of {found['choices']}"
    )


def main() -> None:
    """Run the command; every expected error is one line on stderr."""
    run_command(experiment, "served_best")


if __name__ == "__main__":
    main()
