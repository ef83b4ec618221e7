"""``python -m replayfleet.scripts.fleet``: a fleet of real processes, and what can go wrong with it.

A private mosquitto, an aggregator and N clients, each a process of its own, learn a stream at scaled rates. Clients are
killed, the broker dies, lines are bad, if asked for; the exit code says whether every round and every client came
through. Nothing needs a GPU or a camera, and nothing is left running.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.words import clock
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.fleet.faults import check_faults
from replayfleet.scripts.fleet.plan import DATASET, MARKER, Yard
from replayfleet.scripts.fleet.troubled import TroubledFleet
from replayfleet.scripts.launch.command import POSITIVE, log_to, run_demo, this_command
from replayfleet.scripts.launch.fleet import Limit, RunningFleet
from replayfleet.scripts.launch.folder import claimed_folder, note_facts
from replayfleet.scripts.launch.plan import find_data
from replayfleet.scripts.launch.table import rounds_table

SMALLER = "--clients and --rounds ask"
"""Said when the time is up."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--clients", type=int, default=3, help="Number of client processes.")
@click.option("--rounds", type=int, default=3, help="Number of rounds.")
@click.option("--source", default=DATASET, help="dataset (a share of Fashion-MNIST each), synthetic (a street each).")
@click.option("--method", default="fedavg", help="As of aggregator serve.")
@click.option("--settings", "preset", default="tiny", help="Of the method and the stream: tiny, demo, small, paper.")
@click.option("--rate", type=POSITIVE, default=10.0, help="Pictures a second of every client.")
@click.option("--deadline-s", type=POSITIVE, default=300.0, help="Seconds that a round stays open.")
@click.option("--fault", "faults", multiple=True, help="kill-client, restart-broker, bad-line; repeatable.")
@click.option("--seed", type=int, default=0, help="Of streams, models, training and faults.")
@click.option("--out", type=FOLDER, default=Path("runs/fleet"), help="Folder for logs and all data dirs.")
@click.option("--data-root", type=ANY_PATH, help="Folder of Fashion-MNIST; else $REPLAYFLEET_DATA, the system's.")
@click.option("--time-limit-s", type=POSITIVE, default=600.0, help="Give up after this many seconds.")
def fleet(faults: tuple[str, ...], time_limit_s: float, **sizes: Any) -> None:
    """Run a fleet on this machine, with faults or without; exit code 0: every round and every client came through."""
    wanted, yard = check_faults(faults), Yard(**sizes)
    console = Console(highlight=False)
    if yard.source == DATASET:
        find_data(yard.data_root, console.print)
    limit = Limit(time.monotonic(), time_limit_s, SMALLER)
    with claimed_folder(yard.out, MARKER), PrivateBroker() as broker:
        yard.prepare()
        log_to(yard.logs / "fleet.log")
        console.print(
            f"{yard.clients} clients, {yard.rounds} rounds of {yard.method}, source {yard.source!r}, faults: "
            f"{', '.join(wanted) or 'none'}. Broker: {broker.handle.description}. Logs: {yard.logs}",
            soft_wrap=True,
        )
        running = RunningFleet(yard.fleet(wanted), broker, console, limit)
        troubled = TroubledFleet(yard, wanted, broker, running)
        troubled.run()
        console.print()
        console.print(rounds_table(running.record))
        console.print(troubled.table())
        summary = {**troubled.summary(), "elapsed_s": round(limit.elapsed_s, 1)}
        note_facts(yard.out / MARKER, {"command": this_command(), **summary})
        killed = sum(client["killed"] for client in summary["clients"])
        console.print(
            f"all {yard.rounds} rounds and all {yard.clients} clients came through; killed clients: {killed}, killed "
            f"brokers: {summary['broker_restarts']}, cut connections: {summary['cut_connections']}",
            soft_wrap=True,
        )
        console.print(f"elapsed: {clock(limit.elapsed_s)} minutes")


def main() -> None:
    """Run the command; exit codes and messages are ``run_demo``'s."""
    run_demo(fleet, "fleet")


if __name__ == "__main__":
    main()
