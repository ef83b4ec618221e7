"""Many light members at a real broker, for as long as asked: does every round close, is anybody lost or called silent?

A real mosquitto, an aggregator with all that it does (signatures, SQLite and files on the disk, releases, journal) in a
process of its own, and light members in a few processes (``crowd_members.py``). They train nothing and send models of a
few bytes, or with ``--whole`` of 2.8 MB, as soon as a round opens: a round takes what it costs. With ``--churn`` some
lose their connection, freeze, leave for good or send numbers that aren't finite; then 95 % of the crowd close a round.
Counted are rounds and what they took, uploads, refusals, members called silent or gone, connections beyond the first,
and what broker and aggregator have in memory, over time.

    python -m benchmarks.crowd [--members 1000] [--minutes 30] [--churn 5] [--whole] [--out FILE]     (make crowd)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.harness import run
from replayfleet.aggregator.operator.journal import JOURNAL
from replayfleet.federation.wire.transport.connecting import CONTROL_KEEPALIVE_S, DATA_KEEPALIVE_S
from replayfleet.scripts.launch.record import JournalTail

if TYPE_CHECKING:
    from replayfleet.federation.wire.transport.interfaces import OnMessage, Will
    from replayfleet.federation.wire.transport.mqtt import MqttSession

ROOT = Path(__file__).parents[1]
IN_MEMORY = Path("/dev/shm")
WATCH_EVERY_S = 10.0
WAIT_S = 600.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.mosquitto import mosquitto

    in_memory = IN_MEMORY if IN_MEMORY.is_dir() else None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        lines = ("allow_anonymous true", "max_connections -1", "max_queued_messages 0", f"pid_file {folder}/pid")
        port = stack.enter_context(mosquitto(folder, *lines))
        url, processes = f"mqtt://127.0.0.1:{port}", options.processes
        asked = (int(options.whole), options.churn)
        server = stack.enter_context(_started("crowd", "--serve", folder / "aggregator", url, options.members, *asked))
        members = [
            stack.enter_context(_started("crowd_members", theirs, url, options.members, place, processes, *asked))
            for place in range(processes)
        ]
        watched = {"broker": int((folder / "pid").read_text()), "aggregator": server.pid}
        story = _Story(folder / "aggregator" / JOURNAL)
        _until(lambda: story.num_rounds() >= 1, [server, *members])  # everybody has joined
        found = _watched(watched, [server, *members], 60 * options.minutes, story.num_rounds)
        found |= {"members": options.members, "whole": options.whole, "churn": options.churn}
        found |= story.told()  # before the crowd is sent home
        told: Counter[str] = Counter()
        frozen: set[str] = set()
        for each in members:
            counts = json.loads(_ended(each))
            frozen |= set(counts.pop("frozen"))
            told.update(counts)
        _ended(server)
        found |= {"members were": dict(told), "called silent, never frozen": sorted(story.silent - frozen)}
    print(json.dumps({name: value for name, value in found.items() if name != "memory_mb"}), flush=True)
    return found


@contextlib.contextmanager
def _started(module: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ended(process: subprocess.Popen[bytes]) -> bytes:
    """Ask a process to end, and return its last line."""
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=WAIT_S)[0].splitlines()
    return said[-1] if said else b""


def _until(done: Any, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    ends = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > ends or any(process.poll() is not None for process in processes):
            sys.exit("the first round didn't end; look at what was said above")
        time.sleep(0.5)


def _watched(
    pids: dict[str, int], processes: Sequence[subprocess.Popen[bytes]], for_s: float, rounds: Any
) -> dict[str, Any]:
    """Return memory and processor time of these processes while the crowd works."""
    known = {name: psutil.Process(pid) for name, pid in pids.items()}
    memory: dict[str, list[float]] = {name: [] for name in known}
    spent = {name: -sum(process.cpu_times()[:2]) for name, process in known.items()}
    began, before = time.monotonic(), rounds()
    while time.monotonic() < began + for_s and all(process.poll() is None for process in processes):
        time.sleep(min(WATCH_EVERY_S, max(0.1, began + for_s - time.monotonic())))
        for name, process in known.items():
            memory[name].append(round(process.memory_info().rss / 1e6, 1))
        now_mb = ", ".join(f"{name} {of_it[-1]:.0f} MB" for name, of_it in memory.items())
        print(f"{time.monotonic() - began:6.0f} s, {rounds()} rounds, {now_mb}", flush=True)
    took, num_rounds = time.monotonic() - began, rounds() - before
    for name, process in known.items():
        spent[name] += sum(process.cpu_times()[:2])
    return {
        "seconds": round(took, 1),
        "rounds": num_rounds,
        "memory_mb": memory,
        "cpu_s_a_round": {name: round(cpu_s / max(1, num_rounds), 2) for name, cpu_s in spent.items()},
    }


class _Story:
    """What the journal said so far; it is put aside when it is full, so it is read as it grows."""

    def __init__(self, journal: Path) -> None:
        self._tail = JournalTail(journal)
        self._rounds_s: list[float] = []
        self._closed: list[dict[str, Any]] = []
        self._others: Counter[str] = Counter()
        self.silent: set[str] = set()

    def num_rounds(self) -> int:
        """Rounds that were committed; ask often."""
        for event in self._tail.new_events():
            match event["event"]:
                case "round committed":
                    self._rounds_s.append(event["round_s"])
                case "round closed":
                    self._closed.append(event)
                case "upload accepted":
                    self._others["uploads accepted"] += 1
                case "upload rejected" | "client gone":
                    self._others[f"{event['event']}: {event['reason']}"] += 1
                    if event["reason"] == "silent":
                        self.silent.add(event["client"])
        return len(self._rounds_s)

    def told(self) -> dict[str, Any]:
        """Return what was said of all rounds but the first, in which everybody joins."""
        self.num_rounds()
        took, closed = sorted(self._rounds_s[1:]) or [0.0], self._closed[1:]
        return {
            "round_p50_s": statistics.median(took),
            "round_p95_s": took[int(0.95 * (len(took) - 1))],
            "rounds_closed_by": dict(Counter(event["by"] for event in closed)),
            "fewest_uploads": min((event["uploads"] for event in closed), default=0),
            "rounds_closed": len(self._closed),
            **self._others,
        }


def aggregator(folder: Path, url: str, num_members: int, whole: int, churn: int) -> None:
    """Serve until SIGTERM."""
    from support.tiny_fleet import TinyExporter, tiny_spec
    from support.tiny_method import TinyMethod

    from benchmarks.crowd_members import WHOLE
    from replayfleet.aggregator.admission import Caps
    from replayfleet.aggregator.founding import Fleet
    from replayfleet.aggregator.rounds.machine import RoundRules
    from replayfleet.aggregator.service import AggregatorService
    from replayfleet.federation.service.torch_setup import prepare_torch

    prepare_torch(1)
    rules = RoundRules(num_clients=math.ceil(num_members * (0.95 if churn else 1)), deadline_s=WAIT_S)
    caps = Caps(max_clients=num_members * (10 if churn else 1) + 1)
    method = WHOLE if whole else TinyMethod()
    fleet = Fleet(tiny_spec(), method, lambda _: None, TinyExporter(), rules, caps=caps)
    folder.mkdir()
    AggregatorService(fleet, folder, _connect_to(url)).run(_terminated())


def _connect_to(url: str) -> Any:
    from replayfleet.federation.wire.transport.mqtt import MqttSession

    def connect(client_id: str, on_message: OnMessage, will: Will | None) -> MqttSession:
        keepalive_s, clean = (DATA_KEEPALIVE_S, True) if will is None else (CONTROL_KEEPALIVE_S, False)
        return MqttSession(url, client_id, on_message=on_message, will=will, keepalive_s=keepalive_s, clean=clean)

    return connect


def _terminated() -> threading.Event:
    event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: event.set())
    return event


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        where, url, *numbers = sys.argv[2:]
        aggregator(Path(where), url, *map(int, numbers))
    else:
        run(
            measure,
            __doc__,
            members=(1000, "how many"),
            minutes=(30.0, "to watch"),
            processes=(4, "of members"),
            whole=(False, "models of 2.8 MB"),
            churn=(0, "percent of the members that fare badly in a minute"),
        )
