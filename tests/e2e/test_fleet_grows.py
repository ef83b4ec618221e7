"""A running fleet of real processes that began with a simulation's model learns a class more, as an operator would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayfleet.federation.children import child_command
from replayfleet.federation.wire.transport.broker import find_mosquitto
from tests.support.mosquitto import mosquitto

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
    """Its processes; each logs to a file of its own."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.folder, self.broker = folder, broker
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            line = child_command(module, *map(str, words), "--broker", self.broker)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(line, stdout=log, stderr=log, env=environment)

    def serve(self, *more: object) -> None:
        words = (
            "--method",
            "fedavg",
            "--settings",
            "tiny",
            "--set",
            "local_epochs=4",
            "--task",
            self.folder / "task.toml",
        )
        self.start("aggregator", "replayfleet.aggregator.cli", "serve", "--clients", 2, *words, *self.place, *more)

    @property
    def place(self) -> tuple[object, ...]:
        return "--data-dir", self.folder / "aggregator"

    def stop(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    def predictions(self, client: str) -> list[dict[str, Any]]:
        found = re.findall(r"health=(\S+)", (self.folder / f"{client}.log").read_text())
        if not found:
            return []
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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        made = Fleet(tmp_path, f"mqtt://127.0.0.1:{port}")
        yield made
        for name in [*made.running]:
            made.stop(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto on this machine")
def test_a_first_model_is_given_and_a_class_is_added_while_devices_run(fleet: Fleet) -> None:
    folder = fleet.folder
    (folder / "task.toml").write_text(TASK)
    first = pictures(folder / "data" / "first", "red", "blue", count=100)
    simulated = (
        "--dataset",
        "folder",
        "--data-root",
        first,
        "--image-size",
        32,
        "--model",
        "lenet",
        "--settings",
        "tiny",
    )
    sizes = ("--clients", 2, "--rounds", 2, "--set", "local_epochs=4")
    command("replayfleet.federation.simulator.cli", "fedavg", *simulated, *sizes, "--out", folder / "run")
    exported = folder / "first.onnx"
    code = "import sys; from replayfleet.cli import model_export; sys.argv[0] = 'model-export'; model_export()"
    words = ["task", "--from", folder / "run", "--client", "0", "--split", "--out", exported]
    line = [child_command("x")[0], "-c", code, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    fleet.serve("--initial", exported.with_suffix(".safetensors"))
    roads = {name: pictures(folder / name / "pictures", "red", "blue") for name in ("cam-0", "cam-1")}
    for name, road in roads.items():
        words = [
            "--client-id",
            name,
            "--data-dir",
            folder / name / "data",
            "--source",
            f"folder://{road}?per_round=24&rate=10",
        ]
        fleet.start(name, "replayfleet.edge_client.cli", "start", *words)
    # The model that was given answers before the fleet has learned anything.
    fleet.until(lambda: all(fleet.predictions(name) for name in roads))
    fleet.until(lambda: fleet.committed() >= 1)

    fleet.stop("aggregator")
    said = command("replayfleet.aggregator.cli", "add-class", "green", *fleet.place, "--yes")
    assert "3 classes" in said
    before = {name: fleet.running[name].pid for name in roads}
    assert all(fleet.predictions(name) for name in roads)  # they serve on meanwhile
    for road in roads.values():
        pictures(road, "green")
    fleet.serve()
    fleet.until(lambda: all("the fleet learns more classes" in fleet.log(name) for name in roads))
    fleet.until(lambda: all(any(one["class"] == "green" for one in fleet.predictions(name)) for name in roads))
    assert {name: fleet.running[name].pid for name in roads} == before
    assert all("Traceback" not in fleet.log(name) for name in fleet.running)
