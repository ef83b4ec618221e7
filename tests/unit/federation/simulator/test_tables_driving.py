"""Our own tables over recorded driving: which runs they need, what is asked of them, that real runs are made once."""

from __future__ import annotations

import dataclasses
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from support.driving_folder import write_driving
from support.inline_runs import Inline
from support.recordings import carla_frames

from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.records import ClientRecord, RoundRecord
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.tables import running
from replayfleet.federation.simulator.tables.measured import Cell, judged, measured
from replayfleet.federation.simulator.tables.measured import cells as table_cells
from replayfleet.federation.simulator.tables.paper import PaperTable, paper_table
from replayfleet.federation.simulator.tables.plan import Choice, Planner, State
from replayfleet.federation.simulator.tables.report import Report

CROPS, BOXES = paper_table("driving-crops"), paper_table("driving-boxes")
RESULTS = Path(__file__).parents[4] / "results"


def recording(tmp_path: Path) -> Path:
    return write_driving(
        tmp_path / "data", {"Town01": [[0, 3]] * 12, "Town02": [[1, 0], [4]] * 6, "Town05": [[2], [0]] * 6}
    )


def finished(table: PaperTable, by_place: Mapping[str, float], summary: Mapping[str, float]) -> Result:
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
    late = {"late_change": {"client": "client-0", "town": "Town05", "round": 18}} if table is BOXES else {}
    return Result(
        run={
            "method": "fedavg",
            "settings": {},
            "stream": {"scenario": "driving", "num_clients": 2, "num_rounds": 21, "samples_per_class": 24},
        },
        stream={"changes": [18], "change_name": "somebody moves", **late},
        rounds=[RoundRecord(round=0, accuracy=0.5, clients={"client-0": client}, aggregate_s=0.0, round_s=2.0)],
        summary={"sub_generator_updates": 0.0, **summary},
        hardware={"processor": "abacus"},
        versions={},
        commit="",
        wall_s=1.0,
        command=[],
    )


def cells(table: PaperTable, results: Mapping[str, Mapping[int, Result]]) -> list[Cell]:
    found = []
    for row in table.rows:
        own = results.get(row.method, {})
        values: dict[str, dict[int, float]] = {}
        for seed, result in own.items():
            for metric, value in measured(result, None).items():
                values.setdefault(metric, {})[seed] = value
        found.append(
            Cell(
                row=row,
                column=table.columns[0],
                published={},
                values=values,
                results=own,
                folders={},
                missing={} if own else {0: "not run"},
            )
        )
    return found


def crops(**by_place: Mapping[str, float]) -> list[Cell]:
    made = {
        name: {
            seed: finished(CROPS, places, {"final_accuracy": 0.5, "place_accuracy": sum(places.values()) / len(places)})
            for seed in (0, 1)
        }
        for name, places in by_place.items()
    }
    return cells(CROPS, made)


def boxes(**kept: tuple[float, float]) -> list[Cell]:
    made = {}
    for name, (before, after) in kept.items():
        share = {"earlier_kept": after / before} if before else {}
        summary = {"earlier_before": before, "earlier_after": after, "final_accuracy": after, **share}
        made[name.replace("_", "-")] = {0: finished(BOXES, {"Town01": after, "Town05": 0.5}, summary)}
    return cells(BOXES, made)


def report(table: PaperTable, measured_cells: list[Cell]) -> Report:
    return Report(table=table, choice=Choice(out=Path("out"), seeds=(0, 1)), cells=measured_cells)


def met(table: PaperTable, measured_cells: list[Cell]) -> list[str]:
    return [line.split("|")[-2].strip() for line in report(table, measured_cells)._aims(table.columns[0])[2:-1]]


