"""The CARLA camera with its real processes and a stand-in for the simulator: pictures, faults, what is left behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.client_world import World

from replayfleet.edge_client.cameras.carla import settings as carla_settings
from replayfleet.edge_client.cameras.carla.guard import Duty, Guard
from replayfleet.edge_client.cameras.carla.settings import CarlaSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.edge_client.cameras.uri import CameraUri, parse_source
from replayfleet.edge_client.flow import Picture, Shown
from replayfleet.edge_client.sources import source_opener
from replayfleet.models.specs import TaskSpec
from tests.support.waiting import until

TESTS = Path(__file__).resolve().parents[1]
WAITING_S = 60.0
SMALL = {"width": 32, "height": 20, "fixed_step": 0.05, "rate": 20.0, "timeout_s": 0.5}


class Simulator:
    """What a simulator in a file looks like at the moment."""

    def __init__(self, state: Path) -> None:
        self.state = state

    @property
    def now(self) -> dict[str, Any]:
        return json.loads(self.state.read_text())

    @property
    def synchronous(self) -> bool:
        return self.now["settings"]["synchronous_mode"]

    @property
    def left_as_found(self) -> bool:
        settings = self.now["settings"]
        return (
            settings["synchronous_mode"] is False and settings["fixed_delta_seconds"] is None and not self.now["actors"]
        )

    def wait_until_restored(self) -> None:
        until(lambda: self.left_as_found, WAITING_S, lambda: self.now)


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """A stand-in that this test's processes find as ``carla``."""
    (tmp_path / "carla.py").write_text(
        "import sys\nfrom support import carla_double\nsys.modules['carla'] = carla_double\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TESTS), str(TESTS.parent)]))
    monkeypatch.setenv("CARLA_DOUBLE_STATE", str(tmp_path / "simulator.json"))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return Simulator(tmp_path / "simulator.json")


@contextlib.contextmanager
def driver(how: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own with a camera."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.carla_driver", how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "driving\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_pictures_come_with_boxes_and_the_town_and_nothing_is_left_behind(simulator: Simulator):
    camera = SupervisedCamera(CarlaSettings(**SMALL, town="Town03"), "front")
    stop, taken = threading.Event(), []
    for picture in camera.pictures(stop):
        taken.append(picture)
        if len(taken) == 4:
            assert simulator.synchronous
            assert len(simulator.now["actors"]) == 3
            stop.set()
    assert [picture.frame_id for picture in taken] == sorted({picture.frame_id for picture in taken})
    assert {(picture.camera, picture.size, picture.place) for picture in taken} == {("front", (32, 20), "Town03")}
    assert all(picture.boxes is not None and len(picture.boxes) == 0 for picture in taken)
    assert all(0 <= time.monotonic() - picture.captured_at < WAITING_S for picture in taken)
    assert simulator.left_as_found
    assert "carla" not in sys.modules, "only the process that drives imports it"


def test_a_slow_reader_gets_the_newest_picture_and_the_world_goes_on(simulator: Simulator):
    pictures = SupervisedCamera(CarlaSettings(**SMALL), "front").pictures(threading.Event())
    with contextlib.closing(pictures):  # type: ignore[type-var]
        first, frame = next(pictures), simulator.now["frame"]
        time.sleep(1.0)
        assert simulator.now["frame"] > frame + 5
        second, third = islice(pictures, 2)
    assert second.frame_id > first.frame_id + 5
    assert third.captured_at - second.captured_at < 0.5


def test_frame_ids_rise_over_a_new_session(simulator: Simulator):
    camera = SupervisedCamera(CarlaSettings(**SMALL), "front")
    ids = []
    for _ in range(2):
        with contextlib.closing(camera.pictures(threading.Event())) as pictures:  # type: ignore[type-var]
            ids += [picture.frame_id for picture in islice(pictures, 2)]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("freeze", "time-out of 500ms"),
        ("deadlock", "it hung, for 3.5 s"),
        ("crash", "its process was ended by SIGSEGV"),
    ],
)
def test_a_fault_is_a_loss_within_bounded_time_settings_are_put_back_and_the_camera_returns(
    simulator: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    reason: str,
):
    monkeypatch.setenv("CARLA_DOUBLE_FAULT", fault)
    monkeypatch.setattr(carla_settings, "GRACE_S", 2.0)
    camera = SupervisedCamera(CarlaSettings(**SMALL), "front")
    stop, taken, began = threading.Event(), list[Picture](), time.monotonic()
    watching = threading.Thread(target=lambda: taken.extend(camera.pictures(stop)))
    watching.start()
    try:
        told: list[str] = []
        while not told:  # it is counted a moment before
            assert time.monotonic() - began < WAITING_S / 2
            time.sleep(0.02)
            told = [vars(record)["fields"]["reason"] for record in caplog.records if record.message == "camera lost"]
        assert camera.counts.num_lost
        assert camera.trouble.startswith("lost: ")
        assert reason in told[0]
        num_seen = len(taken)
        monkeypatch.delenv("CARLA_DOUBLE_FAULT")
        while len(taken) < num_seen + 2:
            assert time.monotonic() - began < WAITING_S
            time.sleep(0.02)
    finally:
        stop.set()
        watching.join(WAITING_S)
    ids = [picture.frame_id for picture in taken]
    assert ids == sorted(set(ids))
    simulator.wait_until_restored()


