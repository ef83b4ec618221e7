"""``python -m replayfleet.scripts.fleet``: a fleet of real processes, and what can go wrong with it.

A private mosquitto, an aggregator and N clients, each a process of its own, learn a stream at scaled rates. Clients are
killed, the broker dies, lines are bad, if asked for; the exit code says whether every round and every client came
through. Nothing needs a GPU or a camera, and nothing is left running.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from replayfleet.federation.service.logs import configure_logging
from replayfleet.scripts.demo.command import run_demo
from replayfleet.scripts.demo.folder import note_facts
from replayfleet.scripts.demo.plan import find_data
from replayfleet.scripts.demo.processes import Children
from replayfleet.scripts.demo.table import rounds_table
from replayfleet.scripts.demo.watch import Limit
from replayfleet.scripts.fleet.faults import check_faults
from replayfleet.scripts.fleet.plan import DATASET, MARKER, FleetPlan
from replayfleet.scripts.fleet.processes import Broker, RunningFleet
from replayfleet.scripts.words import clock

_PATH = click.Path(path_type=Path)

SMALLER = "--clients and --rounds ask"
"""Said when the time is up."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--clients", type=int, default=3, help="Number of client processes.")
@click.option("--rounds", type=int, default=3, help="Number of rounds.")
@click.option("--source", default=DATASET, help="dataset (a share of Fashion-MNIST each), synthetic (a street each).")
@click.option("--method", default="fedavg", help="As of aggregator serve.")
@click.option("--settings", "preset", default="tiny", help="Of the method and the stream: tiny, demo, small, paper.")
@click.option("--rate", type=float, default=10.0, help="Pictures a second of every client.")
@click.option("--deadline-s", type=float, default=300.0, help="Seconds that a round stays open.")
@click.option("--fault", "faults", multiple=True, help="kill-client, restart-broker, bad-line; repeatable.")
@click.option("--seed", type=int, default=0, help="Of streams, models, training and faults.")
@click.option("--out", type=_PATH, default=Path("runs/fleet"), help="Folder for logs and all data dirs.")
@click.option("--data-root", type=_PATH, help="Folder that holds Fashion-MNIST; else $REPLAYFLEET_DATA, the system's.")
@click.option("--time-limit-s", type=float, default=600.0, help="Give up after this many seconds.")
def fleet(faults: tuple[str, ...], time_limit_s: float, **sizes: Any) -> None:
    """Run a fleet on this machine, with faults or without; exit code 0: every round and every client came through."""
    plan, wanted = FleetPlan(**sizes), check_faults(faults)
    console = Console(highlight=False)
    if plan.source == DATASET:
        find_data(plan.data_root, console.print)
    plan.prepare()
    configure_logging(stream=(plan.logs / "fleet.log").open("w", encoding="utf-8", buffering=1))
    limit = Limit(time.monotonic(), time_limit_s, SMALLER)
    with Broker() as broker, Children(plan.logs) as children:
        console.print(
            f"{plan.clients} clients, {plan.rounds} rounds of {plan.method}, source {plan.source!r}, faults: "
            f"{', '.join(wanted) or 'none'}. {broker.description}. Logs: {plan.logs}",
            soft_wrap=True,
        )
        running = RunningFleet(plan, wanted, broker, children, console)
        running.run(limit)
    console.print()
    console.print(rounds_table(running.record))
    console.print(running.table())
    summary = running.summary()
    note_facts(plan.out / MARKER, {"command": ["python", "-m", "replayfleet.scripts.fleet", *sys.argv[1:]], **summary})
    killed = sum(client["killed"] for client in summary["clients"])
    console.print(
        f"all {plan.rounds} rounds and all {plan.clients} clients came through; killed clients: {killed}, killed "
        f"brokers: {summary['broker_restarts']}, cut connections: {summary['cut_connections']}",
        soft_wrap=True,
    )
    console.print(f"elapsed: {clock(limit.elapsed_s)} minutes")


def main() -> None:
    """Run the command; exit codes and messages are ``run_demo``'s."""
    run_demo(fleet, "fleet")


if __name__ == "__main__":
    main()
