"""``edge-client`` as operators meet it: a process, its one line, its exit code, and a kill in the middle of a round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from support.client_world import TASK, World, events

from replayfleet.devices.profiles import TENSORRT
from replayfleet.devices.providers import try_provider
from replayfleet.edge_client.cli import main
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.ports import free_port
from tests.support.waiting import until

GOOD = {"broker": "mqtt://127.0.0.1:1", "client-id": "cam-0", "source": "folder://images", "data-dir": "data"}

Spawn = Callable[[list[str]], subprocess.Popen[bytes]]


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from replayfleet.edge_client.cli import main; main()", *words]


def start_words(**changes: str) -> list[str]:
    options = GOOD | {key.replace("_", "-"): value for key, value in changes.items()}
    return ["start", *(word for key, value in options.items() for word in (f"--{key}", value))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with images of the fleet's classes, in which commands run."""
    rng = np.random.default_rng(0)
    for name in TASK.class_names[:2]:
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for index in range(40):
            pixels = np.clip(rng.normal(200 if name == "bright" else 50, 20, (28, 28)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / f"{index}.png"), pixels)
    return tmp_path


def run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=place, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(try_provider(TENSORRT).works, reason="this machine has a usable TensorRT")
def test_a_required_provider_that_does_not_compute_stops_the_start(place: Path) -> None:
    done = run(start_words(require_provider="tensorrt"), place)
    assert done.returncode == 2
    assert done.stderr.startswith("edge-client: --require-provider tensorrt: ")
    assert done.stderr.count("\n") == 1
    assert not (place / "data").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "jetsen"}, "unknown device 'jetsen'; did you mean 'jetson'?"),
        ({"require_provider": "--stay"}, "--require-provider takes one of tensorrt, cuda, cpu, not '--stay'"),
        ({"source": "folder://nowhere"}, "source folder 'nowhere' doesn't exist"),
        ({"source": "dataset://fashion-mnist?scenario=gradul"}, "did you mean 'gradual'?"),
        ({"client_id": "cam 0"}, "client id"),
        ({"broker": "mqtt://example.org"}, "not encrypted"),
        ({"broker": "http://localhost"}, "expected mqtts://host:port"),
        ({"sampler": "onx"}, "--sampler is 'onx', expected onnx or eager"),
        ({"password_file": "nothing"}, "can't be read"),
        ({"teacher": "none.onnx", "source": "camera://0"}, "--teacher none.onnx: there is no such file"),
        ({"config": "edge.toml"}, "edge.toml: unknown key 'frame_rat'"),
        ({"data_dir": "images/dark/0.png"}, "not a folder"),
        ({"threads": "many"}, "--threads is 'many', expected a whole number, 0 to 1024"),
    ],
)
def test_bad_input_gives_one_clear_line_and_writes_nothing(
    changes: dict[str, str],
    message: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "edge.toml").write_text("frame_rat = 3\n")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["edge-client", *start_words(**changes)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not (place / "data").exists()


def test_help_imports_neither_torch_nor_onnx(place: Path) -> None:
    heavy = "{'torch', 'onnx', 'onnxruntime'}"
    code = (
        "import sys\nfrom replayfleet.edge_client.cli import main\n"
        f"try: main()\nfinally: print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, "start", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_status_of_a_folder_where_nothing_ran_is_one_line(place: Path) -> None:
    done = run(["status", "--data-dir", "data"], place)
    assert done.returncode == 2
    assert "no client has run there" in done.stderr


def test_without_a_broker_the_client_says_so_goes_on_trying_and_stops_at_once(place: Path) -> None:
    words = start_words(broker=f"mqtt://127.0.0.1:{free_port()}")
    process = subprocess.Popen(command(*words), cwd=place, stderr=subprocess.PIPE)
    status = place / "data" / "status.json"
    until(lambda: status.exists() and "connecting" in json.loads(status.read_text())["broker"])
    taken = run(start_words(), place)
    assert taken.returncode == 2
    assert f"in use by process {process.pid}" in taken.stderr
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"WARNING broker state=" in errors
    assert b"stopped before the run was finished" in errors


def trains(pid: int) -> bool:
    """Whether a client has handed a round's samples to its training process, in a file that is in memory alone."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(entry.readlink()))
    return any(link.startswith("/memfd:round-data") for link in links)


@pytest.fixture
def spawn(place: Path) -> Iterator[Spawn]:
    """Start processes that never outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(words, cwd=place))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=60)


