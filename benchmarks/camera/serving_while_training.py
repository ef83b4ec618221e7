"""Serving beside training, as an operator starts it: ``edge-client start`` on two cores, 30 frames a second.

A broker, an aggregator and one client, all through their command lines, and a data set of noise that is made on the
spot, so that nothing but the machine counts. The round's deadline ends the training; the fleet's second client never
comes, so after it the client serves and waits. Latencies are from capture to answer, as the client itself tells them,
of its newest thousand frames: of 34 s at this rate, so phases should last at least 40 s.

Bounds: p95 while training at most twice its idle value, p99 at most 150 ms; idle at most a tenth of a core and 350 MB,
without torch imported 150 MB. An idle client has no process with torch: the training process ends seconds after its
round, and what all take together until then is told as ``waiting_mb``. Memory is the sum over the client's processes,
what they share counted once (PSS).

    python -m benchmarks.camera.serving_while_training [--seconds 60]
        [--out benchmarks/results/serving_while_training.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import cpu_s, run
from replayfleet.edge_client.learning.local_training import IDLE_S
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.scripts.launch.processes import Child, Children
from tests.support.image_sets import idx_bytes

NUM_CORES = 2
SAMPLES = 200
PATIENCE_S = 180.0

BOUNDS = {
    "p95 while training against idle": 2.0,
    "p99 while training, ms": 150.0,
    "idle cores": 0.1,
    "idle MB": 150.0,
}


def fleet(seconds: float, rate_hz: float, method: str, device: str = "cpu") -> dict[str, Any]:
    """Run the three phases; returns the numbers and which bounds they meet. ``device``: that serves and trains."""
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    os.sched_setaffinity(0, cores)  # inherited by all that is started here
    with tempfile.TemporaryDirectory() as name, open_broker(log=logging.getLogger(__name__)) as broker:
        folder = Path(name)
        write_noise(folder / "data")
        with Children(folder) as children:
            children.start("aggregator", aggregator_command(broker.url, folder, seconds, method))
            with socket.create_server(("127.0.0.1", 0)) as listener:  # free again at the end of the block
                port = int(listener.getsockname()[1])
            child = children.start("client", client_command(broker.url, folder, rate_hz, port, device))
            client = Observed(child, port)
            found = phases(client, seconds)
    told = {"cores": cores, "seconds": seconds, "rate_hz": rate_hz, "method": method, "device": device}
    return told | found


def phases(client: Observed, seconds: float) -> dict[str, Any]:
    """Return what was measured while training, right after it, and once the training process had ended."""
    client.until(lambda status: status["phase"] == "training in progress" and status["frames"] > 0)
    client.until(lambda status: status["training"] != "")  # torch is imported, steps are taken
    training = client.observed_for(seconds)
    if training["phase"] != "training in progress":
        raise RuntimeError("training ended before its phase did; give it more --seconds")
    client.until(lambda status: status["phase"] != "training in progress")
    time.sleep(2.0)  # the upload
    waiting_mb = client.memory_mb()
    time.sleep(IDLE_S)
    client.until(lambda status: status["trainer_pid"] is None)
    idle = client.observed_for(seconds)
    measured = {
        "p95 while training against idle": training["latency_p95_s"] / idle["latency_p95_s"],
        "p99 while training, ms": 1000 * training["latency_p99_s"],
        "idle cores": sum(idle["cores"].values()),
        "idle MB": sum(idle["memory_mb"].values()),
    }
    return {
        "training": training,
        "waiting_mb": waiting_mb,
        "idle": idle,
        "bounds": {
            name: {"measured": value, "at_most": BOUNDS[name], "met": value <= BOUNDS[name]}
            for name, value in measured.items()
        },
    }


class Observed:
    """A running client, seen from outside: its health endpoint, and ``/proc`` of it and its children.

    Args:
        child: the client's process.
        port: of its health endpoint.
    """

    def __init__(self, child: Child, port: int) -> None:
        self._child = child
        self._url = f"http://127.0.0.1:{port}/healthz"

    def status(self) -> dict[str, Any]:
        """Return what it says of itself; empty until it answers."""
        try:
            with urllib.request.urlopen(self._url, timeout=5) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))  # not healthy, but well
        except OSError:
            return {}

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a status.

        Raises:
            RuntimeError: It doesn't come.
        """
        end = time.monotonic() + PATIENCE_S
        while not ("serving_version" in (status := self.status()) and holds(status)):
            if self._child.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the client doesn't come that far: {status}\n{self._child.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def observed_for(self, seconds: float) -> dict[str, Any]:
        """Return latencies, CPU and memory of its processes over so many seconds, which it isn't asked anything in."""
        before, began = self.cpu(), time.monotonic()
        time.sleep(seconds)
        elapsed, after, status = time.monotonic() - began, self.cpu(), self.status()
        return {
            "phase": status["phase"],
            "latency_p95_s": status["latency_p95_s"],
            "latency_p99_s": status["latency_p99_s"],
            "frames": status["frames"],
            "dropped": status["dropped"],
            "failed": status["failed"],
            "training": status["training"],
            "cores": {name: (after[name] - used) / elapsed for name, used in before.items() if name in after},
            "memory_mb": self.memory_mb(),
        }

    def processes(self) -> dict[str, psutil.Process]:
        """Return module or command with pid -> process, of the client and all that it started."""
        client = psutil.Process(self._child.process.pid)
        return {f"{_name(one.cmdline())} {one.pid}": one for one in (client, *client.children(recursive=True))}

    def cpu(self) -> dict[str, float]:
        """Return seconds of CPU by process."""
        return {name: cpu_s(one.pid) for name, one in self.processes().items()}

    def memory_mb(self) -> dict[str, float]:
        """Return PSS by process."""
        return {name: one.memory_full_info().pss / 1e6 for name, one in self.processes().items()}


