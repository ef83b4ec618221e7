"""Fleets of mortal processes, and what an undisturbed one leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from replayfleet.federation.wire.transport.broker import find_mosquitto

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return what runs a ``tests.support.mortal_fleet.Plan``: it came to its end, and nobody ended by himself."""
    if find_mosquitto() is None:
        pytest.skip("needs mosquitto")

    def run(**plan: Any) -> dict[str, Any]:
        words = json.dumps({"folder": str(tmp_path_factory.mktemp("fleet")), **plan})
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        command = [sys.executable, "-m", "tests.support.mortal_fleet", words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        said: dict[str, Any] = json.loads(done.stdout)
        assert said["exits"] == {"aggregator": 0, "cam-0": 0, "cam-1": 0}
        assert not said["tracebacks"], said["tracebacks"][0]
        return said

    return run


@pytest.fixture(scope="session")
def undisturbed(lived: Callable[..., dict[str, Any]]) -> Callable[[str, int], str]:
    """Return what gives the digest of a run of so many rounds in which nothing happened."""

    @cache
    def digest(method: str, rounds: int) -> str:
        said = lived(method=method, rounds=rounds)
        assert said["rounds"] == rounds
        return str(said["digest"])

    return digest
