"""The table of detectors that forget: which runs it needs, what it asks of them, and that real runs are made once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.driving_folder import write_driving

from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables.plan import Choice, State
from replayfleet.scripts.experiments import driving_boxes
from replayfleet.scripts.experiments.driving_experiment import FinishedRuns

TOWNS = {"Town01": [[0, 3]] * 8, "Town02": [[1, 0], [4]] * 4, "Town05": [[2], [0]] * 4}


def choice(tmp_path: Path, **changes: Any) -> Choice:
    if not (tmp_path / "data").exists():
        write_driving(tmp_path / "data", TOWNS)
    given = {"out": tmp_path / "out", "preset": "tiny", "seeds": (0, 1), "data_root": tmp_path / "data", "rounds": 3}
    return Choice(**{**given, "overrides": ("late_town=Town05",), **changes})


def finished(method: str, before: float, after: float) -> Result:
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
        accuracy_by_place={"Town01": after, "Town05": 0.5},
        mean_average_precision=0.1,
    )
    kept = {"earlier_kept": after / before} if before else {}
    return Result(
        run={
            "method": method,
            "settings": {},
            "num_threads": 1,
            "stream": {"num_clients": 2, "num_rounds": 21, "samples_per_class": 24},
        },
        stream={
            "changes": [18],
            "change_name": "",
            "late_change": {"client": "client-0", "town": "Town05", "round": 18},
        },
        rounds=[RoundRecord(round=0, accuracy=0.5, clients={"client-0": client}, aggregate_s=0.0, round_s=2.0)],
        summary={"earlier_before": before, "earlier_after": after, "final_accuracy": 0.5, **kept},
        hardware={"processor": "abacus"},
        versions={},
        commit="",
        wall_s=1.0,
        command=[],
    )


def table(**numbers: tuple[float, float]) -> driving_boxes.Table:
    results = {name.replace("_", "-"): {0: finished("fedavg", *pair)} for name, pair in numbers.items()}
    return driving_boxes.Table(FinishedRuns(results), "small", "Town05", ["x"])


def test_the_plan_is_every_method_and_seed_with_one_late_town(tmp_path: Path):
    runs = driving_boxes.EXPERIMENT.plan(choice(tmp_path))
    names = [run.row.method for run in runs]
    assert names == ["fedavg", "der", "agem", "fedgp", "der-fedgp", "ideal"] * 2
    assert {run.state for run in runs} == {State.MISSING}
    words = " ".join(runs[4].arguments())
    assert words.startswith("fedgp --scenario driving --dataset carla-boxes --settings tiny --clients 2 --rounds 3")
    assert "--set late_town=Town05" in words
    assert "--set base=der" in words
    assert runs[4].name == "der-fedgp/driving/carla-boxes/seed-0"


def test_what_is_kept_is_shown_and_judged():
    text = table(fedavg=(0.5, 0.1), der_fedgp=(0.5, 0.4), ideal=(0.4, 0.4)).markdown()
    assert "at most 24 pictures in a round. The first client alone gets to Town05 in round 18." in text
    assert "| fedavg | 50.0 | 10.0 | 20.0 |" in text
    assert "| fedavg loses mAP on the earlier towns | 40.0 points lost | yes |" in text
    assert "keeps at least 80 % of the share that ideal keeps | 80.0 % of its kept share | yes |" in text
    assert "has at least 80 % of ideal's mAP on the earlier towns | 100.0 % of its mAP | yes |" in text


def test_too_little_is_judged_as_that():
    shown = table(fedavg=(0.5, 0.5), der_fedgp=(0.5, 0.2), ideal=(0.4, 0.4))
    assert [shown._aim(aim)[2] for aim in driving_boxes.AIMS] == ["no", "no", "no"]


def test_with_nothing_to_keep_nothing_is_judged():
    shown = table(der_fedgp=(0.0, 0.0), ideal=(0.0, 0.0))
    assert [shown._aim(aim)[1:] for aim in driving_boxes.AIMS] == [["-", "not measured"]] * 3


def test_runs_are_made_once_and_written_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = choice(tmp_path)
    words = ["--out", str(asked.out), "--settings", "tiny", "--seeds", "0", "--methods", "der-fedgp", "--rounds", "3"]
    words += ["--data-root", str(asked.data_root), "--jobs", "1", "--set", "samples_per_class=2"]
    monkeypatch.setattr(sys, "argv", ["driving_boxes", *words])
    for to_do in (1, 0):
        with pytest.raises(SystemExit) as stopped:
            driving_boxes.main()
        assert stopped.value.code == 0
        assert f"{to_do} runs to do, {1 - to_do} finished before" in capsys.readouterr().out
    values = json.loads((asked.out / "driving-boxes.json").read_text())
    (run,) = values["runs"]
    assert (run["method"], run["run"]["settings"]["base"], run["run"]["stream"]["late_town"]) == (
        "der-fedgp",
        "der",
        "Town05",
    )
    assert run["summary"]["earlier_before"] >= 0
    assert (asked.out / "driving-boxes.png").read_bytes().startswith(b"\x89PNG")
    assert "| der-fedgp |" in (asked.out / "driving-boxes.md").read_text()


def test_a_late_town_that_is_not_there_is_one_line_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = choice(tmp_path)
    words = ["--out", str(asked.out), "--settings", "tiny", "--seeds", "0", "--methods", "fedavg"]
    monkeypatch.setattr(sys, "argv", ["x", *words, "--data-root", str(asked.data_root), "--late-town", "Town5"])
    with pytest.raises(SystemExit) as stopped:
        driving_boxes.main()
    assert stopped.value.code == 1
    assert "late_town 'Town5' is no town of the recording; did you mean 'Town05'" in capsys.readouterr().out
