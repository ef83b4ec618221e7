r"""Are clients better off if each serves what proves best on its own evidence? Two runs: ``best`` and ``downloaded``.

    python -m replayfleet.scripts.experiments.served_best pfedgrp-plus --settings demo --out runs/served.json

After each aggregation every model that a client then holds, whichever it serves, is measured on its cumulative test
set, which chooses nothing: so it is known how far a client fell below the best that it could have served.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.methods.kit.packing import model_fields
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.steps.serving import BEST, DOWNLOADED, OWN, SERVED
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.paths import NEW_FILE
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.torch_setup import let_idle_threads_sleep
from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.simulator.result import commit, hardware, versions
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import load_dataset


class Watched:
    """What each client of a run held and served, round by round.

    Args:
        simulation: whose clients they are.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._served: dict[str, Parameters] = {}
        self.rounds: list[dict[str, Any]] = []

    def after(self, outcome: RoundOutcome) -> None:
        """Measure every model that a client could serve after a round."""
        clients = {}
        for index in range(self._simulation.stream.settings.num_clients):
            name = f"client-{index}"
            clients[name] = self._measured(name, index, outcome)
        self.rounds.append({"round": outcome.record.round, "accuracy": outcome.record.accuracy, "clients": clients})

    def _measured(self, name: str, index: int, outcome: RoundOutcome) -> dict[str, Any]:
        download, chosen = outcome.downloads[name], outcome.chosen.get(name)
        sets = download.pack().parameter_sets
        held = {SERVED: self._served.get(name), **{key: sets.get(key) for key in model_fields(type(download)).values()}}
        if name in outcome.uploads:
            held[OWN] = outcome.uploads[name].task_parameters
        simulation: Any = self._simulation
        tests = simulation.stream.test_indices(index, outcome.record.round)
        accuracy = {
            key: evaluate(judge_with(simulation.method.task, parameters), simulation.dataset.test, tests).accuracy
            for key, parameters in held.items()
            if parameters
        }
        told: dict[str, Any] = {"accuracy": accuracy, "served": outcome.record.clients[name].accuracy}
        if chosen is not None:
            told |= {"choice": dataclasses.asdict(chosen.served)}
        self._served[name] = download.task_parameters if chosen is None else chosen.parameters
        return told


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return average accuracy, how far clients fell below the best that they held, and what was chosen how often."""
    clients = [client for one in rounds for client in one["clients"].values()]
    falls = [max(client["accuracy"].values()) - client["served"] for client in clients]
    chosen = [client["choice"]["name"] for client in clients if "choice" in client]
    return {
        "average_accuracy": statistics.fmean(one["accuracy"] for one in rounds),
        "final_accuracy": rounds[-1]["accuracy"],
        "largest_fall": max(falls),
        "falls_over_5_points": sum(value > 0.05 for value in falls),
        "updates": len(falls),
        "chosen": {name: chosen.count(name) for name in dict.fromkeys(chosen)},
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
    """Simulate METHOD twice: clients serve what proves best, or what they download."""
    given = SimpleNamespace(**options)
    let_idle_threads_sleep()
    found: dict[str, Any] = {
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in options.items() if name != "out"
        },
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "runs": {},
    }
    asked = {name: value for name, value in options.items() if name not in {"data_root", "overrides"}}
    data = load_dataset(given.dataset, data_root=given.data_root)
    for how in (BEST, DOWNLOADED):
        spec = RunSpec(workers=1, **asked, overrides=(*given.overrides, f"serve={how}"))
        simulation = simulation_of(spec, wanted_stream(spec), data)
        watched = Watched(simulation)

        def after(outcome: RoundOutcome, watched: Watched = watched, how: str = how) -> None:
            watched.after(outcome)
            print(f"{how}, round {outcome.record.round}: {100 * outcome.record.accuracy:.1f} %", flush=True)

        simulation.run(on_round=after)
        result: dict[str, Any] = {
            "run": identity_of(spec, simulation),
            "summary": summary(watched.rounds),
            "rounds": watched.rounds,
        }
        found["runs"][how] = result
        print(f"{how}: {said(result['summary'])}", flush=True)
        write_atomic(given.out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def said(found: Mapping[str, Any]) -> str:
    """Return a summary in a line."""
    chosen = ", ".join(f"{name} {count}" for name, count in found["chosen"].items())
    return (
        f"average accuracy {100 * found['average_accuracy']:.1f} %, at most {100 * found['largest_fall']:.1f} points "
        f"below the best model held, more than 5 after {found['falls_over_5_points']} of {found['updates']} updates"
        + (f"; served: {chosen}" if chosen else "")
    )


if __name__ == "__main__":
    run_command(experiment, "served_best")
