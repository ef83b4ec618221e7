"""A fleet with which things go wrong, and what became of every client."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.service.words import UNKNOWN, milliseconds, percent
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.fleet.faults import BROKER, RESTART_BROKER, Faults
from replayfleet.scripts.fleet.plan import Yard
from replayfleet.scripts.launch.fleet import RunningFleet
from replayfleet.scripts.launch.table import plain_table

_COUNTS = ("killed", "frames", "dropped", "failed")


class TroubledFleet:
    """Does to a running fleet what ``Faults`` decides.

    Args:
        yard: what is run.
        faults: what goes wrong.
        broker: running.
        fleet: whose clients are killed.

    Raises:
        SettingsError: The broker can't be killed, for it is a thread of this process.
    """

    def __init__(self, yard: Yard, faults: Sequence[str], broker: PrivateBroker, fleet: RunningFleet) -> None:
        if RESTART_BROKER in faults and broker.handle.pid is None:
            raise SettingsError("restart-broker needs mosquitto, which is not on this machine (apt install mosquitto)")
        self._yard = yard
        self._broker = broker
        self._fleet = fleet
        self._faults = Faults(faults, yard.names, yard.rounds, random.Random(yard.seed))  # noqa: S311 - no secret

    def run(self) -> None:
        """Run the fleet from its start to its end.

        Raises:
            ChildFailed: A process ended before its time.
            ReplayfleetError: The time is up, or a client didn't end.
        """
        self._fleet.run(step=self._step)
        if self._fleet.late:
            raise ReplayfleetError(f"{', '.join(self._fleet.late)} did not end in time after the aggregator")

    def _step(self) -> None:
        current, now = self._fleet.record.current, time.monotonic()
        for name in self._faults.due_kills(None if current is None else current.index, now):
            if name != BROKER and self._is_done(name):
                continue
            self._fleet.say(f"{name}: killed")
            if name == BROKER:
                self._broker.kill()
            else:
                self._fleet.kill_client(name)
            self._faults.was_killed(name, now)
        for name in self._faults.due_starts(now):
            if name == BROKER:
                self._broker.start()
            else:
                self._fleet.start_client(name, again=f"-{self._faults.num_kills[name]}")
            self._fleet.say(f"{name}: started again")

    def _is_done(self, name: str) -> bool:
        """Whether a client has ended, or only waits for the last download."""
        record = self._fleet.record
        current = record.current
        is_last = current is not None and current.index == self._yard.rounds - 1
        uploaded = current is not None and name in current.clients and current.clients[name].bytes_up is not None
        return record.finished or (is_last and uploaded) or self._fleet.clients[name].is_over

    def table(self) -> Table:
        """Return what became of every client."""
        table = plain_table("clients", ("client", "uploads", *_COUNTS, "p95", "accuracy"))
        for row in self.summary()["clients"]:
            table.add_row(
                row["client"],
                f"{row['uploads']} of {self._yard.rounds}",
                *(str(row[name]) for name in _COUNTS),
                milliseconds(row["latency_p95_s"]),
                UNKNOWN if row["accuracy"] is None else percent(row["accuracy"]),
            )
        return table

    def summary(self) -> dict[str, Any]:
        """Return the same for programs."""
        line = self._yard.logs / "line.log"
        return {
            "rounds": len(self._fleet.record.committed_rounds()),
            "broker_restarts": self._faults.num_kills[BROKER],
            "cut_connections": line.read_text().splitlines().count("cut a connection") if line.exists() else 0,
            "clients": [self._client(name) for name in self._yard.names],
        }

    def _client(self, name: str) -> dict[str, Any]:
        mine = [found.clients[name] for found in self._fleet.record.committed_rounds() if name in found.clients]
        try:
            status = json.loads((self._yard.data_dir(name) / "status.json").read_bytes())
        except (OSError, ValueError):
            status = {}
        return {
            "client": name,
            "uploads": sum(client.bytes_up is not None for client in mine),
            "killed": self._faults.num_kills[name],
            **{key: status.get(key) for key in ("frames", "dropped", "failed", "latency_p95_s")},
            "bytes_up": sum(client.bytes_up or 0 for client in mine),
            "bytes_down": sum(client.bytes_down or 0 for client in mine),
            "accuracy": next((found.accuracy for found in reversed(mine) if found.accuracy is not None), None),
        }
