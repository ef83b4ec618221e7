"""Disks that are full for a while, real ones: nothing ends, everything says why, and it goes on by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_MOUNT = subprocess.run(
    ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
).returncode

pytestmark = pytest.mark.skipif(MAY_MOUNT != 0, reason="no user namespaces with mounts here")


def lived_through(folder: Path, full: str) -> dict[str, Any]:
    words = ["unshare", "-rm", sys.executable, "-m", "tests.support.small_disks", str(folder), full]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return dict(json.loads(done.stdout))


def test_a_client_whose_disk_is_full_serves_on_trains_nothing_and_goes_on_when_there_is_room(tmp_path: Path):
    said = lived_through(tmp_path, "client")
    assert said["problem"] == "disk full: 0 MB free of 48 MB; serving goes on, training waits"
    assert said["rounds_while_full"] == 0
    assert said["frames_while_full"] > 0
    assert said["problem"] in said["client_summary"]
    assert (said["client"]["healthy"], said["client"]["disk"]) == (False, said["problem"])
    assert said["aggregator"]["disk"] == ""
    assert said["cpu_s_to_the_next_round"] < 10.0
    assert said["errors"] == [0, 0, 0], "known, so none is an unexpected one"
    assert said["aggregated"] == [0, 1, 2]
    assert said["problems_left"] == ["", "", ""]


def test_an_aggregator_whose_disk_is_full_takes_no_uploads_says_so_and_goes_on_when_there_is_room(tmp_path: Path):
    said = lived_through(tmp_path, "aggregator")
    assert said["problem"] == "disk full: 0 MB free of 48 MB; uploads wait"
    assert said["rounds_while_full"] == 0
    assert said["frames_while_full"] > 0
    assert said["problem"] in said["aggregator_summary"]
    assert (said["aggregator"]["healthy"], said["aggregator"]["disk"]) == (False, said["problem"])
    assert said["client"]["disk"] == ""
    assert said["cpu_s_to_the_next_round"] < 10.0
    assert said["errors"] == [0, 0, 0], "known, so none is an unexpected one"
    assert said["aggregated"] == [0, 1, 2]
    assert said["problems_left"] == ["", "", ""]
