from __future__ import annotations

import json
from pathlib import Path

import pytest

from replayfleet.scripts.experiments.detector import detector
from tests.support.driving_folder import CLASS_NAMES, write_driving


def test_it_learns_from_a_recording_and_writes_quality_by_town(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    frames = [[index % 5, (index + 1) % 5] for index in range(8)]
    root, out = write_driving(tmp_path / "carla", {"Town01": frames, "Town02": frames}, side=20.0), tmp_path / "q.json"
    small = ["--size", "64x32", "--width", "1", "--anchors", "1", "--epochs", "2", "--batch-size", "6"]
    detector.main(["--data", str(root), "--out", str(out), "--towns", "Town01", *small], standalone_mode=False)
    written = json.loads(out.read_text())
    assert written["quality"].keys() == {"Town01", "all"}
    assert written["task"]["class_names"] == list(CLASS_NAMES)
    assert 0 <= written["quality"]["all"]["map50"] <= 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("6 frames, 12 boxes, mean overlap with 1 anchors 1.000")
    assert sum(line.startswith("part ") for line in lines) == 2