def test_a_process_that_cannot_be_started_is_a_lost_camera(simulator: Simulator, caplog: pytest.LogCaptureFixture):
    camera, stop = SupervisedCamera(CarlaSettings(**SMALL), "front", command=("/nowhere",)), threading.Event()
    watching = threading.Thread(target=lambda: list(camera.pictures(stop)))
    watching.start()
    until(lambda: camera.counts.num_lost, WAITING_S)
    stop.set()
    watching.join(WAITING_S)
    assert "No such file" in str([vars(record).get("fields") for record in caplog.records])


def test_what_its_process_logs_stands_in_the_log_of_the_client(simulator: Simulator, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with contextlib.closing(SupervisedCamera(CarlaSettings(**SMALL), "front").pictures(threading.Event())) as pictures:
        next(pictures)
    (opened,) = [vars(record)["fields"] for record in caplog.records if record.message == "carla session opened"]
    assert (opened["camera"], opened["server"]) == ("front", "127.0.0.1:2000")


def test_a_camera_says_what_it_is(simulator: Simulator):
    uri = parse_source("carla://sim?town=Town03&tick=false")
    assert isinstance(uri, CameraUri)
    camera = SupervisedCamera(uri.settings, "front")
    assert camera.describe() == (
        "carla sim:2000 Town03, vehicle.lincoln.mkz_2020, 640x380, 10 pictures/s, waits for ticks"
    )
    assert camera.live
    assert camera.class_names == ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")


def test_a_service_that_is_told_to_stop_restores_before_it_ends(simulator: Simulator):
    with driver("stopped-by-signals") as process:
        assert simulator.synchronous
        assert len(simulator.now["actors"]) == 5
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=WAITING_S)
        assert output == "ended stopped\n"
        assert simulator.left_as_found, "before the process ended"
        assert "went without restoring" not in errors


def test_when_the_service_is_killed_its_driving_process_restores(simulator: Simulator):
    with driver("until-killed") as process:
        process.kill()
        assert process.wait(WAITING_S) == -signal.SIGKILL
        simulator.wait_until_restored()
        assert "went without restoring" not in process.communicate(timeout=WAITING_S)[1]


def test_when_the_driving_process_is_killed_too_a_guard_restores(simulator: Simulator):
    with driver("until-killed") as process:
        (driving,) = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.kill(driving, signal.SIGKILL)
        simulator.wait_until_restored()
        assert "carla client went without restoring" in process.communicate(timeout=WAITING_S)[1]


def test_a_client_serves_a_simulator_beside_another_camera_and_leaves_it_as_it_was(
    simulator: Simulator, tmp_path: Path
):
    sources = [
        "car=carla://127.0.0.1:2000?town=Town03&width=32&height=20&fixed_step=0.05&rate=20&timeout_s=0.5&num_vehicles=2",
        "street=synthetic://street?rate=5",
    ]
    (tmp_path / "fleet").mkdir()
    fleet = World(tmp_path / "fleet", num_clients=1, task=TaskSpec(3, 32, ("vehicle", "bike"), generator_width=1))
    answered: set[tuple[str, str]] = set()

    def watch(shown: Shown) -> None:
        if shown.prediction is not None:
            answered.add((shown.picture.camera, shown.picture.place))

    try:
        fleet.start_client("car-0", open_source=source_opener(sources, tmp_path), watchers=[watch])
        fleet.until(lambda: answered == {("car", "Town03"), ("street", "sunny")})
        assert simulator.synchronous
        assert len(simulator.now["actors"]) == 5
    finally:
        fleet.close()
    simulator.wait_until_restored()


def test_a_guard_leaves_a_world_alone_that_somebody_else_ticks_by_now(simulator: Simulator):
    with driver("until-killed"):
        frame = simulator.now["frame"]
        guard = Guard()
        before = {"synchronous_mode": False, "fixed_delta_seconds": None, "no_rendering_mode": False}
        guard.promise(Duty("127.0.0.1", 2000, simulator.now["episode"], before, ()))
        guard.abandon()
        assert guard._process.wait(WAITING_S) == 0
        assert simulator.synchronous
        assert simulator.now["frame"] > frame


def test_a_guard_leaves_another_episode_alone(simulator: Simulator):
    settings = {"synchronous_mode": True, "fixed_delta_seconds": 0.05, "no_rendering_mode": False}
    simulator.state.write_text(json.dumps({"settings": settings, "frame": 3, "episode": 8, "actors": [99]}))
    guard = Guard()
    guard.promise(Duty("127.0.0.1", 2000, 7, {**settings, "synchronous_mode": False}, (99,)))
    guard.abandon()
    assert guard._process.wait(WAITING_S) == 0
    assert simulator.synchronous
    assert simulator.now["actors"] == [99]


def test_a_guard_that_is_released_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "carla.py").write_text("raise SystemExit('imported')")
    guard = Guard()
    guard.promise(Duty("127.0.0.1", 2000, 7, {}, (1, 2)))
    guard.release()
    assert guard._process.returncode == 0
