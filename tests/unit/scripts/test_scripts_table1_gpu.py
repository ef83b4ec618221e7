"""Full-scale runs in pieces: which run comes next, and how."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.image_sets import write_fashion_mnist

from federation.scenarios.tables.paper import paper_table
from federation.scenarios.tables.plan import Choice, Planner
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


def test_the_table_of_the_papers_finds_its_runs(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arguments that it names; folders are those that the table would run in itself."""
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "data"))
    small = options(tmp_path / "out")
    small.settings, small.torch_device = "tiny", "meta"
    small.overrides = ["samples_per_class=3", "test_samples_per_class=1"]
    table1_gpu.run(small)
    ours = {command[command.index("--out") + 1] for command in started if "fashion-mnist" in command}
    for stub in small.out.rglob("result.json"):
        stub.unlink()
    words = table1_gpu.table_arguments(small)
    given = {key.lstrip("-"): value for key, value in zip(words[2::2], words[3::2], strict=True) if key != "--set"}
    choice = Choice(
        out=Path(given["out"]),
        preset=given["settings"],
        methods=tuple(given["methods"].split(",")),
        seeds=(int(given["seeds"]),),
        torch_device=given["torch-device"],
        overrides=tuple(small.overrides),
        dataset="fashion-mnist",
    )
    assert {str(run.folder) for run in Planner(choice).runs(paper_table("1"))} == ours


def test_nothing_is_begun_when_the_minutes_are_over(tmp_path: Path, started: list[list[str]]) -> None:
    assert not table1_gpu.run(options(tmp_path, minutes=0.5))
    assert started == []
