"""A real client process in an environment of the test's choice, which serves a real download."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.client_world import World
from support.image_sets import write_fashion_mnist

from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.federation.wire.transport.mqtt import MqttSession

NOT_ON_A_DEVICE = ("torch", "torchvision", "onnx", "onnxscript", "cv2", "matplotlib", "rich")
"""What the base install and ONNX Runtime don't bring."""

NUM_FRAMES = 20
LIMIT_S = 150.0


_HOOK = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        # As if it weren't installed, for who asks first (importlib.util.find_spec) and who just imports alike.
        hidden = name in {names!r} or name.partition(".")[0] in {names!r}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Read by every Python that is started as ``sitecustomize``: a client and the processes that it starts."""


def hide(names: Sequence[str], folder: Path) -> str:
    """Return an entry of PYTHONPATH under which these packages can't be imported."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HOOK.format(names=tuple(names)))
    return str(folder)


class MqttWorld(World):
    """An aggregator in this process, at a real broker."""

    url = ""

    def _connect(self, client_id: str, on_message: Any, will: Any) -> Any:
        return MqttSession(self.url, client_id, on_message=on_message, will=will, clean=will is None)


DATASET = "dataset://fashion-mnist?samples=2&rate=50"


def serve(
    command: Sequence[str], environment: Mapping[str, str], place: Path, *, source: str = DATASET
) -> dict[str, Any]:
    """Run ``edge-client start`` until it has answered frames with a model that came over MQTT; returns its status.

    Args:
        command: ``edge-client`` in the environment under test.
        environment: of the process, on top of this one's.
        place: the current folder of the process; nothing in it is named like what is written here.
        source: what it looks at.
    """
    data, log = place / "data", place / "client.log"
    write_fashion_mnist(place / "images", train_per_class=12, test_per_class=12)
    with open_broker(log=logging.getLogger(__name__)) as broker:
        MqttWorld.url = broker.url
        world = MqttWorld(place, num_clients=1, task=TASKS["fashion-mnist"])
        process = None
        try:
            words = [
                *(*command, "start", "--device", "cpu", "--broker", broker.url, "--client-id", "cam-1", "--data-dir"),
                *(str(data), "--source", source, "--data-root"),
                str(place / "images"),
            ]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    words, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, cwd=place
                )
            deadline = time.monotonic() + LIMIT_S
            while (status := status_of(data)).get("frames", 0) < NUM_FRAMES:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                world.pump()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            if process is not None:
                process.terminate()
                process.wait(30)
            world.close()
    assert "libtorch" not in maps
    assert "onnxruntime" not in maps, "models answer in processes of their own"
    return {**status, "log": log.read_text()}


def status_of(data: Path) -> dict[str, Any]:
    """What the client says of itself; empty before it does."""
    try:
        return dict(json.loads((data / "status.json").read_bytes()))
    except (OSError, ValueError):
        return {}


def check(status: Mapping[str, Any]) -> None:
    """Fail unless frames were answered by a downloaded model."""
    assert status["serving_version"] >= 1
    assert status["failed"] == 0
    assert status["prediction"]["version"] == status["serving_version"]
    assert status["healthy"], status
