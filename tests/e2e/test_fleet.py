"""``python -m replayfleet.scripts.fleet`` in small, with everything going wrong that can: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.image_sets import write_fashion_mnist
from support.processes import processes_of

from replayfleet.federation.wire.transport.broker import find_mosquitto

ROOT = Path(__file__).parents[2]
FLEET = [sys.executable, "-m", "replayfleet.scripts.fleet"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("clients", "rounds"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_a_fleet_comes_through_kills_a_dead_broker_and_bad_lines(clients: int, rounds: int, tmp_path: Path) -> None:
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    out = tmp_path / "fleet"
    write_fashion_mnist(tmp_path / "images", train_per_class=80, test_per_class=20)
    words = ["--clients", str(clients), "--rounds", str(rounds), "--out", str(out)]
    words += ["--data-root", str(tmp_path / "images")]
    faults = ["--fault", "kill-client", "--fault", "restart-broker", "--fault", "bad-line", "--time-limit-s", "400"]
    done = subprocess.run([*FLEET, *words, *faults], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "yard.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["broker_restarts"] == 1
    assert sum(client["killed"] for client in summary["clients"]) >= 1
    assert [client["uploads"] for client in summary["clients"]] == [rounds] * clients, "a kill loses no upload"
    for client in summary["clients"]:
        assert client["failed"] == 0
        assert f" {client['client']} " in f" {done.stdout}"
    assert processes_of(out) == [], "nothing is left running"


def test_what_can_not_be_run_is_one_line(tmp_path: Path) -> None:
    words = [*FLEET, "--fault", "kill-cliont", "--out", str(tmp_path / "fleet")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "unknown fault 'kill-cliont'; did you mean 'kill-client'?" in done.stderr
    assert not (tmp_path / "fleet").exists()
