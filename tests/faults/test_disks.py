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


@pytest.mark.parametrize(
    ("full", "other", "waits"),
    [("client", "aggregator", "serving goes on, training waits"), ("aggregator", "client", "uploads wait")],
)
def test_who_has_a_full_disk_says_so_lives_on_and_does_its_work_when_there_is_room(
    tmp_path: Path, full: str, other: str, waits: str
):
    said = lived_through(tmp_path, full)
    assert said["problem"] == f"disk full: 0 MB free of 48 MB; {waits}"
    assert said["rounds_while_full"] == 0
    assert said["frames_while_full"] > 0
    assert said["problem"] in said[f"{full}_summary"]
    assert (said[full]["healthy"], said[full]["disk"]) == (False, said["problem"])
    assert said[other]["disk"] == ""
    assert said["cpu_s_to_the_next_round"] < 10.0
    assert said["errors"] == [0, 0, 0], "known, so none is an unexpected one"
    assert said["aggregated"] == [0, 1, 2]
    assert said["problems_left"] == ["", "", ""]
