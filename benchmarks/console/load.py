"""What a console costs a fleet of 200 members: nobody looks, one looks, a hundred look on, one sends rubbish.

The fleet is one process: an aggregator and light clients, which train nothing and send small models, in real time; a
round begins every 15 seconds. The console is the process that ``aggregator serve --console`` starts. Counted is the
processor time of the aggregator, without that of the clients beside it, and of that what answering the console takes;
how many rounds were committed, and how long after its last upload a round was closed at most.

    python -m benchmarks.console.load [--members 200] [--for-s 45] [--out benchmarks/results/console_load.json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import cpu_s, run
from replayfleet.aggregator.operator.journal import read_journal
from replayfleet.federation.children import child_command

TESTS = Path(__file__).parents[2] / "tests"
WATCHING = 100
EVERY_S = 15.0
PAGES = ("/", "/round", "/clients/cam-007", "/methods", "/journal")


def fleet(folder: Path, num_members: float, stop_at: float) -> None:
    """Turn a fleet in real time, and write what it used and did, line by line."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    from support.tiny_fleet import TinyFleet

    from replayfleet.aggregator.control.local import LocalSocket
    from replayfleet.federation.service.jobs import Jobs
    from tests.support.watched_fleet import names

    class Fleet(TinyFleet):
        jobs = Jobs

    clients = names(int(num_members))
    made = Fleet(folder, clients, num_rounds=None, deadline_s=86400.0, interval_s=EVERY_S)
    for place, client in enumerate(made.clients.values()):
        share = 0.5 + 0.4 * place / len(clients)
        client.asks_leave = True
        client.metrics = dict.fromkeys(("accuracy", "stream_accuracy", "accuracy/0", "accuracy/1"), share)
    made.service.start()
    local = LocalSocket(folder / "aggregator", made.service.control)
    answering = [0.0]

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            before = time.thread_time()
            try:
                return work(*given)
            finally:
                answering[0] += time.thread_time() - before

        return run

    desk, server = made.service.coordinator.control, local._server
    desk.look = counted(desk.look)  # type: ignore[method-assign]
    server.process_request_thread = counted(server.process_request_thread)  # type: ignore[method-assign]
    began, theirs, told = time.monotonic(), 0.0, 0.0
    while time.monotonic() < stop_at:
        now = made.now = 1000.0 + time.monotonic() - began
        made.service.loop.pump(0)
        before = time.thread_time()
        turn = int(now / 0.02) % 20  # each client every 0.4 s
        for client in list(made.clients.values())[turn::20]:
            client.pump(now)
        theirs += time.thread_time() - before
        if time.monotonic() - told > 0.25:
            told = time.monotonic()
            sys.stdout.write(json.dumps([told, time.process_time() - theirs, made.rounds.index, answering[0]]) + "\n")
            sys.stdout.flush()
        time.sleep(0.01)
    local.stop()
    os._exit(0)


Told = tuple[float, float, int, float]
"""Clock, seconds of processor time so far, round, and of those seconds what answering the console took."""


class Console:
    """Asks a console as browsers do."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.times: list[float] = []
        self.codes: list[int] = []

    async def get(self, path: str) -> None:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(writer):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
        self.times.append(time.perf_counter() - began)
        self.codes.append(int(answer[9:12] or 0))

    async def look(self) -> None:
        """Read page after page, a second between two."""
        while True:
            for path in PAGES:
                await self.get(path)
                await asyncio.sleep(1)

    async def watch(self) -> None:
        """Keep a page open: fetch it again whenever something changed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(writer):
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    await asyncio.sleep(random.random() / 2)
                    await self.get("/")

    async def rubbish(self) -> None:
        """Send what is no request, half a request, and requests for nothing, as fast as it goes."""
        chance = random.Random(1)
        host = b"Host: localhost\r\n\r\n"
        kinds = (
            chance.randbytes(2000),
            b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n",
            b"POST /do HTTP/1.1\r\nContent-Length: 99999999\r\n" + host,
            b"GET /journal?q=" + b"%27" * 2000 + b" HTTP/1.1\r\n" + host,
            b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000,
            b"GET /cl",
        )
        held = []
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(chance.choice(kinds))
                await asyncio.sleep(0.002)
                held.append(writer)
                if len(held) > 200:
                    held.pop(0).close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        return asyncio.run(_measured(Path(place), options.members, options.for_s))


