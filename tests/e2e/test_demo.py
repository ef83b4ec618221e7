"""``make demo`` that something ends; ``tests/integration/test_installed.py`` lets it run through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.processes import processes_of

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "replayfleet.scripts.demo", "--fast"]


def test_a_client_that_dies_ends_the_demo_with_its_log(tmp_path: Path):
    out = tmp_path / "demo"
    status = out / "clients" / "client-1" / "status.json"
    with subprocess.Popen([*DEMO, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        deadline = time.monotonic() + 200
        while not status.exists() and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    first, *more = errors.decode().splitlines()
    assert first.startswith("demo: client-1 was ended by SIGKILL before the demo was done; its log is")
    assert any("client started" in line for line in more)
    assert processes_of(out) == []


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path):
    out = tmp_path / "demo"
    with subprocess.Popen([*DEMO, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        deadline = time.monotonic() + 100
        while not (out / "logs" / "fedavg.log").exists() and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors.decode().splitlines()[-1] == "demo: stopped; all its processes are ended"
    assert processes_of(out) == []
