"""Full-scale runs in pieces: which run comes next, and how."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replayfleet.federation.simulator.job import identity_of, simulation_of, wanted_stream
from replayfleet.federation.simulator.tables import running
from replayfleet.federation.simulator.tables.paper import paper_table
from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun, Planner
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.scripts.experiments import table1_gpu
from tests.support.image_sets import cifar_members, write_fashion_mnist, write_tree

SMALL = ["--settings", "tiny", "--set", "samples_per_class=3", "--set", "test_samples_per_class=1"]
ON_A_GPU = ["--torch-device", "meta"]
"""One that computes nothing; every machine has it."""


@dataclass
class Ended:
    """A process that did all its work when it was begun."""

    code: int

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return self.code


@dataclass
class Runs:
    """Runs that end at once, each with a result of its own.

    Attributes:
        out: where.
        data: its data sets.
        slow: data sets whose runs stop with the minutes.
        begun: those of the last piece.
    """

    out: Path
    data: Path
    slow: Iterable[str] = ()
    begun: list[PlannedRun] = field(default_factory=list)

    def piece(self, *arguments: str) -> int | str | None:
        """Return the exit code of the command."""
        self.begun.clear()
        with pytest.raises(SystemExit) as stopped:
            table1_gpu.main(["--out", str(self.out), "--data-root", str(self.data), *SMALL, *ON_A_GPU, *arguments])
        return stopped.value.code

    def launch(self, run: PlannedRun) -> Ended:
        self.begun.append(run)
        options = run.options
        data = load_dataset(options.dataset, data_root=options.data_root)
        identity = identity_of(options, simulation_of(options, wanted_stream(options), data))
        (run.folder / "state").mkdir(parents=True, exist_ok=True)
        (run.folder / "state/run.json").write_text(json.dumps(identity))
        if options.dataset in self.slow:
            return Ended(3)
        result = {"run": identity, "summary": {"average_accuracy": 0.5}, "rounds": []}
        (run.folder / "result.json").write_text(json.dumps(result))
        return Ended(0)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    write_tree(tmp_path / "data", cifar_members(per_class=6))
    faked = Runs(tmp_path / "out", tmp_path / "data")
    monkeypatch.setattr(running, "launch_process", faked.launch)
    return faked


def test_the_second_piece_leaves_finished_runs_alone_and_resumes_the_others(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.slow = ["cifar-10"]
    assert runs.piece() == 3
    assert len(runs.begun) == 12
    assert not any("--resume" in run.arguments() for run in runs.begun)
    assert "not finished: pfedgrp/gradual/cifar-10/seed-0" in capsys.readouterr().out
    assert runs.piece() == 3
    assert len(runs.begun) == 6
    assert all(run.options.dataset == "cifar-10" and "--resume" in run.arguments() for run in runs.begun)
    runs.slow = []
    assert runs.piece() == 0
    assert runs.piece() == 0
    assert runs.begun == []


def test_a_run_is_the_papers_on_the_gpu(runs: Runs) -> None:
    runs.piece()
    first = " ".join(runs.begun[0].arguments())
    assert first.startswith("fedavg --scenario gradual --dataset fashion-mnist --settings tiny --seed 0")
    assert "--torch-device meta" in first
    assert f"--data-root {runs.data}" in first
    assert runs.begun[0].options.minutes == pytest.approx(9, abs=0.5)


def test_files_that_are_no_results_dont_pass_for_finished_runs(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.piece()
    for run in list(runs.begun):
        (run.folder / "result.json").write_text("{}")
    assert runs.piece() == 2
    assert "result.json can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--set", "local_epochs=7"], ["--settings", "small"]])
def test_results_of_other_settings_dont_pass_for_finished_runs(
    runs: Runs, capsys: pytest.CaptureFixture[str], other: list[str]
) -> None:
    assert runs.piece() == 0
    assert runs.piece("--set", "num_rounds=3", "--set", "num_clients=2", *other) == 2
    assert runs.begun == []
    assert "holds another run" in capsys.readouterr().err


def test_a_setting_reaches_the_methods_that_have_it(runs: Runs) -> None:
    assert runs.piece("--set", "gate_threshold=0.4") == 0
    with_it = {run.options.method for run in runs.begun if "gate_threshold=0.4" in run.options.overrides}
    assert len(runs.begun) == 12
    assert with_it == {"pfedgrp"}


def test_a_setting_that_no_method_has_is_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.piece("--set", "gate_treshold=0.4") == 2
    assert "did you mean 'gate_threshold'?" in capsys.readouterr().err


def test_a_run_that_was_killed_before_it_had_begun_starts_anew(runs: Runs) -> None:
    (runs.out / "runs/fedavg/gradual/fashion-mnist/seed-0/state").mkdir(parents=True)
    assert runs.piece() == 0
    assert "--resume" not in runs.begun[0].arguments()


def test_without_a_data_set_the_others_runs_are_made(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.data / "cifar10").rename(runs.data / "elsewhere")
    assert runs.piece() == 1
    assert {run.options.dataset for run in runs.begun} == {"fashion-mnist"}
    assert len(runs.begun) == 6
    said = capsys.readouterr().out
    assert said.count("not possible: data set cifar-10 not found") == 1
    assert "fedavg on Expt. 1 (gradual), cifar-10" in said


def test_a_failed_run_is_said_and_the_rest_goes_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        running, "launch_process", lambda run: Ended(2) if run.row.method == "fedavg" else runs.launch(run)
    )
    assert runs.piece() == 1
    assert len(runs.begun) == 8
    assert "FAILED: fedavg/gradual/fashion-mnist/seed-0: exit code 2" in capsys.readouterr().out


def test_the_table_of_the_papers_finds_its_runs(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """With the arguments that it names; folders are those that the table would run in itself."""
    runs.piece()
    ours = {run.folder for run in runs.begun}
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[2:5] == ["fleet-sim", "table", "1"]
    pairs = list(zip(words[5::2], words[6::2], strict=True))
    given = {key.lstrip("-"): value for key, value in pairs}
    choice = Choice(
        out=Path(given["out"]),
        preset=given["settings"],
        methods=tuple(given["methods"].split(",")),
        seeds=(int(given["seeds"]),),
        torch_device=given["torch-device"],
        data_root=Path(given["data-root"]),
        overrides=tuple(value for key, value in pairs if key == "--set"),
    )
    for dataset in table1_gpu.DATASETS:
        found = Planner(dataclasses.replace(choice, dataset=dataset)).runs(paper_table("1"))
        assert {run.state.value for run in found} == {"finished"}
        ours -= {run.folder for run in found}
    assert not ours


def test_nothing_is_begun_when_the_minutes_are_over(runs: Runs) -> None:
    assert runs.piece("--minutes", "0.5") == 3
    assert runs.begun == []


@pytest.mark.parametrize("minutes", ["nan", "0", "-1", "soon"])
def test_minutes_that_are_no_time_are_refused(runs: Runs, capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    assert runs.piece(f"--minutes={minutes}") == 2
    assert "argument --minutes" in capsys.readouterr().err
    assert runs.begun == []


def test_an_interruption_ends_without_a_traceback(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_run: PlannedRun) -> Ended:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "launch_process", interrupted)
    assert runs.piece() == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_help_says_where_data_sets_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table1_gpu.main(["--help"])
    assert "else $REPLAYFLEET_DATA" in capsys.readouterr().out
