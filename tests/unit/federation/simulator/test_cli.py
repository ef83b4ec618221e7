from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
from support.image_sets import striped, write_fashion_mnist, write_tree
from support.nudge_method import NudgeMethod

from replayfleet.federation.claimed import claimed
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.variants import VARIANTS
from replayfleet.federation.simulator import cli, client_threads, job
from replayfleet.federation.simulator.job import prepare
from replayfleet.federation.simulator.result import commit
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.simulation import Simulation

FleetSim: TypeAlias = Callable[..., tuple[int, str, str]]

SIZE = ["--clients", "2", "--rounds", "4", "--set", "samples_per_class=3", "--set", "test_samples_per_class=1"]


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(METHODS, "nudge", NudgeMethod)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fleet_sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fleet-sim", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


def simulate(fleet_sim: FleetSim, *arguments: Any, out: str = "out"):
    return fleet_sim("nudge", "--settings", "tiny", "--threads", "1", "--out", out, *SIZE, *arguments)


@pytest.mark.usefixtures("drawn")
def test_a_run_writes_result_and_chart(fleet_sim: FleetSim, tmp_path: Path):
    code, out, err = simulate(fleet_sim, "--seed", "5")
    assert (code, err) == (0, "")
    assert out.count("\nround ") == 4
    assert "sub-generators 4 of 4 sent" in out
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["run"]["method"] == "nudge"
    assert result["run"]["settings"] == {"strength": 1.0, "retrain": False}
    assert result["run"]["run_seed"] == result["run"]["stream"]["seed"] == 5
    assert [record["round"] for record in result["rounds"]] == [0, 1, 2, 3]
    client = result["rounds"][3]["clients"]["client-1"]
    assert 0 <= client["accuracy"] <= 1
    assert (client["num_seen"], client["num_test"]) == (24, 8)
    assert client["bytes_up"] > 0
    assert result["summary"]["sub_generator_updates"] == 8
    assert result["versions"]["torch"]
    assert result["hardware"]["num_cores"] >= 1
    assert result["command"][:2] == ["fleet-sim", "nudge"]
    assert str(tmp_path) not in "".join(result["command"]), "where folders lie here is nobody else's affair"


def test_a_commit_is_that_of_our_checkout_not_of_a_repository_around_a_virtual_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    installed = tmp_path / ".venv" / "result.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr("replayfleet.federation.simulator.result.__file__", str(installed))
    assert commit() == ""
    git("add", str(installed))
    git("commit", "-q", "-m", "ours")
    assert commit() == git("rev-parse", "HEAD")


def test_a_run_names_the_chart_of_losses_where_something_was_trained(fleet_sim: FleetSim):
    assert simulate(fleet_sim)[1].endswith("wrote out/result.json and accuracy.png\n")
    words = ["fedavg", "--settings", "tiny", "--threads", "1", "--out", "trained", *SIZE]
    assert fleet_sim(*words)[1].endswith("wrote trained/result.json, accuracy.png and losses.png\n")


def test_a_run_whose_every_upload_was_left_out_ends_with_an_error(fleet_sim: FleetSim, tmp_path: Path):
    wild = ["--set", "learning_rate=1e30", "--quarantine"]
    code, _, err = fleet_sim("fedavg", "--settings", "tiny", "--threads", "1", "--out", "out", *SIZE, *wild)
    assert code == 4
    assert err.startswith("fleet-sim: every upload of every round was left out, so nobody learned anything: ")
    assert (tmp_path / "out" / "result.json").is_file()


def test_a_run_compared_with_centralized_has_a_regret(fleet_sim: FleetSim, tmp_path: Path):
    simulate(fleet_sim, out="first")
    path = tmp_path / "first" / "result.json"
    upper = json.loads(path.read_text())
    upper["run"]["method"] = "centralized"
    for record in upper["rounds"]:
        record["accuracy"] += 0.25
    path.write_text(json.dumps(upper))
    for compared in (path.parent, path):
        code, out, _ = simulate(fleet_sim, "--compare", compared, "--overwrite")
        assert code == 0
        assert "average regret 25.00" in out
    summary = json.loads((tmp_path / "out" / "result.json").read_text())["summary"]
    assert summary["average_regret"] == pytest.approx(0.25)