class MqttWorld(World):
    """The aggregator in this process, its clients as processes, mosquitto between them."""

    url = ""

    def _connect(self, client_id: str, on_message: Any, will: Any) -> Any:
        return MqttSession(self.url, client_id, on_message=on_message, will=will, clean=will is None)


@pytest.fixture
def mqtt_world(place: Path, request: pytest.FixtureRequest) -> Iterator[MqttWorld]:
    if shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") is None:
        pytest.skip("no mosquitto on this machine")
    options = getattr(request, "param", {"num_clients": 1, "num_rounds": 2})
    with open_broker(log=logging.getLogger(__name__)) as broker:
        MqttWorld.url = broker.url
        world = MqttWorld(place, **options)
        yield world
        world.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mqtt_world", [{"num_clients": 2, "num_rounds": 3, "deadline_s": 10.0}], indirect=True)
def test_a_round_goes_on_at_its_deadline_without_a_killed_client_which_then_catches_up(
    mqtt_world: MqttWorld, place: Path, spawn: Spawn
) -> None:
    words = command(*start_words(broker=mqtt_world.url, source="folder://images?per_round=16&rate=10"))
    process = spawn(words)
    mqtt_world.start_client("cam-1", 1)
    mqtt_world.until(lambda: trains(process.pid))
    process.kill()
    process.wait(timeout=60)
    mqtt_world.until(lambda: events(mqtt_world, "round committed") != [])
    (closed,) = events(mqtt_world, "round closed")
    assert closed["round"] == 0
    assert {entry["client"] for entry in events(mqtt_world, "upload accepted") if entry["round"] == 0} == {"cam-1"}

    mqtt_world.aggregator.stop()  # from here on a busy machine may take its time
    patient = dataclasses.replace(mqtt_world.fleet.rules, deadline_s=200.0)
    mqtt_world.fleet = dataclasses.replace(mqtt_world.fleet, rules=patient)
    mqtt_world.aggregator = mqtt_world.start_aggregator()
    again = spawn(words)
    mqtt_world.until(lambda: again.poll() is not None, limit_s=200.0)
    assert again.returncode == 0
    later = {entry["round"] for entry in events(mqtt_world, "upload accepted") if entry["client"] == "cam-0"}
    assert later
    assert later <= {1, 2}
    assert [entry["round"] for entry in events(mqtt_world, "round committed")] == [0, 1, 2]


@pytest.mark.timeout(600)
def test_a_client_killed_in_the_middle_of_its_round_comes_back_and_continues(
    mqtt_world: MqttWorld, place: Path, spawn: Spawn
) -> None:
    words = command(*start_words(broker=mqtt_world.url, source="folder://images?per_round=16&rate=10"))
    status = place / "data" / "status.json"
    process = spawn(words)
    mqtt_world.until(lambda: trains(process.pid))  # round 0
    written = {path.name for path in (place / "data").iterdir()}
    assert written <= {
        "fleet.json",
        "lock",
        "status.json",
        ".status.json",
        "blobs",
        "keys",
        "state",
        "trust",
        "folder-rounds",
    }, "no sample lies on disk"
    maps = Path(f"/proc/{process.pid}/maps")
    assert not maps.exists() or "libtorch" not in maps.read_text(), "a device serves without torch"
    process.kill()
    process.wait(timeout=60)
    (begun,) = (json.loads(entry.read_text()) for entry in (place / "data" / "folder-rounds").iterdir())
    assert events(mqtt_world, "upload accepted") == []

    again = spawn(words)
    mqtt_world.until(lambda: again.poll() is not None, limit_s=200.0)
    assert again.returncode == 0
    accepted = [(entry["round"], entry["client"]) for entry in events(mqtt_world, "upload accepted")]
    assert accepted == [(0, "cam-0"), (1, "cam-0")]
    ledger = sorted((place / "data" / "folder-rounds").iterdir())
    assert json.loads(ledger[0].read_text()) == begun, "round 0 was trained on the batch that it had begun with"
    used = [set(json.loads(entry.read_text())) for entry in ledger]
    assert [len(names) for names in used] == [16, 16]
    assert not used[0] & used[1]
    final = json.loads(status.read_text())
    assert (final["phase"], final["round"]) == ("finished", 2)
