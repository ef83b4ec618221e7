"""``make demo``: a broker, an aggregator and three clients as real processes learn Fashion-MNIST as a stream.

Beside them FedAvg runs over the same stream in the simulator. At the end ``runs/demo/report.html`` shows both, and at
the default settings FedCIL's curve, which was simulated before and comes with this package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import ANY_PATH, FOLDER
from replayfleet.federation.service.words import clock
from replayfleet.federation.simulator.settings import SIZES
from replayfleet.federation.wire.transport.broker import BrokerHandle, PrivateBroker
from replayfleet.scripts.demo.plan import BASELINE, DOWNLOADED, MARKER, METHOD, METHODS, OWN, Plan, make_plan
from replayfleet.scripts.launch.command import PORT, POSITIVE, log_to, run_demo, this_command
from replayfleet.scripts.launch.fleet import Limit, RunningFleet
from replayfleet.scripts.launch.folder import claimed_folder, clear_folder
from replayfleet.scripts.launch.plan import find_data
from replayfleet.scripts.launch.table import rounds_table

TIME_LIMIT_S = 840.0


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=int, help="Number of rounds.  [default: of the settings]")
@click.option("--clients", type=int, help="Number of clients.  [default: of the settings]")
@click.option("--seed", type=int, default=0, help="Of the stream, the models and the training.")
@click.option("--settings", "preset", help="Stream size and method: small, medium, paper, tiny.  [default: demo]")
@click.option("--method", type=click.Choice(list(METHODS)), default=METHOD, help="What the fleet learns by.")
@click.option(
    "--serve",
    type=click.Choice([DOWNLOADED, "best"]),
    default=DOWNLOADED,
    help="What clients serve: what they download, or what proves best on their own evidence.",
)
@click.option("--fast", is_flag=True, help="The same as --settings tiny: shows that everything works, learns little.")
@click.option("--out", type=FOLDER, default=Path("runs/demo"), help="Folder for report, logs and all data dirs.")
@click.option("--data-root", type=ANY_PATH, help="Folder of Fashion-MNIST; else $REPLAYFLEET_DATA, the system's.")
@click.option("--port", type=PORT, help="Of the private broker.  [default: any free one]")
@click.option("--time-limit-s", type=POSITIVE, default=TIME_LIMIT_S, help="Give up after this many seconds.")
def demo(preset: str | None, fast: bool, port: int | None, time_limit_s: float, **sizes: Any) -> None:
    """Let a fleet of real processes learn a stream over MQTT, and write a report beside FedAvg's."""
    if fast and preset not in {None, "tiny"}:
        raise SettingsError(f"--fast is --settings tiny; leave it or --settings {preset} out")
    plan = make_plan(preset="tiny" if fast else preset or "demo", **sizes)
    console = Console(highlight=False)
    limit = Limit(time.monotonic(), time_limit_s)
    data = find_data(plan.data_root, console.print)
    with claimed_folder(plan.out, MARKER), PrivateBroker(port) as broker:
        clear_folder(plan.out, MARKER, OWN, ("logs", "clients"))
        plan.note(command=this_command())
        log_to(plan.logs / "demo.log")
        console.print(_opening(plan, broker.handle), soft_wrap=True)
        fleet = RunningFleet(plan.fleet(), broker, console, limit, lambda: _baseline_note(plan))
        fleet.run()
        plan.note(broker=broker.handle.description, fleet_s=limit.elapsed_s)
        console.print(f"{clock(limit.elapsed_s)}  writing the report")
        from replayfleet.scripts.demo.report import write_report

        report = write_report(plan.out, data)
        console.print()
        console.print(rounds_table(fleet.record))
        report.show(console, limit)


def _baseline_note(plan: Plan) -> str:
    try:
        text = (plan.logs / f"{BASELINE}.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    done = sum(line.startswith("round ") for line in text.splitlines())
    return f"FedAvg on the same stream, simulated beside the fleet: {done} of {plan.rounds} rounds"


def _opening(plan: Plan, broker: BrokerHandle) -> str:
    lines = [
        f"{plan.clients} clients and an aggregator learn Fashion-MNIST as a stream, {plan.rounds} rounds, "
        f"{SIZES[plan.preset].samples_per_class} images per class and round, settings {plan.preset!r}, "
        f"seed {plan.seed}.",
        f"Broker: {broker.description}.",
    ]
    if broker.pid is None:
        lines.append("  `sudo apt install mosquitto` gets the real one; the demo takes it by itself.")
    lines.append(f"Logs: {plan.logs}")
    return "\n".join(lines)


def main() -> None:
    """Run the command; exit codes and messages are ``run_demo``'s."""
    run_demo(demo, "demo")


if __name__ == "__main__":
    main()
