"""``make demo-carla`` in small: two vehicles as real processes over a real broker, both tasks, then the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest
from support.processes import processes_of

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "replayfleet.scripts.carla", "--fast", "--synthetic"]
VEHICLES = ("vehicle-1", "vehicle-2")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_two_vehicles_drive_learn_both_tasks_and_end_with_a_page(tmp_path: Path):
    out = tmp_path / "demo"
    done = subprocess.run(
        [*DEMO, "--out", str(out), "--time-limit-s", "800"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("SYNTHETIC: these streets are drawn.")
    assert f"report: {out / 'report.html'}" in done.stdout
    assert processes_of(out) == []

    text = (out / "report.html").read_text(encoding="utf-8")
    assert text.count("<img") == 4
    assert text.count("<svg") == 4
    assert "SYNTHETIC" in text
    for part, measure in (("crops", "accuracy"), ("detection", "boxes_found")):
        journal = (out / part / "aggregator" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in journal]
        assert [event["round"] for event in events if event["event"] == "round committed"] == [0, 1, 2]
        assert any("stream_accuracy" in event.get("metrics", {}) for event in events)
        quality = json.loads((out / part / "quality.json").read_text())
        for vehicle in VEHICLES:
            assert set(quality[vehicle]) == {"sunny", "night", "rain", "all towns"}
            assert 0 <= quality[vehicle]["all towns"][measure] <= 1
            status = json.loads((out / part / vehicle / "status.json").read_text())
            assert status["frames"] > 10
            assert status["failed"] == 0
            film = cv2.VideoCapture(str(out / "films" / f"{part}-{vehicle}.webm"))
            assert film.get(cv2.CAP_PROP_FRAME_COUNT) > 10
            film.release()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupted_drive_leaves_nothing_running(tmp_path: Path):
    out = tmp_path / "demo"
    status = out / "crops" / "vehicle-2" / "status.json"
    with subprocess.Popen([*DEMO, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        deadline = time.monotonic() + 100
        while not status.exists() and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors.decode().splitlines()[-1] == "demo-carla: stopped; all its processes are ended"
    assert processes_of(out) == []
