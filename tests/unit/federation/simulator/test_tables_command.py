"""``fleet-sim table`` over runs of milliseconds, in this process but for the tests that say otherwise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec
import pytest
from support.image_sets import write_fashion_mnist
from support.inline_runs import Inline
from support.nudge_method import NudgeMethod

from replayfleet.devices import probing
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.variants import VARIANTS
from replayfleet.federation.simulator import cli, job
from replayfleet.federation.simulator.simulation import Simulation
from replayfleet.federation.simulator.tables import plan, running
from replayfleet.federation.simulator.tables.paper import paper_table
from replayfleet.federation.simulator.tables.plan import Choice, Planner, State

Table: TypeAlias = Callable[..., tuple[int, str, str]]

SIZE = [
    *("--settings", "tiny", "--clients", "2", "--rounds", "3", "--dataset", "fashion-mnist"),
    *("--set", "samples_per_class=3", "--set", "test_samples_per_class=1"),
]


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(METHODS, "nudge", NudgeMethod)
    monkeypatch.setitem(METHODS, "centralized", NudgeMethod)
    monkeypatch.setitem(VARIANTS, "nudge-strong", ("nudge", {"strength": 3.0}))
    monkeypatch.setattr(running, "launch_process", Inline)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Table:
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def run(number: str, *arguments: Any, out: str = "out") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fleet-sim", "table", number, "--out", out, *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


def choice(tmp_path: Path, **changes: Any) -> Choice:
    given = {
        "out": tmp_path / "out",
        "preset": "tiny",
        "clients": 2,
        "rounds": 3,
        "datasets": ("fashion-mnist",),
        "overrides": ("samples_per_class=3", "test_samples_per_class=1"),
        "methods": ("nudge",),
    }
    return Choice(**{**given, **changes})


@pytest.mark.usefixtures("drawn")
def test_a_table_is_run_and_written_with_the_papers_numbers_beside_ours(table: Table, tmp_path: Path):
    code, out, err = table("1", "--methods", "centralized,nudge", "--scenario", "gradual", "--seeds", "0,1", *SIZE)
    assert (code, err) == (0, "")
    assert "4 runs to do, 0 finished before" in out
    folder = tmp_path / "out"
    for seed in (0, 1):
        assert (folder / f"runs/nudge/gradual/fashion-mnist/seed-{seed}/result.json").exists()
    text = (folder / "table-1.md").read_text()
    assert "| Centralized (`centralized`) | 89.17 [1] |" in text
    assert "1. 89.17 here, 89.12 in Tables 3 to 5." in text
    assert "`nudge`, not in the paper's table | - |" in text
    assert "opposite sign" in text
    assert "2 clients, 3 rounds, 3 samples per class and round. That is not what the paper ran" in text
    assert "![accuracy](table-1-gradual-fashion-mnist.png)" in text
    assert (folder / "table-1-gradual-fashion-mnist.png").read_bytes().startswith(b"\x89PNG")
    _check_json(tmp_path)


def _check_json(tmp_path: Path) -> None:
    """It has means, spreads, and the runs behind them."""
    cells = json.loads((tmp_path / "out" / "table-1.json").read_text())["cells"]
    upper, nudge = cells
    assert upper["paper"] == {"AA": 89.17, "AR": 0.0}
    assert upper["ours"]["AR"]["mean"] == 0
    first, second = (nudge["ours"]["AA"]["values"][seed] for seed in ("0", "1"))
    results = [json.loads((Path(nudge["runs"][seed]) / "result.json").read_text()) for seed in ("0", "1")]
    assert [first, second] == [pytest.approx(100 * result["summary"]["average_accuracy"]) for result in results]
    assert nudge["ours"]["AA"]["mean"] == pytest.approx((first + second) / 2)
    assert nudge["ours"]["AA"]["spread"] == pytest.approx(abs(first - second) / 2**0.5)
    assert nudge["paper"] == {}


def test_finished_runs_are_not_run_again_and_serve_other_tables(table: Table):
    arguments = ["--methods", "nudge", "--scenario", "gradual", *SIZE]
    assert "1 run to do" in table("1", *arguments)[1]
    code, out, _ = table("1", *arguments)
    assert code == 0
    assert "0 runs to do, 1 finished before" in out
    code, out, _ = table("3", *arguments)
    assert "0 runs to do, 1 finished before" in out


def test_more_threads_are_no_other_run(table: Table, tmp_path: Path):
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE]
    table(*arguments, "--jobs", "1")
    assert "0 runs to do, 1 finished before" in table(*arguments, "--jobs", "64")[1]
    path = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "run": {**result["run"], "num_threads": 7}}))
    assert "0 runs to do, 1 finished before" in table(*arguments)[1]


def test_runs_share_the_cores_and_leave_the_number_to_the_run_on_a_gpu(table: Table, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probing, "_num_cores", lambda root: 9)  # that a cpuset or a quota leaves
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE, "--dry-run"]
    assert "--threads 1 --workers 4\n" in table(*arguments, "--jobs", "2")[1]
    assert "--threads 1 --workers 1\n" in table(*arguments, "--jobs", "64")[1]
    assert "--workers" not in table(*arguments, "--torch-device", "meta")[1]


def test_a_setting_that_changes_nothing_makes_no_folder_of_its_own(tmp_path: Path):
    table, planner = paper_table("11"), Planner(choice(tmp_path, rounds=1))
    names = [run.folder.relative_to(tmp_path / "out/runs").parts[0] for run in planner.runs(table)]
    assert names == ["nudge", "nudge+overlap=2", "nudge+overlap=4", "nudge+overlap=6"]


def test_a_variant_runs_as_its_method_with_its_settings_under_its_own_name(table: Table, tmp_path: Path):
    table("1", "--methods", "nudge-strong", "--scenario", "gradual", *SIZE)
    path = tmp_path / "out/runs/nudge-strong/gradual/fashion-mnist/seed-0/result.json"
    run = json.loads(path.read_text())["run"]
    assert run["method"] == "nudge"
    assert run["settings"]["strength"] == 3.0
    assert "| nudge-strong | `strength=3.0` |" in (tmp_path / "out/table-1.md").read_text()


@pytest.mark.parametrize("number", ["3", "4"])
def test_ablations_and_lambda_have_update_counts_beside_the_papers_metrics(table: Table, tmp_path: Path, number: str):
    table(number, "--methods", "centralized,nudge", "--scenario", "gradual", *SIZE)
    lines = (tmp_path / f"out/table-{number}.md").read_text().splitlines()
    head = next(line for line in lines if line.startswith("| method | AA"))
    assert head.endswith("| AUC, ours | seeds |")
    regret = head.split("|").index(" AR [%], ours ")
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith(("| Centralized", "| `nudge`"))}
    assert rows["Centralized (`centralized`)"].endswith("| - | 1 |")
    assert rows["Centralized (`centralized`)"].split("|")[regret] == " 0.00 "
    result = json.loads((tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json").read_text())
    updates = result["summary"]["sub_generator_updates"]
    assert updates > 0
    assert rows["`nudge`, not in the paper's table"].endswith(f"| {updates:.2f} | 1 |")


def test_a_dry_run_shows_commands_that_do_the_same_and_writes_nothing(table: Table, tmp_path: Path):
    code, out, _ = table("1", "--methods", "nudge", "--scenario", "gradual", *SIZE, "--dry-run")
    assert code == 0
    assert "missing  fleet-sim nudge --scenario gradual --dataset fashion-mnist --settings tiny" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("drawn")
def test_a_damaged_result_is_made_again_from_its_rounds_and_stops_no_other_row(table: Table, tmp_path: Path):
    words = ["--methods", "nudge,centralized", "--scenario", "gradual", *SIZE]
    assert table("1", *words)[0] == 0
    path = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    whole = json.loads(path.read_text())
    path.write_text(path.read_text()[:300])
    code, out, _ = table("1", *words)
    assert code == 0
    assert "1 run to do, 1 finished before" in out
    assert json.loads(path.read_text())["rounds"] == whole["rounds"]
    path.write_text(path.read_text()[:300])
    shutil.rmtree(path.parent / "state")
    code, out, _ = table("1", *words)
    assert "result.json can't be read" in out


@pytest.mark.usefixtures("drawn")
def test_a_row_of_the_noise_floor_says_so_in_a_papers_table_too(table: Table, tmp_path: Path):
    assert table("1", "--methods", "nudge", "--scenario", "gradual", "--noise-floor", *SIZE)[0] == 0
    rows = [line for line in (tmp_path / "out/table-1.md").read_text().splitlines() if line.startswith("| ")]
    assert len([row for row in rows if "`nudge`, not in the paper's table" in row]) == 1
    assert [row for row in rows if "again from weights" in row]


@pytest.mark.parametrize("seeds", ["-1", "0,99999999999999999999"])
def test_a_seed_that_no_run_takes_is_refused_before_anything_is_written(seeds: str, table: Table, tmp_path: Path):
    code, _, err = table("1", "--methods", "nudge", "--scenario", "gradual", f"--seeds={seeds}", *SIZE)
    assert code == 2
    assert "expected 0 to 9223372036854775807" in err
    assert not (tmp_path / "out").exists()


def test_lists_may_be_said_piece_by_piece(table: Table):
    at_once = table(
        "1", "--methods", "nudge,centralized", "--scenario", "gradual", "--seeds", "0,1", *SIZE, "--dry-run"
    )
    pieces = ["--methods", "nudge", "--seeds", "0", "--methods", "centralized", "--seeds", "1"]
    assert table("1", *pieces, "--scenario", "gradual", *SIZE, "--dry-run") == at_once
    assert at_once[1].count("--seed 1") == 2


def test_commands_can_be_typed_again_where_a_folder_has_a_space(table: Table, tmp_path: Path):
    arguments = ["--methods", "nudge", "--scenario", "gradual", *SIZE]
    assert (
        "--out 'my runs/runs/nudge/gradual/fashion-mnist/seed-0'"
        in table("1", *arguments, "--dry-run", out="my runs")[1]
    )
    table("1", *arguments, "--minutes", "0", out="my runs")
    assert "fleet-sim table 1 --out 'my runs' --methods" in (tmp_path / "my runs/table-1.md").read_text()


def test_a_gpu_is_asked_for_in_every_run_and_steps_together_of_methods_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = choice(tmp_path, scenarios=("gradual",), in_step=True)
    (run,) = Planner(asked).runs(paper_table("1"))
    assert "--in-step" not in run.spec.command(), "nudge can't"
    monkeypatch.setattr(METHODS["nudge"], "local_work", None, raising=False)
    (run,) = Planner(asked).runs(paper_table("1"))
    assert "--in-step" in run.spec.command()
    assert "--torch-device" not in run.spec.command()
    asked = choice(tmp_path, scenarios=("gradual",), torch_device="meta", in_step=False)
    (run,) = Planner(asked).runs(paper_table("1"))
    words = run.spec.command()
    assert words[words.index("--torch-device") + 1] == "meta"
    assert "--one-by-one" in words


def test_what_ran_on_a_gpu_is_read_where_there_is_none_but_nothing_else_can_run(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table("1", "--methods", "nudge", "--scenario", "gradual", *SIZE)
    path = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "run": {**result["run"], "torch_device": "cuda", "in_step": False}}))

    def without(name: str) -> Any:
        raise SettingsError(f"torch device {name!r} can't be used (no driver)")

    monkeypatch.setattr(plan, "torch_device", without)
    words = ["1", "--methods", "centralized,nudge", "--scenario", "gradual", *SIZE, "--torch-device", "cuda:1"]
    table(*words, "--minutes", "0")
    text = (tmp_path / "out/table-1.md").read_text()
    assert "torch device 'cuda:1' can't be used (no driver)" in text
    assert "`nudge`, not in the paper's table" in text


def test_a_run_that_ended_on_a_gpu_counts_here_and_one_that_began_there_is_not_gone_on_with(
    table: Table, tmp_path: Path
):
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE]
    table(*arguments)
    path = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    result = json.loads(path.read_text())
    there = {**result["run"], "torch_device": "cuda", "in_step": True}
    path.write_text(json.dumps({**result, "run": there}))
    asked = choice(tmp_path, scenarios=("gradual",))
    (run,) = Planner(asked).runs(paper_table("1"))
    assert run.state is State.FINISHED
    path.unlink()
    (path.parent / "state").mkdir(exist_ok=True)
    (path.parent / plan._RUN).write_text(json.dumps(there))
    (run,) = Planner(asked).runs(paper_table("1"))
    assert run.state is State.IMPOSSIBLE
    assert "torch_device was 'cuda', is now 'cpu'" in run.problem


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bits(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = Simulation._round

    def interrupted(self: Simulation, round_index: int, *arguments: Any) -> Any:
        if round_index == 2:
            raise RuntimeError("the lights went out")
        return original(self, round_index, *arguments)

    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_round", interrupted)
        code, _, err = table(*arguments, "--jobs", "64")
    assert code == 1
    assert "the lights went out" in err
    assert "failed: the lights went out" in (tmp_path / "out/table-1.md").read_text()
    assert "begun  fleet-sim nudge" in table(*arguments, "--dry-run")[1]
    assert table(*arguments, "--jobs", "1")[0] == 0
    table(*arguments, out="whole")
    name = "runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    resumed, whole = (json.loads((tmp_path / out / name).read_text()) for out in ("out", "whole"))
    assert [r["accuracy"] for r in resumed["rounds"]] == [r["accuracy"] for r in whole["rounds"]]
    assert resumed["run"]["num_threads"] == 1


def test_a_table_that_the_minutes_ended_goes_on_with_the_same_command(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = ["1", "--methods", "centralized,nudge", "--scenario", "gradual", *SIZE]
    original, now = Simulation._round, [0.0]

    def for_an_hour(*arguments: Any) -> Any:
        now[0] += 3600
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_round", for_an_hour)
        patch.setattr(job, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(running, "Runner", partial(running.Runner, clock=lambda: now[0]))
        code, out, _ = table(*arguments, "--jobs", "1", "--minutes", "30")
    assert code == 3
    assert "stopped: 30 minutes have passed; the same command goes on with 2 runs" in out
    text = (tmp_path / "out/table-1.md").read_text()
    assert "- begun, not finished: Centralized" in text
    assert "- not run: nudge" in text
    code, out, _ = table(*arguments, "--jobs", "1", "--minutes", "9")
    assert code == 0
    assert "2 runs to do, 0 finished before" in out
    table(*arguments, "--jobs", "1", out="whole")
    name = "runs/centralized/gradual/fashion-mnist/seed-0/result.json"
    resumed, whole = (json.loads((tmp_path / out / name).read_text()) for out in ("out", "whole"))
    assert [r["accuracy"] for r in resumed["rounds"]] == [r["accuracy"] for r in whole["rounds"]]


def test_runs_begin_in_the_order_of_the_methods_that_were_named_and_on_more_than_one_data_set(
    table: Table, tmp_path: Path
):
    sizes = [word for word in SIZE if word not in {"--dataset", "fashion-mnist"}]
    named = ["--methods", "nudge,centralized", "--dataset", "fashion-mnist,cifar-10", "--seeds", "0,1"]
    out = table("1", *named, *sizes, "--dry-run")[1]
    order = [line.split("runs/")[1].split(" ")[0] for line in out.splitlines() if "missing" in line]
    places = [f"{scenario}/fashion-mnist" for scenario in ("gradual", "circulating")]
    expected = [(name, place, seed) for seed in (0, 1) for name in ("nudge", "centralized") for place in places]
    assert order == [f"{name}/{place}/seed-{seed}" for name, place, seed in expected]
    assert "data set cifar-10 not found" in out
    assert "imagenet" not in out


def test_without_a_minute_a_table_is_written_of_what_there_is(table: Table, tmp_path: Path):
    table("1", "--methods", "nudge", "--scenario", "gradual", *SIZE)
    code, out, _ = table("1", "--methods", "centralized,nudge", "--scenario", "gradual", *SIZE, "--minutes", "0")
    assert code == 3
    assert "begins" not in out
    assert not (tmp_path / "out/runs/centralized").exists()
    text = (tmp_path / "out/table-1.md").read_text()
    assert "- not run: Centralized" in text
    assert "89.17" in text
    assert (tmp_path / "out/table-1-gradual-fashion-mnist.png").exists()


def test_what_cannot_run_is_said_and_the_rest_is_run(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(METHODS, "pfedgraph", raising=False)
    sizes = [word for word in SIZE if word not in {"--dataset", "fashion-mnist"}]
    code, out, _ = table("1", "--methods", "nudge,pfedgraph", "--scenario", "gradual", *sizes)
    assert code == 0
    assert "not possible: pfedgraph is not built" in out
    (missing,) = [line for line in out.splitlines() if line.startswith("not possible: data set cifar-10 not found")]
    assert missing.endswith(" on Expt. 1 (gradual), cifar-10)")
    assert missing.count("cifar-10)") == 1
    text = (tmp_path / "out/table-1.md").read_text()
    assert "- pfedgraph is not built:\n  - pFedGraph on Expt. 1 (gradual), fashion-mnist, seed 0\n" in text
    assert "data set imagenet-10 not found" in text
    assert (tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json").exists()


def test_a_folder_with_another_run_is_left_alone(table: Table, tmp_path: Path):
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual"]
    table(*arguments, *SIZE)
    path = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0/result.json"
    before = path.read_bytes()
    code, _, err = table(*arguments, *SIZE, "--set", "strength=2")
    assert code == 2
    assert "holds another run: settings.strength was 1.0, is now 2.0; choose another --out" in err
    assert path.read_bytes() == before


def test_runs_of_versions_that_did_not_note_what_files_held_are_still_known(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE]
    table(*arguments)
    folder = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0"
    earlier = json.loads((folder / "result.json").read_text())["run"]
    assert "samples" not in earlier
    monkeypatch.setattr("replayfleet.federation.simulator.job.OF_ANY_FILES", ("fashion-mnist",))
    assert "0 runs to do, 1 finished before" in table(*arguments)[1]
    (folder / "result.json").unlink()
    (folder / "state").mkdir(exist_ok=True)
    (folder / "state" / "run.json").write_text(json.dumps(earlier))
    assert "begun" in table(*arguments, "--dry-run")[1]
    idle = {**earlier["settings"], "serve": "downloaded"}  # which earlier versions named, too
    (folder / "state" / "run.json").write_text(json.dumps({**earlier, "settings": idle}))
    assert "begun" in table(*arguments, "--dry-run")[1]
    (folder / "state" / "run.json").write_text(json.dumps({**earlier, "samples": "others"}))
    assert "holds another run: samples was 'others'" in table(*arguments)[2]


def test_a_column_can_be_run_though_without_one_of_its_settings_nothing_could(tmp_path: Path):
    asked = {"num_clients": 3, "num_absent": 2}  # the preset has two clients, of whom two can't be absent
    column = plan.Column(scenario="gradual", dataset="fashion-mnist", set=asked)
    table = msgspec.structs.replace(paper_table("1"), columns=(column,), rows=(), notes=())
    (run,) = Planner(choice(tmp_path)).runs(table)
    assert (run.state, run.problem) == (State.MISSING, "")
    assert "nudge+num_clients=3+num_absent=2" in str(run.folder)


def test_more_absent_clients_than_the_fleet_has_are_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = paper_table("15")
    monkeypatch.setattr(
        "replayfleet.federation.simulator.tables.plan.load_any_dataset", lambda *_, **__: _dataset(tmp_path)
    )
    runs = Planner(choice(tmp_path, datasets=())).runs(table)
    states = [run.state for run in runs]
    assert states == [State.MISSING, State.MISSING, State.IMPOSSIBLE, State.IMPOSSIBLE]
    assert "num_absent is 4" in runs[3].problem


def test_a_table_s_own_setting_that_no_chosen_method_has_is_none_s_fault(table: Table) -> None:
    _, _, err = table("fedgp-rotated", "--methods", "fedavg", *SIZE, "--dry-run")
    assert "no method of this table has it" not in err


def _dataset(tmp_path: Path) -> Any:
    from replayfleet.federation.streams.datasets import load_dataset

    return load_dataset("fashion-mnist", data_root=tmp_path / "data")


def test_a_setting_counts_where_a_method_has_it_and_is_refused_where_none_has(table: Table):
    arguments = ["1", "--methods", "nudge", "--scenario", "gradual", *SIZE, "--dry-run"]
    assert "--set strength=2" in table(*arguments, "--set", "strength=2")[1]
    code, _, err = table(*arguments, "--set", "strenth=2")
    assert code == 2
    assert "--set strenth: no method of this table has it; did you mean 'strength'?" in err


def test_a_setting_that_every_column_has_of_its_own_is_refused(tmp_path: Path):
    column = plan.Column(scenario="gradual", dataset="fashion-mnist", set={"samples_per_class": 3})
    table = msgspec.structs.replace(paper_table("1"), columns=(column,), rows=(), notes=())
    assert Planner(choice(tmp_path, overrides=["samples_per_class=3"])).runs(table)
    with pytest.raises(SettingsError, match="--set samples_per_class: all rows or columns of this table set it"):
        Planner(choice(tmp_path, overrides=["samples_per_class=4"])).runs(table)
    absent = msgspec.structs.replace(table, columns=(msgspec.structs.replace(column, set={"num_absent": 1}),))
    with pytest.raises(SettingsError, match="--set num_absent: all rows or columns of this table set it"):
        Planner(choice(tmp_path, overrides=["samples_per_class=3", "num_absent=0"])).runs(absent)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["99"], "unknown table '99'"),
        (["1", "--methods", "nudg"], "unknown method 'nudg'; did you mean 'nudge'?"),
        (["1", "--scenario", "extreme"], "table 1 has no such column"),
        (["1", "--dataset", "fashion-mnist,cifar10"], "table 1 has no such column 'cifar10'"),
        (["1", "--methods", "pfedgrp-ddpm", "--dataset", "fashion-mnist"], "no number of pFedGRP + DDPM on Expt. 1"),
        (["1", "--seeds", "a"], "expected whole numbers with commas between"),
        (["1", "--seeds", ","], "--seeds is empty"),
        (["1", "--jobs", "0"], "--jobs is 0"),
        (["1", "--minutes", "-1"], "--minutes is '-1', expected a number, at least 0"),
        (["1", "--settings", "big"], "unknown settings 'big'"),
        (["10", "--features", "incept"], "did you mean 'inception'?"),
        (["1", "--features", "inception"], "leave it out for table 1"),
        (["1", "--methods", "centralized", *SIZE, "--set", "strength=much"], "--set strength=much: expected a number"),
        (["1", "--methods", "nudge", *SIZE, "--set", "num_clients=3"], "--clients and --set num_clients=3 are about"),
        (["1", "--methods", "nudge", *SIZE, "--set", "overlap=a"], "--set overlap=a: expected a whole number"),
        (["1", "--flavour", "x"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(table: Table, tmp_path: Path, arguments: Any, complaint: str):
    code, _, err = table(*arguments)
    assert code == 2
    assert err.startswith("fleet-sim: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", ["1", "6"])
@pytest.mark.parametrize("out", ["file", "file/below"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_folder_that_cannot_be_made_is_refused_at_once(
    table: Table, tmp_path: Path, number: str, out: str, dry: list[str]
):
    (tmp_path / "file").write_text("mine")
    code, _, err = table(number, *dry, out=out)
    assert code == 2
    why = f"file/below can't be made: {tmp_path}/file is a file" if "/" in out else "file is a file, not a folder"
    assert err == f"fleet-sim: --out: {why}; choose another\n"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_table_needs_a_number_and_a_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for arguments, complaint in (([], "--list shows the tables"), (["1"], "--out is missing")):
        monkeypatch.setattr(sys, "argv", ["fleet-sim", "table", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 2
        assert complaint in capsys.readouterr().err


def test_costs_take_update_counts_and_accuracies_from_runs(table: Table, tmp_path: Path):
    table("1", "--methods", "nudge", "--scenario", "gradual", *SIZE)
    done = tmp_path / "out/runs/nudge"
    done.rename(tmp_path / "out/runs/pfedgrp")
    code, out, _ = table("7")
    (line,) = [line for line in out.splitlines() if line.startswith("| pFedGRP + WGAN-GP |")]
    assert code == 0
    assert "| 24.7 / 6 | 0.5 |" in line
    assert line.endswith("gradual, settings tiny, 3 rounds, 1 seed |")
    assert (tmp_path / "out/table-7.md").read_text() == out


def test_a_damaged_result_is_one_line(table: Table, tmp_path: Path):
    path = tmp_path / "out/runs/pfedgrp/gradual/fashion-mnist/seed-0/result.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"run": {')
    code, _, err = table("7")
    assert code == 2
    assert "seed-0/result.json can't be read" in err
    assert "remove its folder" in err


@pytest.mark.parametrize("number", ["6", "7"])
@pytest.mark.parametrize("word", ["--settings small", "--seeds 0", "--methods fedavg", "--rounds 3", "--download"])
def test_what_a_table_of_costs_cannot_use_is_refused(table: Table, tmp_path: Path, number: str, word: str):
    code, out, err = table(number, *word.split())
    assert (code, out) == (2, "")
    assert f"table {number} runs nothing and takes only --out and --dry-run, not {word.split()[0]}" in err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_table_of_costs_writes_nothing(table: Table, tmp_path: Path):
    code, out, _ = table("7", "--dry-run")
    assert code == 0
    assert out.startswith("# Table 7")
    assert not (tmp_path / "out").exists()


_CHILD = """
import sys
sys.argv = ['fleet-sim', '_run']
sys.path.insert(0, {tests!r})
from replayfleet.federation.methods import METHODS
from support.nudge_method import NudgeMethod
METHODS['nudge'] = NudgeMethod
from replayfleet.federation.simulator.simulation import Simulation
import time
original = Simulation._round
def slow(self, round_index, *arguments):
    if round_index >= {slow_from}:
        time.sleep(60)
    return original(self, round_index, *arguments)
