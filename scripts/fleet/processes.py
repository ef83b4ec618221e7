"""The processes of a simulated fleet: a broker that can die, a bad line, an aggregator and clients."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from replayfleet.federation.children import child_command
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.wire.transport.broker import BrokerHandle, open_broker
from replayfleet.scripts.demo.processes import Child, Children
from replayfleet.scripts.demo.watch import Limit, Watch
from replayfleet.scripts.fleet.faults import BAD_LINE, RESTART_BROKER, Faults
from replayfleet.scripts.fleet.plan import FleetPlan
from replayfleet.scripts.fleet.record import FleetRecord
from replayfleet.scripts.words import UNKNOWN, clock, milliseconds, percent

LEAVE_S = 60.0
"""Clients leave by themselves within this time after the aggregator did."""

_LINE_START_S = 60.0


class Broker:
    """A private broker that can be killed and started again at its port."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._handle: BrokerHandle | None = None
        self._port: int | None = None

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def description(self) -> str:
        """Which broker it is."""
        assert self._handle is not None
        return f"Broker: {self._handle.description}"

    @property
    def port(self) -> int:
        """Where it listens on this machine, also while it is away."""
        assert self._port is not None
        return self._port

    @property
    def can_die(self) -> bool:
        """Whether it is a process of its own."""
        return self._handle is not None and self._handle.pid is not None

    def start(self) -> None:
        """Start it, at the port that it had before."""
        self._handle = self._stack.enter_context(open_broker(None, log=logging.getLogger("fleet"), port=self._port))
        self._port = int(self._handle.url.rpartition(":")[2])

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self._handle is not None
        assert self._handle.pid is not None
        os.kill(self._handle.pid, signal.SIGKILL)
        self._stack.close()


