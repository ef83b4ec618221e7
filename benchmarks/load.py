"""What an aggregator spends on each member, for 10, 100 and 1,000 of them: does a round close, is anybody turned away?

The fleet is one process and turns step by step on a clock of its own: an aggregator with all that it does (signatures,
SQLite, releases, journal; on a file system in memory, so that a disk's speed is left out) and light members, which
train nothing and send models of a few bytes. Counted is the processor time of the aggregator's loop and of what it
aggregates, per member and round, without its first round; how often a member was told ``busy`` or called silent; and
how much memory the process has gained by its last round. It says nothing of a broker, which is in the same process.

    python -m benchmarks.load [--members 10 100 1000] [--rounds 4] [--transfers 64] [--out FILE]     (make load)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import run
from replayfleet.aggregator.operator.journal import read_journal

TESTS = Path(__file__).parents[1] / "tests"
IN_MEMORY = Path("/dev/shm")
LONG_S = 3600.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 2:
        raise SystemExit(f"--rounds {options.rounds}: expected 2 or more, for the first is left out")
    found = {}
    for members in options.members:
        command = [sys.executable, "-m", "benchmarks.load", "--alone", str(members), str(options.rounds)]
        said = subprocess.run([*command, str(options.transfers)], stdout=subprocess.PIPE, check=True).stdout
        found[str(members)] = json.loads(said.splitlines()[-1])
        print(members, found[str(members)], flush=True)
    return found


def alone(members: int, rounds: int, transfers: int) -> dict[str, float]:
    """Turn a fleet in this process."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    from support.tiny_fleet import TinyFleet

    names = tuple(f"cam-{place:05}" for place in range(members))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        made = TinyFleet(
            Path(folder), names, num_rounds=rounds, deadline_s=LONG_S, caps=members + 1, transfers=transfers
        )
        spent, pump, broker = [0.0], made.service.loop.pump, made.broker

        turning: list[bool] = []

        def counted(timeout_s: float) -> None:
            turning.append(True)
            began = time.thread_time()
            pump(timeout_s)
            spent[0] += time.thread_time() - began
            turning.clear()

        delivers = broker._publish

        def uncounted(*given: Any, **how: Any) -> Any:
            began = time.thread_time()
            delivered = delivers(*given, **how)
            spent[0] -= time.thread_time() - began if turning else 0.0
            return delivered

        broker._publish = uncounted  # type: ignore[method-assign]
        made.service.loop.pump = counted  # type: ignore[method-assign]
        made.run(until=lambda: made.rounds.index >= 1, for_s=LONG_S)
        first_s, memory = spent[0], psutil.Process().memory_info().rss
        made.run(until=lambda: made.rounds.index >= rounds, for_s=LONG_S)
        grown = psutil.Process().memory_info().rss - memory
        events = list(read_journal(Path(folder) / "aggregator"))
        said = Counter(str(event.get("event")) for event in events)
        refused = Counter(v.reason for one in made.clients.values() for v in one.verdicts if not v.accepted)
        made.close()
    return {
        "cpu_ms_per_member_round": 1e3 * (spent[0] - first_s) / (members * (rounds - 1)),
        "uploads": said["upload accepted"],
        "rounds": said["round committed"],
        "told_busy": refused["busy"],
        "called_silent": sum(e.get("event") == "client gone" and e.get("reason") == "silent" for e in events),
        "grown_mb": grown / 1e6,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(alone(*map(int, sys.argv[2:]))))
    else:
        members = ([10, 100, 1000], "how many")
        run(measure, __doc__, members=members, rounds=(4, "the first is left out"), transfers=(64, "at a time"))
