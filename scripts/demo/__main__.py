"""``make demo``: a broker, an aggregator and three clients as real processes learn Fashion-MNIST as a stream.

Beside them FedAvg runs over the same stream in the simulator. At the end ``runs/demo/report.html`` shows both.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from replayfleet.federation.service.logs import configure_logging
from replayfleet.federation.wire.transport.broker import BrokerHandle, open_broker
from replayfleet.scripts.demo.command import run_demo
from replayfleet.scripts.demo.plan import BASELINE, Plan, clear, find_data, make_plan
from replayfleet.scripts.demo.processes import Children
from replayfleet.scripts.demo.table import rounds_table
from replayfleet.scripts.demo.watch import Limit, Watch, seconds_from_now
from replayfleet.scripts.fleet.record import FleetRecord
from replayfleet.scripts.words import clock

TIME_LIMIT_S = 840.0
LEAVE_S = 30.0
"""Clients leave by themselves within this time after the aggregator did."""
_PATH = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=int, help="Number of rounds.  [default: of the settings]")
@click.option("--clients", type=int, help="Number of clients.  [default: of the settings]")
@click.option("--seed", type=int, default=0, help="Of the stream, the models and the training.")
@click.option("--settings", "preset", default="demo", help="Stream size and method: demo, small, paper, tiny.")
@click.option("--fast", is_flag=True, help="The same as --settings tiny: shows that everything works, learns little.")
@click.option("--out", type=_PATH, default=Path("runs/demo"), help="Folder for the report, the logs and all data dirs.")
@click.option("--data-root", type=_PATH, help="Folder that holds Fashion-MNIST; else $REPLAYFLEET_DATA, the system's.")
@click.option("--port", type=int, help="Of the private broker.  [default: any free one]")
@click.option("--time-limit-s", type=float, default=TIME_LIMIT_S, help="Give up after this many seconds.")
def demo(preset: str, fast: bool, port: int | None, time_limit_s: float, **sizes: Any) -> None:
    """Let a fleet of real processes learn a stream over MQTT, and write a report beside FedAvg's."""
    plan = make_plan(preset="tiny" if fast else preset, **sizes)
    console = Console(highlight=False)
    started = time.monotonic()
    data = find_data(plan.data_root, console.print)
    clear(plan.out)
    plan.note(command=["python", "-m", "replayfleet.scripts.demo", *sys.argv[1:]])
    _log_to(plan.logs / "demo.log")
    with open_broker(None, log=logging.getLogger("demo"), port=port) as broker, Children(plan.logs) as children:
        console.print(_opening(plan, broker), soft_wrap=True)
        record = _fleet(plan, broker.url, children, console, Limit(started, time_limit_s))
    plan.note(broker=broker.description, fleet_s=time.monotonic() - started)
    console.print(f"{clock(time.monotonic() - started)}  writing the report")
    from replayfleet.scripts.report import write_report

    report = write_report(plan.out, data)
    console.print()
    console.print(rounds_table(record))
    for line in report.summary:
        console.print(line, soft_wrap=True)
    console.print(f"\nreport: {report.path.resolve()}", soft_wrap=True)
    console.print(f"elapsed: {clock(time.monotonic() - started)} minutes")


def _fleet(plan: Plan, broker: str, children: Children, console: Console, limit: Limit) -> FleetRecord:
    """Run the fleet and the baseline from their start to their end, and return what happened.

    Raises:
        ChildFailed: A process ended before its time.
        ReplayfleetError: The time is up.
    """
    watch = Watch(plan.aggregator_dir / "events.jsonl", children, console, limit, lambda: _baseline_note(plan))
    aggregator = children.start("aggregator", plan.aggregator(broker))
    clients = [children.start(name, plan.client(index, broker)) for index, name in enumerate(plan.names)]
    baseline = children.start(BASELINE, plan.baseline(), niceness=10)
    fleet = [aggregator, *clients]
    with watch.shown():
        watch.wait_for([aggregator], may_end=fleet, beside=[baseline])
        watch.wait_for(clients, may_end=fleet, beside=[baseline], until=seconds_from_now(LEAVE_S))
        watch.wait_for([baseline], may_end=fleet, beside=[baseline])
    return watch.record


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
        f"{plan.samples} images per class and round, settings {plan.preset!r}, seed {plan.seed}.",
        f"Broker: {broker.description}.",
    ]
    if broker.pid is None:
        lines.append("  `sudo apt install mosquitto` gets the real one; the demo takes it by itself.")
    lines.append(f"Logs: {plan.logs}")
    return "\n".join(lines)


def _log_to(path: Path) -> None:
    configure_logging(stream=path.open("w", encoding="utf-8", buffering=1))


def main() -> None:
    """Run the command; exit codes and messages are ``run_demo``'s."""
    run_demo(demo, "demo")


if __name__ == "__main__":
    main()
