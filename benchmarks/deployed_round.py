"""What a round of a deployed fleet costs beside training: seconds from one round to the next, CPU seconds of all.

A real mosquitto, ``aggregator serve`` and ``edge-client start`` processes with all guarantees, as an operator starts
them; the method's local round returns what it got, moved a little (``idle_method.py``). The model is our ResNet20 for
28 pixels (2.8 MB). Every client serves its model in a process of its own and learns from a folder of pictures, two in
each round; as a device with a camera it has no test set. The first rounds are left out: they import torch and export
graphs. CPU seconds are those of the broker, the aggregator, the clients and their children;
they hold on busy machines too.

    python -m benchmarks.deployed_round [--clients 2 10] [--rival-python PATH] [--out FILE]

``--rival-python`` names a Python that has Flower (``pip install "flwr==1.41.0"``): its rounds over gRPC take turns with
ours, with as many bytes, no disk, no check of what arrives and no serving.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

from benchmarks.harness import run
from replayfleet.aggregator.operator.journal import JOURNAL
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.scripts.launch.plan import aggregator_command, client_command
from replayfleet.scripts.launch.record import JournalTail

ROOT = Path(__file__).parents[1]
RIVAL = Path(__file__).parent / "rivals" / "flower_deployed.py"
LEFT_OUT = 4
"""Rounds, the first of which import torch, and export graphs."""
LIMIT_S = 150.0
"""Without a round; then the error ends with what the processes said last."""
FLEET = "bench"
_TRAINER = "replayfleet.edge_client.learning.training.trainer"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {str(clients): _compared(clients, options) for clients in options.clients}


def _compared(clients: int, options: argparse.Namespace) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], **({"flower": []} if options.rival_python else {})}
    for _ in range(options.repeats):
        turns["ours"].append(_fleet(clients, options.rounds))
        if options.rival_python:
            turns["flower"].append(_rival(clients, options.rounds, options.rival_python))
    found = {side: _summary(of_side) for side, of_side in turns.items()}
    for side, numbers in found.items():
        parts = ", ".join(f"{name} {cpu_s:.3f}" for name, cpu_s in numbers["parts"].items())
        print(
            f"{clients:3} clients, {side:6}: a round p50 {numbers['p50_s']:.3f} s, p95 {numbers['p95_s']:.3f} s; "
            f"CPU {numbers['cpu_s']:.2f} s ({parts})",
            flush=True,
        )
    return found


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    rounds_s = sorted(seconds for turn in turns for seconds in turn["rounds_s"])
    return {
        "p50_s": statistics.median(rounds_s),
        "p95_s": rounds_s[int(0.95 * (len(rounds_s) - 1))],
        "cpu_s": statistics.median(turn["cpu_s"] for turn in turns),
        "parts": {name: statistics.median(turn["parts"][name] for turn in turns) for name in turns[0]["parts"]},
        "turns": turns,
    }


def _fleet(clients: int, rounds: int) -> dict[str, Any]:
    """Let a fleet do so many rounds, and return what each took and what all cost."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(open_broker(log=logging.getLogger("bench")))
        assert broker.pid is not None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _installed(folder / "package")}
        total = rounds + LEFT_OUT + 1
        server = aggregator_command(
            folder / "aggregator", FLEET, clients=clients, rounds=total, method="idle", task=(), preset="tiny", seed=0
        )
        commands = {"aggregator": server}
        for index in range(clients):
            source = _pictures(folder / f"pictures-{index}", rounds=total + 1)
            commands[f"cam-{index}"] = client_command(folder / f"cam-{index}", FLEET, source)
        processes = {
            name: stack.enter_context(_started([*command, "--broker", broker.url], folder / f"{name}.log", environment))
            for name, command in commands.items()
        }
        pids = {"broker": broker.pid, **{name: process.pid for name, process in processes.items()}}
        return _watched(folder / "aggregator" / JOURNAL, pids, rounds)


def _pictures(folder: Path, rounds: int) -> str:
    """Lay out two pictures for each round; returns the source that reads them."""
    for name in ("bag", "coat"):
        (folder / name).mkdir(parents=True)
        for index in range(rounds):
            image = np.full((28, 28), index % 256, np.uint8)
            cv2.imwrite(str(folder / name / f"{index}.png"), image)
    return f"folder://{folder}?per_round=2&rate=0.1"


