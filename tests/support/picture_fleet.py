"""A fleet of real processes that learns colours from folders of pictures; each logs to a file of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from replayfleet.federation.children import child_command

BGR = {"red": (40, 40, 220), "blue": (220, 40, 40), "green": (40, 220, 40)}
TASK = """image_channels = 3
image_size = 32
class_names = ["red", "blue"]
architecture = "lenet"
"""


def pictures(folder: Path, *names: str, count: int = 400) -> Path:
    import cv2

    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            noisy = np.clip(np.array(BGR[name]) + rng.normal(0, 30, (32, 32, 3)), 0, 255)
            cv2.imwrite(str(folder / name / f"{number:03d}.png"), noisy.astype(np.uint8))
    return folder


def command(module: str, *words: object) -> str:
    done = subprocess.run(child_command(module, *map(str, words)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Fleet:
    """Its processes.

    Args:
        folder: of everything.
        broker: its address.
        method: and settings, as words of ``aggregator serve``.
    """

    def __init__(self, folder: Path, broker: str, *method: object) -> None:
        self.folder, self.broker, self.method = folder, broker, method
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "task.toml").write_text(TASK)

    def start(self, name: str, module: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            line = child_command(module, *map(str, words), "--broker", self.broker)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(line, stdout=log, stderr=log, env=environment)

    def serve(self, *more: object) -> None:
        words = (*self.method, "--task", self.folder / "task.toml")
        self.start("aggregator", "replayfleet.aggregator.cli", "serve", "--clients", 2, *words, *self.place, *more)

    def client(self, name: str, road: Path, *more: object) -> None:
        words = ("--client-id", name, "--data-dir", self.data_dir(name), *more)
        source = f"folder://{road}?per_round=24&rate=10"
        self.start(name, "replayfleet.edge_client.cli", "start", *words, "--source", source)

    @property
    def place(self) -> tuple[object, ...]:
        return "--data-dir", self.folder / "aggregator"

    def data_dir(self, client: str) -> Path:
        return self.folder / client / "data"

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        process = self.running.pop(name)
        process.send_signal(how)
        process.wait(60)

    def status(self, client: str) -> dict[str, Any]:
        """What a client wrote about itself last; nothing before."""
        path = self.data_dir(client) / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def predictions(self, client: str) -> list[dict[str, Any]]:
        found = re.findall(r"health=(\S+)", self.log(client))
        if found:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[-1]}/predictions", timeout=5) as answer:
                cameras = json.loads(answer.read())["cameras"]
                return [one for camera in cameras.values() for one in camera["answers"]]
        return []

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, done: Callable[[], bool], limit_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            gone = [name for name, process in self.running.items() if process.poll() is not None]
            assert not gone, self.log(gone[0])[-3000:]
            assert time.monotonic() < deadline, "\n".join(self.log(name)[-1500:] for name in self.running)
            time.sleep(0.2)

    def committed(self) -> int:
        return sum(event["event"] == "round committed" for event in self.events())

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "aggregator" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