@pytest.mark.parametrize(
    ("table", "methods", "words"),
    [
        (
            CROPS,
            ["pfedgrp", "fedavg", "fedavg-replay", "centralized", "pfedgrp-plus"],
            "--scenario driving --dataset carla-crops",
        ),
        (
            BOXES,
            ["fedavg", "der", "agem", "fedgp", "der-fedgp", "er-fedgp", "ideal"],
            "--scenario driving --dataset carla-boxes",
        ),
    ],
)
def test_the_plan_is_every_method_and_seed_over_two_vehicles(
    tmp_path: Path, table: PaperTable, methods: list[str], words: str
):
    choice = Choice(
        out=tmp_path / "out",
        preset="tiny",
        seeds=(0, 1),
        data_root=recording(tmp_path),
        rounds=4,
        overrides=table.overrides,
    )
    runs = Planner(choice).runs(table)
    assert [(run.row.method, run.seed) for run in runs] == [(name, seed) for seed in (0, 1) for name in methods]
    assert {run.state for run in runs} == {State.MISSING}
    assert {(run.num_clients, run.num_rounds) for run in runs} == {(2, 4)}
    command = " ".join(runs[-2].spec.command())
    assert words in command
    assert ("--set late_town=Town05" in command) == (table is BOXES)
    assert runs[0].name == f"{methods[0]}/driving/{table.columns[0].dataset}/seed-0"


def test_towns_count_alike_and_the_aims_are_judged_by_the_mean_lead():
    made = crops(
        pfedgrp={"Town01": 0.8, "Town02": 0.6}, fedavg={"Town01": 0.9, "Town02": 0.2}, centralized={"Town01": 0.76}
    )
    text = report(CROPS, made).markdown()
    assert "| pfedgrp | 70.00 ± 0.00 | 50.00 ± 0.00 |" in text
    assert "| fedavg | 90.0 | 20.0 |" in text
    assert "| centralized | 76.0 | - |" in text
    assert "| pfedgrp above fedavg by at least 10 points | +15.0 ± 0.0 points | yes |" in text
    assert "| pfedgrp at most 5 points below centralized | -6.0 ± 0.0 points | no |" in text
    for method in ("fedavg-replay", "pfedgrp-plus"):
        assert f"{method} on driving, carla-crops, seed 0" in text
    assert "2 clients, 21 rounds, 24 samples per class and round at most." in text
    aims = report(CROPS, made).values()["aims"]
    assert aims[0]["measured"]["mean"] == pytest.approx(15)


def test_what_was_not_run_is_not_judged():
    text = report(CROPS, crops()).markdown()
    assert "No run has given a number of this table yet" in text
    assert "| pfedgrp above fedavg by at least 10 points | - | not measured |" in text


def test_what_is_kept_is_shown_and_judged():
    text = report(
        BOXES, boxes(fedavg=(0.5, 0.1), der_fedgp=(0.5, 0.4), er_fedgp=(0.5, 0.3), ideal=(0.4, 0.4))
    ).markdown()
    assert "24 pictures a round at most. client-0 alone gets to Town05 in round 18." in text
    assert "| fedavg | 50.00 | 10.00 | 20.00 |" in text
    assert "| fedavg loses mAP on the earlier towns | +40.0 points | yes |" in text
    assert "keeps at least 80 % of the share that ideal keeps | 80.0 % | yes |" in text
    assert "has at least 80 % of ideal's mAP on the earlier towns | 100.0 % | yes |" in text
    assert "has at least 60 % of ideal's mAP@0.5 on all towns | 75.0 % | yes |" in text


def test_too_little_is_judged_as_that_and_nothing_where_nothing_was_to_be_kept():
    too_little = boxes(fedavg=(0.5, 0.5), der_fedgp=(0.5, 0.2), er_fedgp=(0.5, 0.2), ideal=(0.4, 0.4))
    assert met(BOXES, too_little) == ["no"] * 4
    nothing = boxes(der_fedgp=(0.0, 0.0), er_fedgp=(0.0, 0.0), ideal=(0.0, 0.0))
    assert met(BOXES, nothing) == ["not measured"] * 4


def test_only_seeds_that_both_methods_have_are_compared():
    made = crops(pfedgrp={"Town01": 0.8}, fedavg={"Town01": 0.5})
    del made[1].values["PA"][1]
    found = judged(CROPS.aims[0], made)
    assert (found.num_seeds, found.mean) == (1, pytest.approx(30))