class RunningFleet:
    """The processes of one fleet; implements ``fleet_faults.Acts``.

    Args:
        plan: what to run.
        faults: what goes wrong.
        broker: running.
        children: takes the processes.
        console: told what happens.

    Raises:
        SettingsError: The broker can't be killed, for it is a thread of this process.
    """

    def __init__(
        self, plan: FleetPlan, faults: Sequence[str], broker: Broker, children: Children, console: Console
    ) -> None:
        if RESTART_BROKER in faults and not broker.can_die:
            raise SettingsError("restart-broker needs mosquitto, which is not on this machine (apt install mosquitto)")
        self._plan = plan
        self._broker = broker
        self._children = children
        self._console = console
        self._bad_line = BAD_LINE in faults
        self._client_url = ""
        self._clients: dict[str, Child] = {}
        self._all: list[Child] = []
        self._watch: Watch | None = None
        self._limit: Limit | None = None
        self.faults = Faults(faults, plan.names, plan.rounds, self, random.Random(plan.seed))  # noqa: S311 - not a secret

    @property
    def record(self) -> FleetRecord:
        """What the aggregator's journal says so far."""
        return FleetRecord() if self._watch is None else self._watch.record

    def run(self, limit: Limit) -> None:
        """Run the fleet from its start to its end.

        Raises:
            ChildFailed: A process ended before its time.
            ReplayfleetError: The time is up, or a client didn't end.
        """
        self._limit = limit
        url = f"mqtt://127.0.0.1:{self._broker.port}"
        self._client_url = f"mqtt://127.0.0.1:{self._start_line()}" if self._bad_line else url
        watch = self._watch = Watch(self._plan.journal, self._children, self._console, limit)
        aggregator = self._children.start("aggregator", self._plan.aggregator(url))
        self._all.append(aggregator)
        for name in self._plan.names:
            self.start_client(name)
        with watch.shown():
            watch.wait_for([aggregator], may_end=self._all, until=self._step)
            leave_at = time.monotonic() + LEAVE_S
            left = watch.wait_for(
                _Current(self._clients), may_end=self._all, until=lambda: self._step() or time.monotonic() > leave_at
            )
        late = [name for name, child in self._clients.items() if child.process.poll() is None]
        if late or not left:
            raise ReplayfleetError(f"{', '.join(late)} did not end within {LEAVE_S:.0f} s after the aggregator")

    def kill_client(self, name: str) -> bool:
        """End a client with SIGKILL, unless it is done or only waits for the last download."""
        child, current = self._clients[name], self.record.current
        is_last = current is not None and current.index == self._plan.rounds - 1
        uploaded = current is not None and name in current.clients and current.clients[name].bytes_up is not None
        if self.record.finished or (is_last and uploaded) or child.process.poll() is not None:
            return False
        self._say(f"{name}: killed")
        self._all.remove(child)
        self._children.kill(child)
        return True

    def start_client(self, name: str) -> None:
        """Start a client, the first time or again."""
        number = self.faults.num_kills[name]
        log = name if number == 0 else f"{name}-{number}"
        child = self._clients[name] = self._children.start(log, self._plan.client(name, self._client_url))
        self._all.append(child)
        if number:
            self._say(f"{name}: started again")

    def kill_broker(self) -> None:
        """End the broker with SIGKILL."""
        self._say("broker: killed")
        self._broker.kill()

    def start_broker(self) -> None:
        """Start the broker again."""
        self._broker.start()
        self._say("broker: started again")

    def table(self) -> Table:
        """What became of every client."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title="clients", title_justify="left")
        headings = ("client", "uploads", "killed", "frames", "dropped", "failed", "p95", "accuracy")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "client" else "right", no_wrap=True)
        for row in self._rows():
            table.add_row(
                row["client"],
                f"{row['uploads']} of {self._plan.rounds}",
                *(str(row[name]) for name in ("killed", "frames", "dropped", "failed")),
                milliseconds(row["latency_p95_s"]),
                UNKNOWN if row["accuracy"] is None else percent(row["accuracy"]),
            )
        return table

    def summary(self) -> dict[str, Any]:
        """The same for programs."""
        assert self._limit is not None
        return {
            "rounds": len(self.record.committed_rounds()),
            "broker_restarts": self.faults.num_broker_restarts,
            "cut_connections": _count_lines(self._plan.logs / "line.log", "cut a connection"),
            "elapsed_s": round(self._limit.elapsed_s, 1),
            "clients": list(self._rows()),
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        rounds = self.record.committed_rounds()
        for name in self._plan.names:
            mine = [found.clients[name] for found in rounds if name in found.clients]
            status = _status(self._plan.data_dir(name) / "status.json")
            accuracies = [client.accuracy for client in mine if client.accuracy is not None]
            yield {
                "client": name,
                "uploads": sum(client.bytes_up is not None for client in mine),
                "killed": self.faults.num_kills[name],
                **{key: status.get(key) for key in ("frames", "dropped", "failed", "latency_p95_s")},
                "bytes_up": sum(client.bytes_up or 0 for client in mine),
                "bytes_down": sum(client.bytes_down or 0 for client in mine),
                "accuracy": accuracies[-1] if accuracies else None,
            }

    def _step(self) -> bool:
        current = self.record.current
        self.faults.step(None if current is None else current.index)
        return False

    def _start_line(self) -> int:
        """Start the bad line and return its port."""
        where = ("--to", str(self._broker.port), "--seed", str(self._plan.seed))
        line = self._children.start("line", child_command("replayfleet.scripts.fleet.tcp_link", *where))
        deadline = time.monotonic() + _LINE_START_S
        while time.monotonic() < deadline:
            self._children.check()
            for text in line.log.read_text(encoding="utf-8").splitlines():
                if text.startswith("port "):
                    return int(text.removeprefix("port "))
            time.sleep(0.05)
        raise ReplayfleetError(f"the bad line did not start within {_LINE_START_S:.0f} s; its log is {line.log}")

    def _say(self, text: str) -> None:
        assert self._limit is not None
        self._console.print(f"{clock(self._limit.elapsed_s):>5}  {text}", soft_wrap=True)


class _Current(Sequence[Child]):
    """The clients as they are now: one that was killed has another process afterwards."""

    def __init__(self, clients: dict[str, Child]) -> None:
        self._clients = clients

    def __getitem__(self, index: Any) -> Any:
        return list(self._clients.values())[index]

    def __len__(self) -> int:
        return len(self._clients)


def _status(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _count_lines(path: Path, line: str) -> int:
    return path.read_text(encoding="utf-8").splitlines().count(line) if path.exists() else 0
