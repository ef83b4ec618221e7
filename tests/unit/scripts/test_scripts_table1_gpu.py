"""Full-scale runs in pieces: which run comes next, and how."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import table1_gpu


def options(out: Path, minutes: float = 9.0) -> argparse.Namespace:
    return argparse.Namespace(
        minutes=minutes, out=out, settings="paper", torch_device="cuda", seed=0, overrides=["local_epochs=1"]
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands; each finishes its run, except CIFAR-10's, which stop with the minutes."""
    commands: list[list[str]] = []

    def finish(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        folder = Path(command[command.index("--out") + 1])
        (folder / "state").mkdir(parents=True, exist_ok=True)
        if "cifar-10" in command:
            return subprocess.CompletedProcess(command, 3)
        (folder / "result.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(table1_gpu.subprocess, "run", finish)
    return commands


def test_the_second_piece_leaves_finished_runs_alone_and_resumes_the_others(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not table1_gpu.run(options(tmp_path))
    assert len(started) == 12
    assert not any("--resume" in command for command in started)
    assert "not finished: pfedgrp, gradual, cifar-10" in capsys.readouterr().out
    started.clear()
    assert not table1_gpu.run(options(tmp_path))
    assert len(started) == 6
    assert all("cifar-10" in command and command[-1] == "--resume" for command in started)


def test_a_run_is_the_papers_on_the_gpu(tmp_path: Path, started: list[list[str]]) -> None:
    table1_gpu.run(options(tmp_path))
    first = " ".join(started[0][3:])
    assert first.startswith("fedavg --scenario gradual --dataset fashion-mnist --settings paper --seed 0")
    assert "--torch-device cuda" in first
    assert "--set local_epochs=1" in first


def test_nothing_is_begun_when_the_minutes_are_over(tmp_path: Path, started: list[list[str]]) -> None:
    assert not table1_gpu.run(options(tmp_path, minutes=0.5))
    assert started == []
