"""Live cameras in their own processes: a real RTSP server read by the real FFMPEG, and a device that is a double.

Devices are doubled at ``cv2.VideoCapture`` (``support/doubled_device_worker.py``), in a real capture process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.rtsp_server import FAILURES, RED, RtspServer, number_in

from replayfleet.edge_client.cameras.live.device import DeviceCameraSettings
from replayfleet.edge_client.cameras.live.opencv import has_backend
from replayfleet.edge_client.cameras.live.rtsp import RtspCameraSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
from replayfleet.edge_client.cameras.live.wire import CameraJob, Lost, WorkerProcess
from replayfleet.edge_client.flow import CameraError, Picture
from tests.support.processes import is_gone
from tests.support.waiting import until

TESTS = Path(__file__).parents[1]
WITHIN_S = 5.0
"""Of a camera's return."""

IMPATIENT = {"open_timeout_s": 1.5, "read_timeout_s": 1.0}
"""Spares the test time; silence is tested with the defaults."""

needs_ffmpeg = pytest.mark.skipif(not has_backend("FFMPEG"), reason="this OpenCV reads no streams")


class Watched:
    """A camera, and all that it delivered, on a thread of its own."""

    def __init__(self, camera: SupervisedCamera, pause_s: float = 0.0) -> None:
        self.camera = camera
        self.pictures: list[Picture] = []
        self.ages: list[float] = []
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def _watch(self) -> None:
        for picture in self.camera.pictures(self._stop):
            self.ages.append(time.monotonic() - picture.captured_at)
            self.pictures.append(picture)
            time.sleep(self._pause_s)

    def wait_for(self, num: int, limit_s: float = 60.0) -> None:
        """Wait for so many pictures more."""
        wanted = len(self.pictures) + num
        until(lambda: len(self.pictures) >= wanted, limit_s)

    def time_to_next(self) -> float:
        """Seconds from now to a picture that was taken after now."""
        began = time.monotonic()
        until(lambda: self.pictures[-1].captured_at >= began)
        return time.monotonic() - began


def street(server: RtspServer, **impatient: float) -> SupervisedCamera:
    return SupervisedCamera(RtspCameraSettings(server.url, **impatient), "front")  # type: ignore[arg-type]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, Any]]]:
    """The fields of all lines that say so."""
    caplog.set_level(logging.INFO)
    return lambda event: [vars(record)["fields"] for record in caplog.records if record.getMessage() == event]


@pytest.fixture
def plug(tmp_path: Path) -> Callable[[str], None]:
    def write(state: str) -> None:
        spare = tmp_path / "next"
        spare.write_text(state)
        spare.rename(tmp_path / "state")

    write("plugged")
    return write


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SupervisedCamera]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    command = (sys.executable, "-m", "support.doubled_device_worker", str(tmp_path / "state"))
    settings = DeviceCameraSettings(open_timeout_s=1.0, read_timeout_s=0.5)
    return lambda name: SupervisedCamera(settings, name, command=command)