async def _measured(folder: Path, num_members: int, for_s: float) -> dict[str, Any]:
    until = time.monotonic() + 300 + 6 * for_s
    code = (
        "import sys, pathlib; from benchmarks.console.load import fleet; "
        "fleet(pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, str(folder), str(num_members), str(until)]
    turning = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent)
    assert turning.stdout is not None
    lines: list[Told] = []
    reading = asyncio.create_task(
        asyncio.to_thread(lambda: [lines.append(tuple(json.loads(line))) for line in turning.stdout or ()])
    )
    try:
        while not lines or lines[-1][2] < 3:
            assert turning.poll() is None
            await asyncio.sleep(0.5)
        found = {}
        found["no console"] = await _phase(folder, lines, for_s, None, [])
        async with _console(folder / "aggregator") as (console, pid):
            for name, work in (
                ("nobody looks", []),
                ("one looks", [console.look]),
                ("a hundred look on", [console.look, *[console.watch] * WATCHING]),
                ("one sends rubbish", [console.look, console.rubbish]),
            ):
                found[name] = await _phase(folder, lines, for_s, pid, work, console)
        for name, one in found.items():
            print(f"{name:<18} {json.dumps(one)}", flush=True)
        return {"members": num_members, "for_s": for_s, "round_every_s": EVERY_S, "phases": found}
    finally:
        turning.kill()
        await reading


async def _phase(
    folder: Path,
    lines: list[Told],
    for_s: float,
    pid: int | None,
    work: list[Callable[[], Awaitable[None]]],
    console: Console | None = None,
) -> dict[str, Any]:
    first, used, began = lines[-1], cpu_s(pid) if pid else 0.0, time.time()
    if console is not None:
        console.times, console.codes = [], []
    running = [asyncio.create_task(one()) for one in work]  # type: ignore[arg-type]
    await asyncio.sleep(for_s)
    last = lines[-1]
    for one in running:
        one.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    span = last[0] - first[0]
    result: dict[str, Any] = {
        "aggregator_cores": round((last[1] - first[1]) / span, 4),
        "of_which_answering": round((last[3] - first[3]) / span, 4),
        **_rounds(folder / "aggregator", began),
    }
    if pid is not None and console is not None:
        result["console_cores"] = round((cpu_s(pid) - used) / for_s, 4)
        result["lost"] = sum(not isinstance(one, asyncio.CancelledError) for one in ended)
        if console.times:
            ordered = sorted(console.times)
            result |= {
                "pages": len(ordered),
                "answered_200": sum(code == 200 for code in console.codes),
                "median_ms": round(1e3 * statistics.median(ordered), 1),
                "p95_ms": round(1e3 * ordered[int(0.95 * (len(ordered) - 1))], 1),
            }
    return result


def _rounds(folder: Path, since: float) -> dict[str, Any]:
    """Return how many rounds were closed and committed since then, and how long after their last uploads."""
    events = [event for event in read_journal(folder) if event["time"] >= since]
    uploads: dict[int, float] = {}
    late = [0.0]
    for event in events:
        if event["event"] == "upload accepted":
            uploads[event["round"]] = event["time"]
        elif event["event"] == "round closed" and event["round"] in uploads:
            late.append(event["time"] - uploads[event["round"]])
    return {
        "rounds_committed": sum(event["event"] == "round committed" for event in events),
        "closed_after_last_upload_ms": round(1e3 * max(late), 1),
    }


@contextlib.asynccontextmanager
async def _console(folder: Path) -> AsyncIterator[tuple[Console, int]]:
    command = child_command(
        "replayfleet.aggregator.console.command", "--data-dir", str(folder), "--listen", "127.0.0.1:0"
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            port = None
            while port is None:
                line = await asyncio.to_thread(process.stderr.readline)
                assert line
                port = re.search(r"url=\S+:(\d+)/", line)
            draining = asyncio.create_task(asyncio.to_thread(process.stderr.read))
            yield Console(int(port[1])), process.pid
        finally:
            process.terminate()
            await draining


def missed(result: dict[str, Any]) -> list[str]:
    """Return what wasn't as promised."""
    return [
        f"{name}: {one}"
        for name, one in result["phases"].items()
        if one["of_which_answering"] > 0.05 or not one["rounds_committed"] or one.get("p95_ms", 0) > 200
    ]


if __name__ == "__main__":
    run(measure, __doc__, failed=missed, members=(200, "in the fleet"), for_s=(45.0, "each of five phases"))
