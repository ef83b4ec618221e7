"""A simulator gets its settings back however its ticking client ends: real processes, a stand-in for CARLA."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.cameras.carla_guard import PATIENCE_S, Duty, Guard

TESTS = Path(__file__).resolve().parents[1]
WAITING_S = 30.0


class Drive:
    """A driver process and what it leaves behind."""

    def __init__(self, folder: Path, how: str) -> None:
        (folder / "carla.py").write_text(
            "import sys\nfrom support import carla_double\nsys.modules['carla'] = carla_double\n"
        )
        self.state = folder / "simulator.json"
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS), str(TESTS.parent)]),
            "CARLA_DOUBLE_STATE": str(self.state),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.carla_driver", how],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "driving\n"

    @property
    def now(self) -> dict[str, Any]:
        return json.loads(self.state.read_text())

    @property
    def left_as_found(self) -> bool:
        settings = self.now["settings"]
        return (
            settings["synchronous_mode"] is False and settings["fixed_delta_seconds"] is None and not self.now["actors"]
        )

    def wait_until_restored(self) -> None:
        until = time.monotonic() + WAITING_S
        while not self.left_as_found:
            assert time.monotonic() < until, self.now
            time.sleep(0.05)


@contextlib.contextmanager
def driving(folder: Path, how: str) -> Iterator[Drive]:
    drive = Drive(folder, how)
    try:
        assert drive.now["settings"]["synchronous_mode"] is True
        assert len(drive.now["actors"]) == 5
        yield drive
    finally:
        drive.process.kill()
        drive.process.communicate()


def test_a_service_that_is_told_to_stop_restores_by_itself(tmp_path: Path):
    with driving(tmp_path, "stopped-by-signals") as drive:
        drive.process.send_signal(signal.SIGTERM)
        output, errors = drive.process.communicate(timeout=WAITING_S)
        assert output == "ended stopped\n"
        assert drive.left_as_found, "before the process ended"
        assert "went without restoring" not in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_a_guard_that_restores(tmp_path: Path, number: signal.Signals):
    with driving(tmp_path, "until-killed") as drive:
        drive.process.send_signal(number)
        assert drive.process.wait(WAITING_S) == -number
        drive.wait_until_restored()
        assert "carla client went without restoring" in drive.process.communicate(timeout=WAITING_S)[1]


def test_a_process_whose_calls_deadlock_lives_on_and_its_guard_restores(tmp_path: Path):
    with driving(tmp_path, "deadlock") as drive:
        assert drive.process.stdout is not None
        assert "not even a time-out" in drive.process.stdout.readline()
        drive.wait_until_restored()
        assert drive.process.poll() is None


def test_a_guard_leaves_a_world_alone_that_somebody_else_ticks_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with driving(tmp_path, "until-killed") as drive:
        for name in ("PYTHONPATH", "CARLA_DOUBLE_STATE"):
            monkeypatch.setenv(name, drive.environment[name])
        guard = Guard()
        before = {"synchronous_mode": False, "fixed_delta_seconds": None, "no_rendering_mode": False}
        guard.promise(Duty("127.0.0.1", 2000, drive.now["episode"], before, ()))
        frame = drive.now["frame"]
        guard.abandon()
        assert guard._process.wait(WAITING_S) == 0
        assert drive.now["settings"]["synchronous_mode"] is True
        assert drive.now["frame"] > frame


def test_a_guard_leaves_another_episode_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with driving(tmp_path, "until-killed") as drive:
        for name in ("PYTHONPATH", "CARLA_DOUBLE_STATE"):
            monkeypatch.setenv(name, drive.environment[name])
        drive.process.kill()
        drive.wait_until_restored()
        settings = {**drive.now["settings"], "synchronous_mode": True}
        drive.state.write_text(json.dumps({**drive.now, "episode": 8, "settings": settings, "actors": [99]}))
        guard = Guard()
        guard.promise(Duty("127.0.0.1", 2000, 7, {**settings, "synchronous_mode": False}, (99,)))
        guard.abandon()
        assert guard._process.wait(WAITING_S) == 0
        assert drive.now["settings"]["synchronous_mode"] is True
        assert drive.now["actors"] == [99]


def test_a_guard_that_is_released_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "carla.py").write_text(f"raise SystemExit('imported {PATIENCE_S}')")
    guard = Guard()
    guard.promise(Duty("127.0.0.1", 2000, 7, {}, (1, 2)))
    guard.release()
    assert guard._process.returncode == 0