def test_a_run_compared_with_any_other_method_has_none(fleet_sim: FleetSim, tmp_path: Path):
    simulate(fleet_sim, out="first")
    code, out, _ = simulate(fleet_sim, "--compare", tmp_path / "first" / "result.json")
    assert code == 0
    assert "regret" not in out
    assert "average_regret" not in json.loads((tmp_path / "out" / "result.json").read_text())["summary"]


def test_overlap_and_absences_are_options_of_the_stream(fleet_sim: FleetSim, tmp_path: Path):
    code, out, err = simulate(fleet_sim, "--scenario", "extreme", "--overlap", "2", "--absent", "1", "--rounds", "3")
    assert (code, err) == (0, "")
    assert "extreme with 2 classes shared: 2 clients (1 absent), 3 rounds" in out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["run"]["stream"]["overlap"], result["run"]["stream"]["num_absent"]) == (2, 1)
    assert [sum(c["present"] for c in record["clients"].values()) for record in result["rounds"]] == [2, 1, 1]
    assert [len(c["classes"]) for c in result["rounds"][0]["clients"].values()] == [4, 4]


def test_more_images_of_the_same_ten_classes_are_other_samples(tmp_path: Path):
    names = {f"n{class_id}/{number}.jpeg": striped() for class_id in range(10) for number in range(26)}
    write_tree(tmp_path / "imagenet-10", names)
    sizes = ("samples_per_class=2", "test_samples_per_class=1")
    asked = RunSpec(
        method="nudge", dataset="imagenet-10", preset="tiny", overrides=sizes, out=tmp_path / "out", data_root=tmp_path
    )
    first = prepare(asked).identity
    assert prepare(asked).identity == first
    write_tree(tmp_path / "imagenet-10", {f"n{class_id}/more.jpeg": striped() for class_id in range(10)})
    assert prepare(asked).identity["samples"] != first["samples"]


def test_a_result_from_before_overlap_and_absences_is_still_compared(fleet_sim: FleetSim, tmp_path: Path):
    simulate(fleet_sim, out="first")
    path = tmp_path / "first" / "result.json"
    old = json.loads(path.read_text())
    del old["run"]["stream"]["overlap"], old["run"]["stream"]["num_absent"]
    path.write_text(json.dumps(old))
    assert simulate(fleet_sim, "--compare", path)[0] == 0
    assert simulate(fleet_sim, "--overwrite", "--overlap", "2", "--compare", path)[0] == 2


def test_a_run_on_other_files_is_neither_compared_nor_resumed(fleet_sim: FleetSim, tmp_path: Path):
    for folder in ("mine", "copy"):
        write_tree(tmp_path / folder, {f"{name}/{i}.png": striped() for name in ("cat", "dog") for i in range(30)})
    mine = ("--dataset", "folder", "--data-root", "mine")
    assert simulate(fleet_sim, *mine, out="first")[0] == 0
    there = ("--dataset", "folder", "--data-root", "copy", "--compare", "first")
    assert simulate(fleet_sim, *there, out="second")[0] == 0, "where the files lie is no part of them"
    (tmp_path / "copy" / "dog" / "0.png").rename(tmp_path / "copy" / "dog" / "other.png")
    code, _, err = simulate(fleet_sim, *there, out="third")
    assert (code, "its data set folder held other samples, or an earlier version" in err) == (2, True)
    (tmp_path / "mine" / "cat" / "0.png").unlink()
    code, _, err = simulate(fleet_sim, *mine, "--resume", out="first")
    assert (code, "what data set folder holds has changed since, or an earlier version began it" in err) == (2, True)


def test_the_charts_of_a_run_never_become_pictures_of_its_data_set(fleet_sim: FleetSim, tmp_path: Path):
    pictures = {f"{name}/{i}.png": striped() for name in ("cat", "dog") for i in range(30)}
    write_tree(tmp_path / "mine", pictures)
    for part in ("train", "test"):
        write_tree(tmp_path / "parted" / part, pictures)
    for data, out in (("mine", "mine/runs"), ("mine", "mine/cat"), ("parted", "parted/train/runs")):
        code, _, err = simulate(fleet_sim, "--dataset", "folder", "--data-root", data, out=out)
        assert (code, f"out dir {out} lies among the classes of data set folder" in err) == (2, True)
    assert simulate(fleet_sim, "--dataset", "folder", "--data-root", "parted", out="parted/runs")[0] == 0
    assert not [path for path in (tmp_path / "mine").rglob("*") if path.name in {"accuracy.png", "state"}]