Simulation._round = slow
from replayfleet.federation.simulator.cli import main
main()
"""


def test_a_killed_process_is_reported_and_its_run_goes_on_from_its_checkpoints(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tests = str(Path(__file__).parents[3])
    monkeypatch.undo()
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(METHODS, "nudge", NudgeMethod)
    monkeypatch.chdir(tmp_path)

    def slow_from(round_index: int) -> None:
        command = (sys.executable, "-c", _CHILD.format(tests=tests, slow_from=round_index))
        monkeypatch.setattr(running, "child_command", lambda *_, **__: command)

    slow_from(2)
    folder = tmp_path / "out/runs/nudge/gradual/fashion-mnist/seed-0"
    (run,) = Planner(choice(tmp_path, scenarios=("gradual",))).runs(paper_table("1"))
    process = running.launch_process(run)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "state/round-0001.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    path = folder / "state/run.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps({**run, "num_threads": 3}))
    (begun,) = Planner(choice(tmp_path, scenarios=("gradual",))).runs(paper_table("1"))
    assert begun.state is State.BEGUN
    assert begun.spec.threads == 3
    slow_from(99)
    assert running.Runner([begun], 1, running.launch_process, show=lambda _line: None).run_all() == []
    log = (folder / running.LOG).read_text()
    assert log.count("round 0 ") == 1
    assert json.loads((folder / "result.json").read_text())["command"][:2] == ["fleet-sim", "nudge"]


def test_a_noise_floor_is_each_row_again_from_other_last_bits(tmp_path: Path):
    runs = Planner(choice(tmp_path, noise_floor=True, scenarios=("gradual",), seeds=(0, 1))).runs(paper_table("1"))
    assert [(run.seed, run.spec.perturb_weights) for run in runs] == [(0, 0.0), (0, 1e-7), (1, 0.0)]
    assert runs[1].name == "nudge+perturbed/gradual/fashion-mnist/seed-0"
    assert runs[1].row.label == "nudge, again from weights * (1 + 1e-07)"
    assert len({run.folder for run in runs}) == 3
