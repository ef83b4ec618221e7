"""Driving in the simulator: what is measured town by town, and rounds that bring next to nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.driving_folder import crops, write_driving
from support.nudge_method import NudgeMethod
from support.recordings import carla_frames
from support.toy import TOY, run_rounds

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import SETTINGS
from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.job import prepare
from replayfleet.federation.simulator.measures import metrics
from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import DRIVING_SIZES, method_from, stream_settings

TOWNS = {"Town01": [[0, 3]] * 12, "Town02": [[1, 0], [4]] * 8, "Town03": [[3, 2]] * 12}


def options(tmp_path: Path, **changes: Any) -> RunSpec:
    if not (tmp_path / "data").exists():
        write_driving(tmp_path / "data/carla", TOWNS)
    given: dict[str, Any] = {
        "method": "nudge",
        "scenario": "driving",
        "dataset": "carla-crops",
        "preset": "tiny",
        "out": tmp_path / "out",
        "rounds": 6,
        "data_root": tmp_path / "data",
        "threads": 1,
    }
    return RunSpec(**{**given, **changes})


@pytest.fixture(autouse=True)
def _nudge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "nudge", NudgeMethod)


@pytest.mark.usefixtures("drawn")
def test_a_run_measures_every_client_town_by_town(tmp_path: Path):
    job = prepare(options(tmp_path))
    result = job.run(on_round=lambda _: None, on_client=lambda *_: None)
    written = json.loads((tmp_path / "out/result.json").read_text())
    stream = job.simulation.stream
    for index, record in enumerate(written["rounds"]):
        for name, client in record["clients"].items():
            driven = written["stream"]["routes"][name][: index // 2 + 1]
            assert sorted(client["accuracy_by_place"]) == sorted(driven)
            places = stream.test_places(int(name[-1]), index)
            mean = sum(
                share * np.mean(places == stream.place_names.index(town))
                for town, share in client["accuracy_by_place"].items()
            )
            assert client["accuracy"] == pytest.approx(mean)
    last = written["rounds"][-1]["clients"].values()
    per_client = [sum(client["accuracy_by_place"].values()) / 3 for client in last]
    assert written["summary"]["place_accuracy"] == pytest.approx(sum(per_client) / 2)
    assert written["summary"] == result.summary
    assert written["stream"]["changes"] == [2, 4]
    assert written["stream"]["change_name"] == "every client reaches its next town"
    assert written["run"]["stream"]["num_rounds"] == 6
    assert (tmp_path / "out/accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_drive_goes_on_and_ends_like_another(tmp_path: Path):
    whole = prepare(options(tmp_path)).run(on_round=lambda _: None, on_client=lambda *_: None)
    begun = options(tmp_path, out=tmp_path / "again")
    assert prepare(RunSpec(**{**vars_of(begun), "minutes": 0.0})).run(on_round=print, on_client=print) is None
    rest = prepare(RunSpec(**{**vars_of(begun), "resume": True})).run(on_round=lambda _: None, on_client=print)
    assert [r.clients["client-1"].accuracy_by_place for r in rest.rounds] == [
        r.clients["client-1"].accuracy_by_place for r in whole.rounds
    ]
    assert rest.summary == whole.summary


def vars_of(given: RunSpec) -> dict[str, Any]:
    return {name: getattr(given, name) for name in RunSpec.__dataclass_fields__}


@pytest.mark.parametrize("dataset", ["carla-crops", "carla-boxes"])
def test_a_run_on_other_drives_is_another_run(tmp_path: Path, dataset: str):
    asked = options(tmp_path, dataset=dataset, method="fedavg")
    first, again = (prepare(asked).identity for _ in range(2))
    assert first == again
    write_driving(tmp_path / "longer/carla", {**TOWNS, "Town03": [[3, 2]] * 11 + [[2, 3]]})
    longer = prepare(dataclasses.replace(asked, data_root=tmp_path / "longer")).identity
    assert {key for key in first if first[key] != longer[key]} == {"samples"}


@pytest.mark.parametrize("dataset", ["carla-crops", "carla-boxes"])
@pytest.mark.parametrize("change", [{"suffix": ".jpg"}, {"side": 12.0}])
def test_frames_of_other_names_or_boxes_are_other_samples(tmp_path: Path, dataset: str, change: dict[str, Any]):
    asked = options(tmp_path, dataset=dataset, method="fedavg")
    write_driving(tmp_path / "other/carla", TOWNS, **change)
    first, other = (prepare(run).identity for run in (asked, dataclasses.replace(asked, data_root=tmp_path / "other")))
    assert first["samples"] != other["samples"]


def test_the_command_says_the_accuracy_per_town(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = options(tmp_path)
    words = ["nudge", "--scenario", "driving", "--dataset", "carla-crops", "--settings", "tiny", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["fleet-sim", *words, "--data-root", str(asked.data_root), "--out", "out"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "carla-crops, driving: 2 clients, 5 rounds" in out
    assert "% per town), average" in out


def test_streams_without_places_have_no_accuracy_by_place(tmp_path: Path):
    asked = options(
        tmp_path, scenario="circulating", rounds=1, overrides=["samples_per_class=2", "test_samples_per_class=1"]
    )
    result = prepare(asked).run(on_round=lambda _: None, on_client=lambda *_: None)
    assert all(not client.accuracy_by_place for client in result.rounds[0].clients.values())
    assert "place_accuracy" not in result.summary
    assert result.stream.keys() == {"changes", "change_name"}


@pytest.mark.parametrize("scenario", ["gradual", "extreme"])
def test_crops_without_enough_of_each_class_are_refused_for_other_scenarios(tmp_path: Path, scenario: str):
    with pytest.raises(SettingsError, match="rounds on this data"):
        prepare(options(tmp_path, scenario=scenario, rounds=40))


def test_the_accuracy_per_town_counts_towns_alike_and_then_clients():
    by_place = {"a": {"Town01": 1.0, "Town02": 0.5}, "b": {"Town01": 0.25}}
    assert metrics.place_accuracy(by_place) == (0.75 + 0.25) / 2
    with pytest.raises(ValueError, match="mean of no"):
        metrics.place_accuracy({"a": {}})


def test_hits_are_counted_group_by_group(tmp_path: Path):
    _, _, test = crops(write_driving(tmp_path, TOWNS))
    indices = np.arange(len(test.labels))[::-1]

    def vehicle(images: torch.Tensor) -> torch.Tensor:
        return torch.eye(5)[torch.zeros(len(images), dtype=torch.int64)]

    tested = evaluate(vehicle, test, indices)
    assert tested.hits.tolist() == (test.labels[indices] == 0).tolist()
    assert tested.group_accuracy(test.place_ids[indices], ["x", "y", "z", "never"]) == {"x": 0.5, "y": 0.0, "z": 0.0}


@pytest.mark.parametrize("preset", SETTINGS)
def test_every_preset_has_a_drive(preset: str):
    given = {"scenario": "driving", "seed": 1}
    wanted = stream_settings(preset, "carla-crops", 32, {"samples_per_class": "7"}, given)
    size = DRIVING_SIZES.get(preset, DRIVING_SIZES["paper"])  # ``medium`` has no drive of its own
    assert (wanted.num_clients, wanted.num_rounds) == (2, size.num_rounds)
    assert wanted.samples_per_class == 7


def test_the_small_drive_has_four_rounds_in_each_town_and_no_round_without_a_client():
    job = prepare(RunSpec(**vars_of(small_drive(carla_frames().parent))))
    stream = job.simulation.stream
    assert (stream.num_rounds, stream.changes()) == (20, [4, 8, 12, 16])
    assert [stream.present(index) for index in range(20)] == [(0, 1)] * 20
    assert stream.num_seen(0, 19) == stream.num_seen(1, 19) > 1300


def small_drive(data_root: Path) -> RunSpec:
    return RunSpec(
        method="nudge",
        scenario="driving",
        dataset="carla-crops",
        preset="small",
        out=Path("not-written"),
        data_root=data_root,
    )


FEW = {"local_epochs": "1", "batch_size": "4"}
FEW_ROUNDS: list[dict[str, dict[int, int]]] = [
    {"a": {0: 1, 1: 1}, "b": {2: 2}},
    {"a": {2: 1, 0: 4}},
    {"b": {1: 1, 2: 1}},
]
"""One sample of a class, two in all, five that leave a mini-batch of one, a client that sits out."""


@pytest.mark.parametrize("name", [*sorted(METHODS), "pfedgrp-single"])
def test_every_method_copes_with_rounds_of_one_sample_of_a_class_and_two_in_all(name: str):
    plain = name.removesuffix("-single")
    overrides = {key: text for key, text in FEW.items() if hasattr(METHODS[plain], "__dataclass_fields__")}
    known = METHODS[plain].__dataclass_fields__
    overrides = {key: text for key, text in overrides.items() if key in known}
    if name != plain:
        overrides["generators"] = "single"
    method = method_from(METHODS[plain], TOY, "tiny", overrides)
    _, downloads = run_rounds(method, FEW_ROUNDS)
    assert sorted(downloads) == ["a", "b"]
    for download in downloads.values():
        for parameters in download.pack().parameter_sets.values():
            assert all(bool(tensor.isfinite().all()) for tensor in parameters.values() if tensor.is_floating_point())