def _watched(journal: Path, pids: dict[str, int], rounds: int) -> dict[str, Any]:
    """Wait for the rounds that count; CPU is read when the first of them begins and when the last has ended."""
    tail, ends, spent = JournalTail(journal), [], []
    deadline = time.monotonic() + LIMIT_S
    while len(ends) < rounds + LEFT_OUT:
        if time.monotonic() > deadline:
            said = (f"{log.name}\n{log.read_text('utf-8')[-4_000:]}" for log in journal.parents[1].glob("*.log"))
            raise RuntimeError("\n\n".join([f"{len(ends)} rounds, and none in {LIMIT_S:g} s", *said]))
        for event in tail.new_events():
            if event["event"] == "round committed":
                ends.append(float(event["time"]))
                deadline = time.monotonic() + LIMIT_S
                if len(ends) in {LEFT_OUT, LEFT_OUT + rounds}:
                    spent.append(_spent(pids))
        time.sleep(0.005)
    return _costs(ends, spent[0], spent[1], rounds)


def _rival(clients: int, rounds: int, python: Path) -> dict[str, Any]:
    """Let Flower do as many rounds; CPU is that of the whole run, less that of a run of those that are left out."""
    (long, spent), (_, begun) = (_rivals_run(clients, count, python) for count in (rounds + LEFT_OUT, LEFT_OUT))
    return _costs(long, begun, spent, rounds)


def _rivals_run(clients: int, rounds: int, python: Path) -> tuple[list[float], dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    words = [str(python), str(RIVAL)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "GRPC_VERBOSITY": "NONE"}
    how: dict[str, Any] = {"stderr": subprocess.DEVNULL, "env": environment}
    with contextlib.ExitStack() as stack:
        server = subprocess.Popen([*words, "server", address, str(clients), str(rounds)], stdout=subprocess.PIPE, **how)
        stack.callback(server.kill)
        _until_it_listens(port)
        others = [
            subprocess.Popen([*words, "client", address], stdout=subprocess.DEVNULL, **how) for _ in range(clients)
        ]
        for each in others:
            stack.callback(each.kill)
        assert server.stdout is not None
        said = next((line for line in server.stdout if line.startswith(b"[")), b"")
        if not said:
            raise RuntimeError("the rival's server said nothing; does its Python have flwr 1.41?")
        _, _, of_server = os.wait4(server.pid, 0)
        used = [os.wait4(each.pid, 0)[2] for each in others]
    seconds = [sum((each.ru_utime, each.ru_stime)) for each in (of_server, *used)]
    return json.loads(said), {"server": seconds[0], **{f"cam-{index}": s for index, s in enumerate(seconds[1:])}}


def _until_it_listens(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError("the rival's server never listened; does its Python have flwr 1.41?")


def _costs(ends: list[float], before: dict[str, float], after: dict[str, float], rounds: int) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for name in after:
        part = "clients" if name.startswith("cam-") else name.partition(" ")[0]
        parts[part] = parts.get(part, 0.0) + (after[name] - before.get(name, 0.0)) / rounds
    ends = ends[LEFT_OUT - 1 :]
    return {
        "rounds_s": [later - sooner for sooner, later in itertools.pairwise(ends)],
        "cpu_s": sum(parts.values()),
        "parts": parts,
    }


def _spent(pids: dict[str, int]) -> dict[str, float]:
    """Return CPU seconds so far: of each process beside its children, of training and of models by their client."""
    spent: dict[str, float] = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        spent[name] = sum(process.cpu_times()[:4])  # those that ended are in it, or in the fork server's
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                part = "training" if _TRAINER in child.cmdline() else "models" if name.startswith("cam-") else name
                key = name if part == name else f"{part} {name}"
                spent[key] = spent.get(key, 0.0) + sum(child.cpu_times()[:4])
    return spent


def _installed(folder: Path) -> str:
    """Lay out a package with the method that trains nothing, as pip does; returns what PYTHONPATH becomes."""
    information = folder / "idle_method-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "idle_method.py", folder)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: idle_method\nVersion: 1.0\n", encoding="utf-8")
    entry = "[replayfleet.methods]\nidle = idle_method:Idle\n"
    (information / "entry_points.txt").write_text(entry, encoding="utf-8")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@contextlib.contextmanager
def _started(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    program = str(Path(sys.executable).with_name(command[0]))
    with (
        log.open("wb") as file,
        subprocess.Popen([program, *command[1:]], stderr=file, stdout=file, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    run(measure, __doc__, clients=([2, 10], "how many"), rival_python=None, rounds=30, repeats=1)
