"""One of five is excluded while a round is open, and brought back: five that train and one that only serves, all real.

Aggregator, mosquitto and clients are processes. Client 4 is stopped (SIGSTOP) when round 1 opens and excluded with the
command line, so that its upload can't come; once it is excluded it goes on. It is brought back in round 3. Told is
with how many uploads each round closed, by what, and how long after the last one.

    python -m benchmarks.excluded [--rounds 6] [--out benchmarks/results/excluded.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import run
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.federation.children import child_command
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.fleet.plan import DATASET, Yard
from replayfleet.scripts.launch.fleet import Limit, RunningFleet

NUM_TRAIN, WITHIN_S = 5, 1.0
LEFT_OUT, SERVES = "client-4", "client-5"


class Operated:
    """A fleet and what is done to it, round by round.

    Args:
        folder: for everything.
        num_rounds: of the run, at least 5.
        time_limit_s: after which it is given up.
    """

    def __init__(self, folder: Path, num_rounds: int, time_limit_s: float) -> None:
        yard = Yard(
            out=folder, clients=NUM_TRAIN + 1, rounds=num_rounds, source=DATASET, method="fedavg", preset="tiny",
            rate=5.0, deadline_s=3600.0, seed=0,
        )  # fmt: skip
        yard.prepare()
        self._yard, plan = yard, yard.fleet()
        aggregator = list(plan.aggregator)
        aggregator[aggregator.index("--clients") + 1] = str(NUM_TRAIN)
        clients = {**plan.clients, SERVES: [*plan.clients[SERVES], "--no-train"]}
        self._plan = replace(plan, aggregator=aggregator, clients=clients)
        self._limit = Limit(time.monotonic(), time_limit_s)
        self._done: set[str] = set()
        self.said: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        with PrivateBroker() as broker:
            self._running = RunningFleet(self._plan, broker, Console(quiet=True), self._limit)
            self._running.run(step=self._step)
        return {"rounds": self._rounds(), **self.said}

    def _step(self) -> None:
        events = self._events()
        opened = [event["round"] for event in events if event["event"] == "round opened"]
        if 1 in opened and self._once("exclude"):
            self._signal(signal.SIGSTOP)
            self._verb("exclude", LEFT_OUT, "--because", "its lens is broken")
            self._signal(signal.SIGCONT)
        if self._open(2, opened) and "excluded" not in self.said:
            status = self._status(LEFT_OUT)
            if [wait["reason"] for wait in status.get("waits", ())] == ["excluded"]:
                self.said["excluded"] = {name: status[name] for name in ("healthy", "phase", "waits")}
        if 3 in opened and self._once("readmit"):
            self._verb("readmit", LEFT_OUT)
        if self._open(3, opened) and "serves only" not in self.said:
            status = self._status(SERVES)
            if status["serving_version"] > 0:
                self.said["serves only"] = {name: status[name] for name in ("healthy", "waits", "serving_version")}

    def _open(self, index: int, opened: list[int]) -> bool:
        return bool(opened) and opened[-1] >= index

    def _once(self, what: str) -> bool:
        is_new = what not in self._done
        self._done.add(what)
        return is_new

    def _verb(self, *words: str) -> None:
        command = child_command("replayfleet.aggregator.cli", *words, "--yes", "--data-dir", str(self._plan.data_dir))
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self._running.clients[LEFT_OUT].process.pid, number)

    def _status(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self._yard.data_dir(name) / "status.json").read_text()))

    def _events(self) -> list[dict[str, Any]]:
        return list(read_journal(self._plan.data_dir)) if self._plan.data_dir.exists() else []

    def _rounds(self) -> list[dict[str, Any]]:
        uploads: dict[int, dict[str, float]] = {}
        found = []
        for event in self._events():
            if event["event"] == "upload accepted":
                uploads.setdefault(event["round"], {})[event["client"]] = event["time"]
            elif event["event"] == "round closed":
                there = uploads[event["round"]]
                late_s = round(event["time"] - max(there.values()), 3)
                found.append(
                    {"round": event["round"], "by": event["by"], "from": sorted(there), "after_last_upload_s": late_s}
                )
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = Operated(Path(folder) / "fleet", options.rounds, options.time_limit_s).run()
    for one in found["rounds"]:
        print(
            f"round {one['round']}: by {one['by']}, {one['after_last_upload_s']:.3f} s after the last of {one['from']}"
        )
    print(json.dumps({name: found[name] for name in found if name != "rounds"}, indent=1))
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """Return what wasn't as promised."""
    rounds = {one["round"]: one for one in result["rounds"]}
    wrong = [
        f"round {index} closed {one['after_last_upload_s']} s after its last upload, by {one['by']}"
        for index, one in rounds.items()
        if one["by"] != "quorum" or one["after_last_upload_s"] > WITHIN_S
    ]
    wrong += [f"round {index} has an upload of {LEFT_OUT}" for index in (1, 2) if LEFT_OUT in rounds[index]["from"]]
    wrong += [f"round {index} lacks {LEFT_OUT}" for index in (0, 4) if LEFT_OUT not in rounds[index]["from"]]
    if any(SERVES in one["from"] for one in rounds.values()) or not result.get("serves only", {}).get("healthy", False):
        wrong.append("who only serves doesn't, or trained")
    if result.get("excluded", {}).get("healthy", True):
        wrong.append("who is excluded doesn't say so")
    return wrong


if __name__ == "__main__":
    run(measure, __doc__, failed=missed, rounds=6, time_limit_s=1500.0)
