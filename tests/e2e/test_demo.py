"""``make demo`` in small: real processes over a real broker, then the report's contents."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "replayfleet.scripts.demo", "--fast"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and "pytest" not in text:
            found.append(text)
    return found


def test_the_demo_runs_through_and_reports(tmp_path: Path):
    out = tmp_path / "demo"
    done = subprocess.run(
        [*DEMO, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"round 2: client-1 serves v\d+, accuracy [\d.]+ % on 18 test images", done.stdout)
    assert f"report: {out / 'report.html'}" in done.stdout
    assert re.search(r"elapsed: \d+:\d\d", done.stdout)
    assert processes_of(out) == []

    text = (out / "report.html").read_text(encoding="utf-8")
    result = json.loads((out / "fedavg" / "result.json").read_text())
    assert f"{100 * result['rounds'][-1]['accuracy']:.1f}" in text
    assert text.count("<img") == 10 + 2 * 6
    assert text.count("<figcaption>round ") == 3
    assert 'src="http' not in text
    assert {path.stem for path in (out / "logs").iterdir()} == {"demo", "aggregator", "client-0", "client-1", "fedavg"}


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
