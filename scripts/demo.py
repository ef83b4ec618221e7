"""``make demo``: a broker, an aggregator and three clients as real processes learn Fashion-MNIST as a stream.

Beside them FedAvg runs over the same stream in the simulator. At the end ``runs/demo/report.html`` shows both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.live import Live

from federation.errors import ReplayfleetError, SettingsError
from federation.service.logs import configure_logging
from federation.transport.broker import BrokerHandle, open_broker
from scripts.demo_plan import BASELINE, Plan, clear, find_data, make_plan
from scripts.demo_processes import Child, ChildFailed, Children
from scripts.demo_table import event_line, live_view, rounds_table
from scripts.fleet_record import FleetRecord, JournalTail
from scripts.words import clock

POLL_S = 0.25
TIME_LIMIT_S = 840.0
LEAVE_S = 30.0
"""Clients leave by themselves within this time after the aggregator did."""
_PATH = click.Path(path_type=Path)
_interrupted = threading.Event()


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
    plan.note(command=["python", "-m", "scripts.demo", *sys.argv[1:]])
    _log_to(plan.logs / "demo.log")
    with open_broker(None, log=logging.getLogger("demo"), port=port) as broker, Children(plan.logs) as children:
        console.print(_opening(plan, broker), soft_wrap=True)
        run = _Run(plan, children, console, started, time_limit_s)
        record = run.fleet(broker)
    plan.note(broker=broker.description, fleet_s=time.monotonic() - started)
    console.print(f"{clock(time.monotonic() - started)}  writing the report")
    from scripts.report import write_report

    report = write_report(plan.out, data)
    console.print()
    console.print(rounds_table(record))
    for line in report.summary:
        console.print(line, soft_wrap=True)
    console.print(f"\nreport: {report.path.resolve()}", soft_wrap=True)
    console.print(f"elapsed: {clock(time.monotonic() - started)} minutes")


class _Run:
    """The fleet and the baseline, from their start to their end.

    Args:
        plan: what to run.
        children: starts and ends processes.
        console: the terminal, or whatever standard output is.
        started: ``time.monotonic()`` at the demo's start.
        time_limit_s: give up then.
    """

    def __init__(self, plan: Plan, children: Children, console: Console, started: float, time_limit_s: float) -> None:
        self._plan = plan
        self._children = children
        self._console = console
        self._started = started
        self._time_limit_s = time_limit_s
        self._record = FleetRecord()
        self._tail = JournalTail(plan.aggregator_dir / "events.jsonl")

    def fleet(self, broker: BrokerHandle) -> FleetRecord:
        """Run everything and return what happened.

        Raises:
            ChildFailed: A process ended before its time.
            ReplayfleetError: The time is up.
        """
        plan, start = self._plan, self._children.start
        aggregator = start("aggregator", plan.aggregator(broker.url))
        clients = [start(name, plan.client(index, broker.url)) for index, name in enumerate(plan.names)]
        baseline = start(BASELINE, plan.baseline(), niceness=10)
        with self._shown() as show:
            self._wait_for([aggregator], may_end=[aggregator, *clients, baseline], show=show)
            deadline = time.monotonic() + LEAVE_S
            self._wait_for(clients, may_end=[aggregator, *clients, baseline], show=show, until=deadline)
            self._wait_for([baseline], may_end=[aggregator, *clients, baseline], show=show)
        return self._record

    def _wait_for(
        self, awaited: list[Child], *, may_end: list[Child], show: Callable[[], None], until: float | None = None
    ) -> None:
        while any(child.process.poll() is None for child in awaited):
            self._look(show)
            done = may_end if self._record.finished else [child for child in may_end if child.name == BASELINE]
            self._children.check(done)
            if until is not None and time.monotonic() > until:
                return
            if self._elapsed_s > self._time_limit_s:
                raise ReplayfleetError(
                    f"{self._time_limit_s:.0f} s are over ({self._where()}); everything is ended, the logs are in "
                    f"{self._plan.logs}; --time-limit-s allows more, --fast asks for less"
                )
            time.sleep(POLL_S)
        self._look(show)
        self._children.check(may_end)

    def _look(self, show: Callable[[], None]) -> None:
        if _interrupted.is_set():
            raise KeyboardInterrupt
        for event in self._tail.new_events():
            self._record.add(event)
            line = event_line(event, self._record)
            if line and not self._console.is_terminal:
                self._console.print(f"{clock(self._elapsed_s):>5}  {line}", soft_wrap=True)
        show()

    @contextlib.contextmanager
    def _shown(self) -> Iterator[Callable[[], None]]:
        if not self._console.is_terminal:
            yield lambda: None
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(
                live_view(self._record, elapsed_s=self._elapsed_s, note=self._baseline_note()), refresh=True
            )

    def _baseline_note(self) -> str:
        try:
            text = (self._plan.logs / f"{BASELINE}.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        done = sum(line.startswith("round ") for line in text.splitlines())
        return f"FedAvg on the same stream, simulated beside the fleet: {done} of {self._plan.rounds} rounds"

    def _where(self) -> str:
        current = self._record.current
        return "no round was opened" if current is None else f"round {current.index} of {self._record.num_rounds}"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


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


def _interrupt(*_: object) -> None:
    """Note the signal and raise: while a process is being started, Python prints what is raised and goes on."""
    _interrupted.set()
    raise KeyboardInterrupt


def main() -> None:
    """Run the command; every expected error is one line on stderr, exit code 2 for settings, 1 for the rest."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported for the report
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = demo.main(standalone_mode=False)
    except ChildFailed as error:
        _fail(f"{error}:", 1, error.tail)
    except SettingsError as error:
        _fail(str(error), 2)
    except ReplayfleetError as error:
        _fail(str(error), 1)
    except click.ClickException as error:
        _fail(f"{error.format_message()} (--help lists all options)", 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("stopped; all its processes are ended", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, more: str = "") -> NoReturn:
    click.echo(f"demo: {' '.join(message.split())}", err=True)
    if more:
        click.echo("\n".join(f"    {line}" for line in more.splitlines()), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
