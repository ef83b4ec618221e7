"""The table of driving: which runs it needs, what it says about them, and that real runs are made once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.driving_folder import write_driving

from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.plan import Choice, State
from replayfleet.scripts.experiments import driving_crops

TOWNS = {"Town01": [[0, 3]] * 12, "Town02": [[1, 0], [4]] * 6}


def choice(tmp_path: Path, **changes: Any) -> Choice:
    if not (tmp_path / "data").exists():
        write_driving(tmp_path / "data", TOWNS)
    given = {"out": tmp_path / "out", "preset": "tiny", "seeds": (0, 1), "data_root": tmp_path / "data", "rounds": 2}
    return Choice(**{**given, **changes})


def finished(method: str, by_place: Mapping[str, float], seed: int) -> Result:
    """Return a result that no run made."""
    client = ClientRecord(
        classes=(0,),
        accuracy=0.5,
        num_test=4,
        num_seen=4,
        class_accuracy={0: 0.5},
        train_s=1.0,
        bytes_up=0,
        bytes_up_everything=0,
        bytes_down=0,
        bytes_down_everything=0,
        sub_generators_sent=(),
        num_sub_generators_held=0,
        accuracy_by_place=dict(by_place),
    )
    mean = sum(by_place.values()) / len(by_place)
    record = RoundRecord(round=0, accuracy=0.5, clients={"client-0": client}, aggregate_s=0.0, round_s=2.0)
    keys = ("final_accuracy", "average_accuracy", "average_forgetting", "sub_generator_updates")
    return Result(
        run={
            "method": method,
            "settings": {},
            "num_threads": 1,
            "run_seed": seed,
            "stream": {"num_clients": 2, "num_rounds": 20, "samples_per_class": 40},
        },
        stream={"changes": [], "change_name": "every client reaches its next town"},
        rounds=[record],
        summary={**dict.fromkeys(keys, 0.5), "place_accuracy": mean},
        hardware={"processor": "abacus"},
        versions={},
        commit="",
        wall_s=1.0,
        command=[],
    )


def table(**by_place: Mapping[str, float]) -> driving_crops.Table:
    results = {name: {s: finished(name, places, s) for s in (0, 1)} for name, places in by_place.items()}
    return driving_crops.Table(results, [], "small", ["python", "-m", "replayfleet.scripts.experiments.driving_crops"])


def test_the_plan_is_every_method_and_seed_over_two_vehicles(tmp_path: Path):
    runs = driving_crops.plan(choice(tmp_path))
    assert [(run.row.method, run.seed) for run in runs[:4]] == [(name, 0) for name in driving_crops.METHODS_SHOWN]
    assert len(runs) == 8
    assert {run.state for run in runs} == {State.MISSING}
    assert {(run.num_clients, run.num_rounds) for run in runs} == {(2, 2)}
    words = " ".join(runs[0].arguments())
    assert words.startswith("pfedgrp --scenario driving --dataset carla-crops --settings tiny --clients 2 --rounds 2")


def test_towns_count_alike_and_the_aims_are_judged_by_the_mean_lead():
    shown = table(
        pfedgrp={"Town01": 0.8, "Town02": 0.6}, fedavg={"Town01": 0.9, "Town02": 0.2}, centralized={"Town01": 0.76}
    )
    text = shown.markdown()
    assert "| pfedgrp | 70.0 ± 0.0 | 50.0 ± 0.0 |" in text
    assert "| fedavg | 90.0 | 20.0 |" in text
    assert "| centralized | 76.0 | - |" in text
    assert "| pfedgrp above fedavg by at least 10 points | +15.0 ± 0.0 | yes |" in text
    assert "| pfedgrp at most 5 points below centralized | -6.0 ± 0.0 | no |" in text
    assert "pfedgrp, seed 1: 2 s of rounds on abacus, 1 threads" in text
    aims = shown.values()["aims"]
    assert aims[0]["points_ahead"]["mean"] == pytest.approx(15)


def test_what_was_not_run_is_not_judged(tmp_path: Path):
    shown = driving_crops.Table.of(choice(tmp_path, seeds=(0,)), [], ["x"])
    text = shown.markdown()
    assert "Nothing has been run yet" in text
    assert "| pfedgrp above fedavg by at least 10 points | - | not measured |" in text
    assert "- No numbers of pfedgrp, seed 0: not run." in text
    assert shown.chart() == b""


def test_runs_are_made_once_and_written_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = choice(tmp_path)
    words = ["--out", str(asked.out), "--settings", "tiny", "--seeds", "0", "--methods", "fedavg", "--rounds", "2"]
    words += ["--data-root", str(asked.data_root), "--jobs", "1", "--set", "local_epochs=1"]
    monkeypatch.setattr(sys, "argv", ["driving_crops", *words])
    for to_do in (1, 0):
        with pytest.raises(SystemExit) as stopped:
            driving_crops.main()
        assert stopped.value.code == 0
        assert f"{to_do} runs to do, {1 - to_do} finished before" in capsys.readouterr().out
    values = json.loads((asked.out / "driving.json").read_text())
    (run,) = values["runs"]
    assert (run["method"], run["seed"]) == ("fedavg", 0)
    assert sorted(run["by_town"]["client-1"]) == ["Town01", "Town02"]
    assert run["summary"]["place_accuracy"] >= 0
    assert (asked.out / "driving.png").read_bytes().startswith(b"\x89PNG")
    assert "| fedavg |" in (asked.out / "driving.md").read_text()


def test_an_unknown_method_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = choice(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "--methods", "fedavgg", "--out", str(asked.out)])
    with pytest.raises(SystemExit) as stopped:
        driving_crops.main()
    assert stopped.value.code == 2
    assert "unknown method 'fedavgg'; did you mean 'fedavg'" in capsys.readouterr().err
