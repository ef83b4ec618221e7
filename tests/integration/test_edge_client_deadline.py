"""A round's deadline on real training: a device that is too slow for the whole round delivers part of it in time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.client_world import PFEDGRP, World, events

from replayfleet.edge_client.state_store import StateStore, spec_digest

DEADLINE_S = 12.0


@pytest.mark.usefixtures("served_here")
def test_a_device_too_slow_for_the_full_round_delivers_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full the round would take a day; the aggregator takes what is there before it closes."""
    monkeypatch.setitem(PFEDGRP, "local_epochs", "1000000")
    for name in ("sub_generator_epochs", "first_sub_generator_epochs"):
        monkeypatch.setitem(PFEDGRP, name, "100000")
    with contextlib.closing(World(tmp_path, "pfedgrp", num_clients=1, num_rounds=1, deadline_s=DEADLINE_S)) as fleet:
        client = fleet.start_client("cam-0")
        fleet.until(lambda: client.client.finished)
        status = client.status()
    assert [entry["round"] for entry in events(fleet, "upload accepted")] == [0]
    assert events(fleet, "upload rejected") == []
    assert [entry["by"] for entry in events(fleet, "round closed")] == ["quorum"]
    assert events(fleet, "round extended") == []
    epochs = float(status["training"].split()[1])
    assert 0 < epochs < 1_000_000
    assert f"epochs {epochs:g} of 1000000, " in status["training"]
    assert "of 2 sub-generators" in status["training"]
    commit = StateStore(tmp_path / "cam-0").training()
    assert commit.train_s < DEADLINE_S
    assert commit.num_sub_generators == int(status["training"].split(", ")[1].split()[0])
    pace = StateStore(tmp_path / "cam-0").pace(spec_digest(fleet.spec), 1)
    assert pace.speed.task_step_s is not None
    assert 0 < pace.speed.task_step_s < DEADLINE_S


def test_torch_says_that_memory_ran_out_in_words_that_are_understood() -> None:
    script = (
        "import torch\n"
        "from replayfleet.edge_client.learning.training.guard import bound_memory, _status_bytes\n"
        "from replayfleet.federation.errors import is_out_of_memory\n"
        "torch.nn.Conv2d(1, 1, 3)(torch.zeros(1, 1, 9, 9)).sum().backward()\n"
        "bound_memory(_status_bytes('RssAnon') + (100 << 20))\n"
        "try:\n"
        "    torch.ones(1 << 28)\n"
        "except Exception as error:\n"
        "    print(is_out_of_memory(error))\n"
        "print(int(torch.ones(1 << 20).sum()))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=240)
    assert found.stdout.split() == ["True", str(1 << 20)]