@needs_ffmpeg
@pytest.mark.parametrize(
    ("failure", "impatient"),
    [("silent", {}), ("noise", IMPATIENT), ("damaged pictures", IMPATIENT), ("another password", {}), ("refuses", {})],
)
def test_a_stream_that_fails_is_one_line_and_is_back_within_five_seconds_of_its_return(
    failure: str,
    impatient: dict[str, float],
    lines: Callable[[str], list[dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RtspServer() as server, Watched(street(server, **impatient)) as watched:
        watched.wait_for(10)
        FAILURES[failure](server)
        until(lambda: lines("camera lost"))
        num_seen = len(watched.pictures)
        time.sleep(1.0)  # more attempts fail
        assert watched.camera.trouble.startswith("lost: ")
        assert len(watched.pictures) == num_seen
        server.come_back()
        assert watched.time_to_next() <= WITHIN_S
        watched.wait_for(5)
    assert [len(lines(event)) for event in ("camera opened", "camera lost", "camera back")] == [1, 1, 1]
    ids = [picture.frame_id for picture in watched.pictures]
    assert ids == sorted(set(ids))
    numbers = [number_in(picture.pixels) for picture in watched.pictures]
    assert numbers == sorted(set(numbers)), "a picture was shown twice"
    assert all(abs(picture.pixels[-1, -1].astype(int) - RED).max() < 8 for picture in watched.pictures)
    counts = watched.camera.counts
    assert (counts.num_captured, counts.num_lost) == (counts.num_delivered + counts.num_dropped, 1)
    assert "secret" not in caplog.text + str(lines("camera lost"))


@needs_ffmpeg
def test_a_camera_that_asks_for_another_password_says_so(lines: Callable[[str], list[dict[str, Any]]]) -> None:
    with RtspServer() as server:
        server.status = "401 Unauthorized"
        with Watched(street(server)):
            until(lambda: lines("camera lost"))
    assert "401" in lines("camera lost")[0]["reason"]
    assert lines("camera lost")[0]["source"] == f"rtsp://127.0.0.1:{server.port}/street?***"


@needs_ffmpeg
def test_a_stream_that_changes_its_size_goes_on_with_one_line(lines: Callable[[str], list[dict[str, Any]]]) -> None:
    with (
        RtspServer((320, 240)) as server,
        Watched(street(server)) as watched,
    ):
        watched.wait_for(3)
        server.size = (640, 384)
        until(lambda: watched.pictures[-1].size == (640, 384))
        watched.wait_for(3)
    assert [line["size"] for line in lines("camera changed size")] == ["640x384"]
    assert not lines("camera lost")
    assert all(number_in(picture.pixels) == picture.frame_id for picture in watched.pictures)


def test_an_unplugged_camera_is_back_when_it_is_plugged_in_and_the_other_one_never_noticed(
    plug: Callable[[str], None],
    device: Callable[[str], SupervisedCamera],
    lines: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_state = tmp_path / "other"
    other_state.write_text("plugged")
    command = (sys.executable, "-m", "support.doubled_device_worker", str(other_state))
    other = SupervisedCamera(DeviceCameraSettings(), "rear", command=command)
    with Watched(device("front")) as watched, Watched(other) as unharmed:
        watched.wait_for(5)
        unharmed.wait_for(5)
        plug("unplugged")
        until(lambda: lines("camera lost"))
        unharmed.wait_for(50)
        plug("plugged")
        assert watched.time_to_next() <= WITHIN_S
    told = [(event, line["camera"]) for event in ("camera lost", "camera back") for line in lines(event)]
    assert told == [("camera lost", "front"), ("camera back", "front")]
    assert lines("camera lost")[0]["reason"] == "its stream ended"
    assert unharmed.camera.counts.num_lost == 0


def test_a_read_that_hangs_is_killed_and_replaced(
    plug: Callable[[str], None],
    device: Callable[[str], SupervisedCamera],
    lines: Callable[[str], list[dict[str, Any]]],
) -> None:
    with Watched(device("front")) as watched:
        watched.wait_for(5)
        before = watched.camera.pid
        assert before is not None
        plug("hung")
        until(lambda: lines("camera lost"))
        assert lines("camera lost")[0]["reason"] == "it hung, for 1 s"
        assert is_gone(before)
        plug("plugged")
        assert watched.time_to_next() <= WITHIN_S
        assert watched.camera.pid not in (before, None)
    ids = [picture.frame_id for picture in watched.pictures]
    assert ids == sorted(set(ids))
    assert len(lines("camera back")) == 1


def test_nothing_is_left_behind_by_capture_processes_that_died(
    plug: Callable[[str], None], device: Callable[[str], SupervisedCamera], lines: Callable[[str], list[dict[str, Any]]]
) -> None:
    files, threads = Counter(open_files()), set(threading.enumerate())
    pids, shared = [], set()
    with Watched(device("front")) as watched:
        for _ in range(2):
            watched.wait_for(2)
            pid = watched.camera.pid
            assert pid is not None
            shared |= in_shared_memory(pid)
            os.kill(pid, signal.SIGKILL)
            until(lambda: watched.camera.pid != pid)  # noqa: B023 - called in this turn only
            pids.append(pid)
        watched.wait_for(2)
        pids.append(watched.camera.pid)
        shared |= in_shared_memory(watched.camera.pid)
    assert {line["reason"] for line in lines("camera lost")} == {"its process was ended by SIGKILL"}
    assert watched.camera.pid is None
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids), "a zombie"
    assert not Counter(open_files()) - files
    assert not [path for path in shared if path.exists()]
    assert set(threading.enumerate()) <= threads


PARENT = """
import sys, threading
from replayfleet.edge_client.cameras.live.device import DeviceCameraSettings
from replayfleet.edge_client.cameras.live.supervised import SupervisedCamera
camera = SupervisedCamera(DeviceCameraSettings(), "front", command=sys.argv[1:])
for picture in camera.pictures(threading.Event()):
    print(camera.pid, flush=True)
"""


@pytest.mark.parametrize("state", ["plugged", "hung"])
def test_a_capture_process_dies_with_its_parent_even_when_that_is_killed(
    state: str, plug: Callable[[str], None], device: Callable[[str], SupervisedCamera], tmp_path: Path
) -> None:
    worker = [sys.executable, "-m", "support.doubled_device_worker", str(tmp_path / "state")]
    with subprocess.Popen([sys.executable, "-c", PARENT, *worker], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        plug(state)
        time.sleep(0.1)
        parent.kill()
        until(lambda: is_gone(pid))


def test_a_slow_reader_gets_the_newest_picture_and_the_others_are_counted_as_dropped(
    plug: Callable[[str], None], device: Callable[[str], SupervisedCamera]
) -> None:
    with Watched(device("front"), pause_s=0.2) as watched:
        watched.wait_for(8)
    ids = [picture.frame_id for picture in watched.pictures]
    counts = watched.camera.counts
    assert counts.num_delivered == len(ids)
    assert counts.num_captured == ids[-1] + 1 == counts.num_delivered + counts.num_dropped
    assert counts.num_dropped > len(ids)
    assert sorted(watched.ages)[len(ids) // 2] < 0.15, "of pictures 20 ms apart it was given old ones"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('[rtsp @ 0x1] hello')", "unreadable line"),
        ("sys.stdout.write('x' * (2 << 20))", "a line without an end"),
        ("print(head(0, 0, 100000, 100000))", "unreadable line"),
        ("print(head(0, 0, 0, 5))", "unreadable line"),
        ("print(head(0, 1e15, 1, 1) + chr(10) + 'abc', end='')", "from the future"),
        ("print(head(0, 0, 1, 1) + chr(10) + 'abcd', end='')", "more than it announced"),
        ("print(head(0, 0, 8192, 8192) + chr(10) + 'abc', end='')", "ended with exit status 0"),
        ("print(head(0, 0, 1, 1, corners=[[2, 0, 1, 1]], class_ids=[0]) + chr(10) + 'abc', end='')", "boxes that are"),
        ("print(head(0, 0, 1, 1, corners=[[0, 0, 1, 1]], class_ids=[]) + chr(10) + 'abc', end='')", "boxes that are"),
        ("print(head(0, 0, 1, 1, corners=[[0, 0, 1, 1]], class_ids=[2**70]))", "an unreadable line"),
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.abort()", "ended by SIGABRT"),
    ],
)
def test_a_capture_process_that_lies_is_found_out(script: str, reason: str) -> None:
    prelude = "import os, sys, json\ndef head(i, t, w, h, **boxes):\n"
    prelude += "  return json.dumps(dict(type='taken', frame_id=i, captured_at=t, width=w, height=h, **boxes))\n"
    worker = WorkerProcess(CameraJob("camera", "front", {}), (sys.executable, "-S", "-c", prelude + script))
    try:
        with pytest.raises(CameraError, match=reason):
            assert worker.receive(60.0) is None
    finally:
        worker.close(kill=True)


def test_a_capture_process_computes_with_one_thread_unless_an_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "import json, os; said = dict(type='lost', reason=os.environ['OMP_NUM_THREADS'], num_captured=0)"
    script += "; print(json.dumps(said))"
    for number in ("", "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if number:
            monkeypatch.setenv("OMP_NUM_THREADS", number)
        worker = WorkerProcess(CameraJob("camera", "front", {}), (sys.executable, "-S", "-c", script))
        try:
            assert worker.receive(60.0) == Lost(number or "1", 0)
        finally:
            worker.close(kill=True)


def in_shared_memory(pid: int) -> set[Path]:
    """Files of shared memory that a process holds: other tests, and other programs, have theirs in the same folder."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            paths.add(str(entry.readlink()))
    return {Path(path) for path in paths if path.startswith("/dev/shm/")}


def open_files() -> list[str]:
    """What kinds of files this process has open."""
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            kinds.append(str(entry.readlink()).split(":", 1)[0])
    return sorted(kinds)