def test_a_run_on_another_stream_is_not_compared(fleet_sim: FleetSim, tmp_path: Path):
    simulate(fleet_sim, "--seed", "1", out="first")
    code, _, err = simulate(fleet_sim, "--compare", tmp_path / "first" / "result.json")
    assert code == 2
    assert "its stream was {'seed': 1}, this run's is {'seed': 0}" in err
    assert not (tmp_path / "out").exists()


def interrupted_in(round_index: int) -> Callable[..., Any]:
    original = Simulation._round

    def interrupted(self: Simulation, index: int, *arguments: Any) -> Any:
        if index == round_index:
            raise KeyboardInterrupt
        return original(self, index, *arguments)

    return interrupted


def test_ctrl_c_a_second_time_ends_at_once_without_a_traceback(
    fleet_sim: FleetSim, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(code: int) -> None:
        raise SystemExit(f"at once, {code}")

    monkeypatch.setattr(Simulation, "_round", interrupted_in(0))
    monkeypatch.setattr(client_threads, "still_training", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(cli.os, "_exit", ended)
    code, _, err = simulate(fleet_sim)
    assert code == "at once, 130"
    assert "--resume" in err


def test_an_interrupted_run_says_how_to_go_on_and_resumes(
    fleet_sim: FleetSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_round", interrupted_in(2))
        code, _, err = simulate(fleet_sim)
    assert code == 130
    assert "--resume" in err
    code, out, err = simulate(fleet_sim, "--resume")
    assert code == 0
    assert "round 1" not in out
    simulate(fleet_sim, out="whole")
    resumed, whole = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("out", "whole"))
    assert [r["accuracy"] for r in resumed["rounds"]] == [r["accuracy"] for r in whole["rounds"]]


def test_a_resumed_run_serves_and_tells_what_was_chosen_before(
    fleet_sim: FleetSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_fashion_mnist(tmp_path / "data", train_per_class=24, test_per_class=4)
    sizes = ["--clients", "2", "--rounds", "2", "--set", "samples_per_class=12", "--set", "test_samples_per_class=2"]
    words = ["pfedgrp-plus", "--settings", "tiny", "--model", "lenet", "--serve", "best", *sizes, "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_round", interrupted_in(1))
        assert fleet_sim(*words, "out")[0] == 130
    assert fleet_sim(*words, "out", "--resume")[0] == 0
    assert fleet_sim(*words, "whole")[0] == 0
    resumed, whole = (json.loads((tmp_path / name / "result.json").read_text())["rounds"] for name in ("out", "whole"))
    for one, other in zip(resumed, whole, strict=True):
        for name, client in other["clients"].items():
            assert client["served"], "something was chosen"
            told = ("served", "evidence", "accuracy", "bytes_up")
            assert [one["clients"][name][key] for key in told] == [client[key] for key in told]


def test_a_run_whose_first_round_failed_is_begun_anew(fleet_sim: FleetSim, monkeypatch: pytest.MonkeyPatch):
    for round_index, again in ((0, 0), (1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "_round", interrupted_in(round_index))
            assert simulate(fleet_sim, out=f"{round_index}")[0] == 130
        assert simulate(fleet_sim, out=f"{round_index}")[0] == again


def test_an_earlier_run_is_replaced_only_when_asked(fleet_sim: FleetSim):
    assert simulate(fleet_sim)[0] == 0
    code, _, err = simulate(fleet_sim)
    assert code == 2
    assert "holds an earlier run" in err
    assert simulate(fleet_sim, "--overwrite")[0] == 0


@pytest.mark.parametrize("name", ["accuracy.png", "losses.png"])
def test_a_chart_of_somebody_elses_is_replaced_only_when_asked(fleet_sim: FleetSim, tmp_path: Path, name: str):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert simulate(fleet_sim)[0] == 2
    assert "holds no run to resume" in simulate(fleet_sim, "--resume")[2]
    assert (tmp_path / "out" / name).read_text() == "mine"
    (tmp_path / "out/state").write_text("a file")
    assert "can't be written" in simulate(fleet_sim, "--overwrite")[2]


def test_a_folder_in_which_a_run_is_going_on_is_left_alone(fleet_sim: FleetSim, tmp_path: Path):
    with claimed(tmp_path / "out/state"):
        code, _, err = simulate(fleet_sim, "--overwrite")
    assert code == 2
    assert "is in use: another process runs there" in err
    assert not (tmp_path / "out/state/run.json").exists()
    assert simulate(fleet_sim, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["pfedgpr"], "unknown method 'pfedgpr'; did you mean 'pfedgrp'?"),
        (["nudge", "--scenario", "gradul"], "unknown scenario 'gradul'; did you mean 'gradual'?"),
        (["nudge", "--dataset", "fashion"], "unknown data set 'fashion'; did you mean 'fashion-mnist'?"),
        (["nudge", "--settings", "big"], "unknown settings 'big'; known: demo, medium, paper, small, tiny"),
        (["nudge", "--sampler", "onx"], "sampler is 'onx', expected eager or onnx"),
        (["nudge", "--serve", "best"], "--serve best: clients of nudge serve what they download; leave it out"),
        (["nudge", "--set", "strenth=2"], "did you mean 'strength'?"),
        (["nudge", "--set", "strength=much"], "expected a number"),
        (["nudge", "--set", "strength"], "expected KEY=VALUE"),
        (
            ["nudge", "--settings", "tiny", "--rounds", "11", "--set", "samples_per_class=3"],
            "lasts for 10 rounds",
        ),
        (["nudge", "--clients", "0"], "--clients is '0', expected a whole number, 1 to 100000"),
        (["nudge", "--overlap", "7"], "overlap is 7, expected at most 6"),
        (["nudge", "--absent", "2"], "num_absent is 2, expected 0 to 1"),
        (["nudge", "--seed", "-1"], "--seed is '-1', expected a whole number, 0 to"),
        (["nudge", "--threads", "0"], "--threads is '0'"),
        (["nudge", "--workers", "0"], "--workers is '0'"),
        (["nudge", "--rounds", "many"], "--rounds is 'many', expected a whole number"),
        (["nudge", "--data-root", "absent"], "data root absent is no folder"),
        (["nudge", "--resume"], "holds no run to resume"),
        (["nudge", "--resume", "--overwrite"], "exclude each other"),
        (["nudge", "--compare", "absent.json"], "absent.json: can't be read"),
        (["nudge", "--flavour", "x"], "No such option"),
        ([], "Missing argument 'METHOD'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    fleet_sim: FleetSim, tmp_path: Path, arguments: Any, complaint: str
):
    sizes = [] if {"--settings", "--rounds"} & set(arguments) else ["--settings", "tiny", *SIZE]
    if "--clients" in arguments:
        sizes = []
    code, out, err = fleet_sim(*arguments, *sizes, "--out", "out")
    assert code == 2
    assert out == ""
    assert err.startswith("fleet-sim: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert not (tmp_path / "out").exists()


def test_a_missing_data_set_is_one_line_that_says_how_to_get_it(
    fleet_sim: FleetSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REPLAYFLEET_DATA", str(tmp_path / "nothing"))
    code, _, err = fleet_sim("nudge", "--dataset", "cifar-10", "--out", "out")
    assert code == 2
    assert err.count("\n") == 1
    assert "cifar-10 not found" in err
    assert "cifar10-images.zip" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(fleet_sim: FleetSim, tmp_path: Path, out: str):
    (tmp_path / "file").write_text("mine")
    code, _, err = simulate(fleet_sim, out=out)
    assert code == 2
    assert "is a file" in err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_methods_and_their_variants_are_listed(fleet_sim: FleetSim):
    code, out, err = fleet_sim("--list")
    assert (code, err) == (0, "")
    assert {line.split()[0] for line in out.splitlines()} == {*METHODS, *VARIANTS}
    assert "pfedgrp-as3  (pfedgrp --set generators=single)\n" in out


def test_help_answers_at_once_and_without_torch():
    code = (
        "import sys, replayfleet.federation.simulator.cli as cli\n"
        "sys.argv = ['fleet-sim', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'onnx'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--scenario" in done.stdout


def test_minutes_end_a_run_that_resume_completes(fleet_sim: FleetSim, tmp_path: Path):
    code, out, _ = simulate(fleet_sim, "--minutes", "0")
    assert code == 3
    assert "0 minutes leave no time for more; the same command with --resume goes on" in out
    assert not (tmp_path / "out" / "result.json").exists()
    code, _, err = simulate(fleet_sim, "--resume")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("minutes", ["-1", "nan"])
def test_minutes_that_are_none_are_refused(fleet_sim: FleetSim, minutes: str):
    code, _, err = simulate(fleet_sim, "--minutes", minutes)
    assert code == 2
    assert f"--minutes is '{minutes}', expected a number, at least 0" in err


def test_no_round_begins_that_would_end_after_the_minutes(fleet_sim: FleetSim, monkeypatch: pytest.MonkeyPatch):
    original = Simulation._round

    def lasting(self: Simulation, *arguments: Any) -> Any:
        outcome = original(self, *arguments)
        return dataclasses.replace(outcome, record=dataclasses.replace(outcome.record, round_s=40.0))

    monkeypatch.setattr(Simulation, "_round", lasting)
    code, out, _ = simulate(fleet_sim, "--minutes", "0.5")  # a round is told to take 40 of the 30 seconds
    assert code == 3
    assert out.count("\nround ") == 1


def test_a_run_that_died_before_it_had_begun_is_no_run(fleet_sim: FleetSim, tmp_path: Path):
    (tmp_path / "out" / "state").mkdir(parents=True)
    (tmp_path / "out" / "state" / "lock").touch()
    code, _, err = simulate(fleet_sim, "--resume")
    assert code == 2
    assert "holds no run to resume" in err
    code, _, err = simulate(fleet_sim)
    assert (code, err) == (0, "")


def test_a_resumed_run_says_who_ran_what_and_what_is_half_written_goes_away(
    fleet_sim: FleetSim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state, result = tmp_path / "out" / "state", tmp_path / "out" / "result.json"
    with monkeypatch.context() as patch:
        patch.setattr(job, "commit", lambda: "before")
        assert simulate(fleet_sim, "--minutes", "0")[0] == 3
    for left in (state / ".round-0001.json.x.tmp", state / "blobs" / ".ab.safetensors.y.tmp"):
        left.write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(job, "commit", lambda: "after")
        assert simulate(fleet_sim, "--resume")[0] == 0
    found = json.loads(result.read_text())
    assert [(part["first_round"], part["commit"]) for part in found["parts"]] == [(0, "before"), (1, "after")]
    assert found["commit"] == "after"
    assert found["command"][-1] == "--resume"
    assert found["wall_s"] > found["rounds"][0]["round_s"]
    assert not list(state.rglob(".*.tmp"))
    with monkeypatch.context() as patch:  # nothing is left to run: whoever asks again has made nothing of it
        patch.setattr(job, "commit", lambda: "later")
        assert simulate(fleet_sim, "--resume")[0] == 0
    again = json.loads(result.read_text())
    assert (again["commit"], again["parts"]) == (found["commit"], found["parts"])
    assert again["wall_s"] >= sum(record["round_s"] for record in found["rounds"])


def test_a_run_in_one_part_has_no_list_of_parts_and_one_that_begins_anew_forgets_earlier_ones(
    fleet_sim: FleetSim, tmp_path: Path
):
    assert simulate(fleet_sim, "--minutes", "0")[0] == 3
    assert simulate(fleet_sim, "--overwrite")[0] == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["parts"] == []


def test_a_round_that_somebody_changed_is_said_in_one_line(fleet_sim: FleetSim, tmp_path: Path):
    assert simulate(fleet_sim)[0] == 0
    path = tmp_path / "out/state/round-0003.json"
    changed = json.loads(path.read_text())
    changed["record"]["clients"]["client-1"]["class_accuracy"].popitem()
    path.write_text(json.dumps(changed))
    code, _, err = simulate(fleet_sim, "--resume")
    assert code == 2
    assert "its rounds don't fit" in err
    assert err.count("\n") == 1


def test_a_run_of_before_that_named_settings_which_change_nothing_is_resumed(fleet_sim: FleetSim, tmp_path: Path):
    assert simulate(fleet_sim, "--minutes", "0")[0] == 3
    path = tmp_path / "out" / "state" / "run.json"
    run = json.loads(path.read_text())
    for idle, code in ({"beta": 0.5}, 2), ({"beta": 0.0, "serve": "downloaded"}, 0):
        path.write_text(json.dumps({**run, "settings": {**run["settings"], **idle}}))
        assert simulate(fleet_sim, "--resume")[0] == code, idle


@pytest.mark.parametrize("damaged", ["parts.json", "round-0001.json"])
def test_a_resumed_run_whose_state_is_damaged_keeps_the_result_that_it_has(
    damaged: str, fleet_sim: FleetSim, tmp_path: Path
):
    assert simulate(fleet_sim)[0] == 0
    found = (tmp_path / "out/result.json").read_bytes()
    path = tmp_path / "out/state" / damaged
    path.write_bytes(path.read_bytes()[:20])
    assert simulate(fleet_sim, "--resume")[0] == 2
    assert (tmp_path / "out/result.json").read_bytes() == found
    assert (tmp_path / "out/accuracy.png").exists()


def without_a_round(found: dict[str, Any]) -> None:
    found["rounds"].pop()


def without_a_client(found: dict[str, Any]) -> None:
    found["rounds"][1]["clients"].popitem()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (without_a_round, "it has 3 rounds, expected 4"),
        (without_a_client, "its rounds are of different clients"),
        (lambda found: found["run"].pop("method"), "doesn't say of which method"),
        (lambda found: found.update(schema=99), "it has schema 99, expected 1"),
        (lambda found: found["rounds"][0].update(accuracy=1e300), "not between 0 and 1"),
    ],
)
def test_a_result_that_is_not_whole_is_compared_with_nothing_before_anything_runs(
    damage: Callable[[dict[str, Any]], Any], why: str, fleet_sim: FleetSim, tmp_path: Path
):
    assert simulate(fleet_sim, out="first")[0] == 0
    path = tmp_path / "first/result.json"
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    code, _, err = simulate(fleet_sim, "--compare", path)
    assert code == 2
    assert f"--compare {path}: " in err
    assert why in err
    assert not (tmp_path / "out").exists()


def test_regret_is_measured_against_one_centralized(fleet_sim: FleetSim, tmp_path: Path):
    assert simulate(fleet_sim, out="first")[0] == 0
    path = tmp_path / "first/result.json"
    path.write_text(path.read_text().replace('"nudge"', '"centralized"'))
    assert "more than one run of centralized" in simulate(fleet_sim, "--compare", path, "--compare", path)[2]


def test_a_folder_in_the_place_of_a_result_is_one_line(fleet_sim: FleetSim, tmp_path: Path):
    (tmp_path / "out/accuracy.png").mkdir(parents=True)
    code, _, err = simulate(fleet_sim, "--overwrite")
    assert code == 2
    assert "accuracy.png can't be replaced" in err
    assert err.count("\n") == 1


def test_a_torch_device_that_is_not_there_stops_before_anything_is_written(fleet_sim: FleetSim, tmp_path: Path):
    code, _, err = simulate(fleet_sim, "--torch-device", "nonsense")
    assert code == 2
    assert "torch device 'nonsense' can't be used" in err
    assert "torch device 'meta' can't be used (it computes nothing)" in simulate(fleet_sim, "--torch-device", "meta")[2]
    assert not (tmp_path / "out").exists()


def test_a_setting_newer_than_kept_results_names_a_run_only_where_it_changes_it(tmp_path: Path):
    def settings(*overrides: str) -> dict[str, Any]:
        sizes = [word for word in SIZE if "=" in word]
        asked = RunSpec(
            method="mfcl",
            scenario="circulating",
            dataset="fashion-mnist",
            preset="tiny",
            out=tmp_path / "out",
            clients=2,
            rounds=2,
            overrides=[*sizes, *overrides],
        )
        found: dict[str, Any] = prepare(asked).identity["settings"]
        return found

    assert "replay_labels" not in settings()
    assert settings("replay_labels=own") == settings()
    assert settings("replay_labels=latents") == {**settings(), "replay_labels": "latents"}
