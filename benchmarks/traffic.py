"""Bytes per round that a fleet sends, against sending everything each time.

A simulation counts parameter sets as the deployed fleet names them: by digest, before compression. ``everything`` is
the task model with all sub-generators up, and the whole download down. The stream is ``circulating``, so from the sixth
round on classes come again and the drift gate decides what is sent.

    python -m benchmarks.traffic [--out benchmarks/results/traffic.json]
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import circulating, run
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.steps.replay import eager_sampler
from replayfleet.federation.service.fleet.presets import settings_for
from replayfleet.federation.simulator.records import RoundRecord
from replayfleet.federation.simulator.settings import SIZES
from replayfleet.federation.simulator.simulation import RoundOutcome, Simulation
from replayfleet.federation.streams.datasets import load_dataset

SIDES = ("up", "down")


def totals(record: RoundRecord) -> dict[str, int]:
    """Return a round's bytes, summed over clients."""
    clients = record.clients.values()
    return {
        **{side: sum(getattr(client, f"bytes_{side}") for client in clients) for side in SIDES},
        **{
            f"{side}_everything": sum(getattr(client, f"bytes_{side}_everything") for client in clients)
            for side in SIDES
        },
        "sub_generators_sent": sum(len(client.sub_generators_sent) for client in clients),
        "sub_generators_held": sum(client.num_sub_generators_held for client in clients),
    }


def line(what: str, found: dict[str, int]) -> str:
    """One line for people."""
    sides = "   ".join(
        f"{side} {found[side] / 1e6:6.2f} of {found[f'{side}_everything'] / 1e6:6.2f} MB "
        f"({found[side] / found[f'{side}_everything']:4.0%})"
        for side in SIDES
    )
    return f"{what:<9} {sides}   sub-generators sent {found['sub_generators_sent']} of {found['sub_generators_held']}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dataset = load_dataset("fashion-mnist", data_root=options.data_root)
    simulation = Simulation(
        method=PFedGRP(task=dataset.task, **settings_for("pfedgrp", options.settings)),
        dataset=dataset,
        stream=circulating(
            dataset,
            num_clients=options.clients,
            num_rounds=options.rounds,
            samples_per_class=SIZES[options.settings].samples_per_class,
        ),
        run_seed=0,
        sampler=eager_sampler(dataset.task),
        num_threads=options.threads,
    )
    rounds: list[dict[str, int]] = []

    def on_round(outcome: RoundOutcome) -> None:
        rounds.append(totals(outcome.record))
        print(line(f"round {outcome.record.round}", rounds[-1]), flush=True)

    simulation.run(on_round=on_round)
    total = {key: sum(found[key] for found in rounds) for key in rounds[0]}
    print(line("all", total))
    return {"settings": options.settings, "clients": options.clients, "rounds": rounds, "all": total}


if __name__ == "__main__":
    run(measure, __doc__, settings="demo", clients=(2, ""), rounds=(10, ""), threads=1, data_root=None)