@pytest.mark.parametrize(
    ("number", "committed", "num_finished"), [("driving-crops", "driving", 15), ("driving-boxes", "driving-boxes", 12)]
)
def test_committed_results_are_still_found_and_read(number: str, committed: str, num_finished: int):
    table = paper_table(number)
    choice = Choice(
        out=RESULTS / committed, seeds=(0, 1, 2), data_root=carla_frames().parent, overrides=table.overrides
    )
    runs = [run for run in Planner(choice).runs(table) if run.state is State.FINISHED]
    assert len(runs) == num_finished
    text = report(table, [cell for cell in table_cells(table, runs, {}) if cell.results]).markdown()
    assert "not measured" not in text


def fleet_sim(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fleet-sim", "table", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(("number", "method"), [("driving-crops", "fedavg"), ("driving-boxes", "der-fedgp")])
@pytest.mark.usefixtures("drawn")
def test_runs_are_made_once_and_written_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str, method: str
):
    monkeypatch.setattr(running, "launch_process", Inline)
    out, dataset = tmp_path / "out", paper_table(number).columns[0].dataset
    words = [number, "--out", str(out), "--settings", "tiny", "--seeds", "0", "--methods", method, "--rounds", "3"]
    words += ["--data-root", str(recording(tmp_path)), "--jobs", "1", "--set", "samples_per_class=2"]
    for to_do in (1, 0):
        assert fleet_sim(monkeypatch, *words, "--set", "local_epochs=1") == 0
        assert f"to do, {1 - to_do} finished before" in capsys.readouterr().out
    (cell,) = json.loads((out / f"table-{number}.json").read_text())["cells"]
    assert cell["name"] == method
    assert "Town01" in cell["by_place"]
    assert cell["ours"]["PA"]["values"]["0"] >= 0
    run = json.loads((out / f"runs/{method}/driving/{dataset}/seed-0/result.json").read_text())["run"]
    assert run["stream"].get("late_town", "") == ("Town05" if number == "driving-boxes" else "")
    assert (out / f"table-{number}-driving-{dataset}.png").read_bytes().startswith(b"\x89PNG")
    assert f"| {method} |" in (out / f"table-{number}.md").read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--set", "late_town=Town5"], "late_town 'Town5' is no town of the recording; did you mean 'Town05'"),
        (["--methods", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
):
    given = ["driving-boxes", "--out", str(tmp_path / "out"), "--data-root", str(recording(tmp_path)), *words]
    assert fleet_sim(monkeypatch, *given, "--settings", "tiny") == 2
    assert complaint in capsys.readouterr().err


def test_forgetting_is_of_the_ends_of_tasks_and_late_accuracy_of_the_last_tenth_of_the_rounds():
    made = finished(CROPS, {"task-1": 0.0}, {})
    (record,) = made.rounds
    (client,) = record.clients.values()
    rounds = [
        dataclasses.replace(
            record, clients={"client-0": dataclasses.replace(client, accuracy_by_place={"1": t / 100, "2": 0.4})}
        )
        for t in (*range(10), *range(20, 30))
    ]
    run = {**made.run, "stream": {**made.run["stream"], "scenario": "rotated"}}
    found = measured(msgspec.structs.replace(made, run=run, stream={"changes": [10]}, rounds=rounds), None)
    assert found["TF"] == pytest.approx((9.0 - 29.0 + 40.0 - 40.0) / 2)
    assert found["PAL"] == pytest.approx(((28.0 + 40.0) / 2 + (29.0 + 40.0) / 2) / 2)


@pytest.mark.parametrize("folder", ["fedgp-rotated", "mfcl-sequential", "sdd-few-shot"])
def test_committed_tables_are_what_their_raw_results_give(folder: str):
    with tarfile.open(RESULTS / folder / "runs.tar.xz") as archive:
        raw = {
            member.name.removesuffix("/result.json"): msgspec.json.decode(
                archive.extractfile(member).read(), type=Result
            )
            for member in archive.getmembers()
        }
    written = json.loads((RESULTS / folder / f"table-{folder}.json").read_text())
    checked = 0
    for cell in written["cells"]:
        for seed, place in cell["runs"].items():
            found = measured(raw[place.partition("/runs/")[2].join(("runs/", ""))], None)
            for metric, ours in cell["ours"].items():
                assert ours["values"][seed] == pytest.approx(found[metric]), (cell["method"], seed, metric)
                checked += 1
    assert checked >= 50