def aggregator_command(broker: str, folder: Path, seconds: float, method: str) -> list[str]:
    """Return a command of a fleet whose rounds take as long as their deadline lets them."""
    command = ["aggregator", "serve", "--broker", broker, "--data-dir", str(folder / "aggregator")]
    command += ["--clients", "2", "--min-clients", "2", "--deadline-s", str(1.6 * seconds + 30), "--method", method]
    overrides = {"local_epochs": 20_000}
    if method == "pfedgrp":
        overrides |= {"sub_generator_epochs": 20_000, "first_sub_generator_epochs": 20_000}
    return [*command, *(word for key, value in overrides.items() for word in ("--set", f"{key}={value}"))]


def client_command(broker: str, folder: Path, rate_hz: float, port: int, device: str) -> list[str]:
    """Return the public command."""
    source = f"dataset://fashion-mnist?clients=1&client=0&rounds=2&samples={SAMPLES}&rate={rate_hz:g}"
    command = ["edge-client", "start", "--device", device, "--broker", broker, "--client-id", "bench"]
    command += ["--training-device", device]
    if device != "cpu":
        command += ["--require-provider", device]
    command += ["--source", source, "--data-dir", str(folder / "client"), "--data-root", str(folder / "data")]
    return [*command, "--health-port", str(port)]


def write_noise(folder: Path) -> None:
    """Write the four files of Fashion-MNIST with noise in them."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, per_class in (("train", 2 * SAMPLES), ("t10k", 10)):
        labels = np.tile(np.arange(10, dtype=np.uint8), per_class)
        images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(idx_bytes(array))


def _name(words: list[str]) -> str:
    if "-c" in words:  # a child of ours: the code, then the module that it runs
        return words[words.index("-c") + 2]
    return words[words.index("-m") + 1] if "-m" in words else Path(words[1] if len(words) > 1 else words[0]).name


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result = fleet(options.seconds, options.rate, options.method, options.device)
    for phase in ("training", "idle"):
        found = result[phase]
        print(f"{phase:>10}: p95 {1e3 * found['latency_p95_s']:.1f} ms, p99 {1e3 * found['latency_p99_s']:.1f} ms")
        for name, share in found["cores"].items():
            print(f"{'':>12}{name:<40} {share:5.2f} cores {found['memory_mb'].get(name, 0.0):6.0f} MB")
    for name, bound in result["bounds"].items():
        print(
            f"{name:>36}: {bound['measured']:7.2f}  at most {bound['at_most']:g}  {'met' if bound['met'] else 'MISSED'}"
        )
    return result


if __name__ == "__main__":
    run(measure, __doc__, seconds=60.0, rate=30.0, method=("pfedgrp", "of the fleet"), device=("cpu", "or cuda"))
