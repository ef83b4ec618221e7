"""Detection in the simulator: what is measured, what a late town costs, and what is refused before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.driving_folder import write_driving

from replayfleet.export.running.detections import Detections
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.service.fleet.presets import SETTINGS, detector_settings_for
from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.job import Job, identity_of, prepare
from replayfleet.federation.simulator.measures.detection_evaluation import DetectionEvaluation, evaluate_boxes
from replayfleet.federation.simulator.measures.detection_metrics import evaluate_detector
from replayfleet.federation.simulator.records import ClientRecord, LateChange, RoundRecord, kept_accuracy
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.streams.datasets import BoxDataset, load_any_dataset
from replayfleet.federation.streams.driving import pictures as driving_pictures
from replayfleet.models.build import build_task_model, initialise

TOWNS = {"Town01": [[0, 3]] * 12, "Town02": [[1, 0], [4]] * 6, "Town03": [[3, 2], []] * 6}

BOX_METHODS = ("fedavg", "der", "agem", "fedgp", "der-fedgp", "ideal")


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving_pictures, "IMAGE_HEIGHT", 32)
    monkeypatch.setattr(driving_pictures, "IMAGE_WIDTH", 64)


def options(tmp_path: Path, **changes: Any) -> RunSpec:
    if not (tmp_path / "data").exists():
        write_driving(tmp_path / "data/carla", TOWNS)
    given: dict[str, Any] = {
        "method": "fedavg",
        "scenario": "driving",
        "dataset": "carla-boxes",
        "preset": "tiny",
        "out": tmp_path / "out",
        "rounds": 3,
        "overrides": ["late_town=Town03"],
        "data_root": tmp_path / "data",
        "threads": 1,
    }
    return RunSpec(**{**given, **changes})


def run(job: Job) -> Result:
    result = job.run(on_round=lambda _: None, on_client=lambda *_: None)
    assert result is not None
    return result


def boxes(tmp_path: Path) -> BoxDataset:
    write_driving(tmp_path / "boxes", TOWNS)
    data = load_any_dataset("carla-boxes", data_root=tmp_path / "boxes")
    assert isinstance(data, BoxDataset)
    return data


@pytest.mark.usefixtures("drawn")
def test_a_run_measures_map_in_all_by_class_and_by_town(tmp_path: Path):
    job = prepare(options(tmp_path))
    result = run(job)
    written = json.loads((tmp_path / "out/result.json").read_text())
    stream = job.simulation.stream
    for index, record in enumerate(written["rounds"]):
        for number, (name, client) in enumerate(sorted(record["clients"].items())):
            assert client["num_test"] == len(stream.test_indices(number, index))
            assert 0 <= client["mean_average_precision"] <= client["accuracy"] <= 1
            assert client["accuracy"] == pytest.approx(np.mean(list(client["class_accuracy"].values())))
            assert set(client["accuracy_by_place"]) <= set(written["stream"]["routes"][name])
    assert written["stream"]["late_change"] == {"client": "client-0", "town": "Town03", "round": 2}
    assert written["run"]["stream"]["late_rounds"] == 1
    assert {"earlier_before", "earlier_after", "mean_average_precision"} <= result.summary.keys()
    assert (tmp_path / "out/accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_measure_is_that_of_the_whole_test_set_at_once_and_towns_count_their_own_pictures(tmp_path: Path):
    data = boxes(tmp_path)
    module = build_task_model(data.task)
    judge = judge_with(data.task, initialise(module, torch.Generator().manual_seed(1)).state_dict())
    indices = np.arange(len(data.test.labels))
    tested = evaluate_boxes(data.task, judge, data.test, indices)
    whole = round_data(data.test, indices)
    expected = evaluate_detector(data.task, judge, whole.images, whole.labels)
    assert (tested.accuracy, tested.mean_average_precision) == (expected.map50, expected.map)
    places = data.test.place_ids
    in_first = round_data(data.test, np.flatnonzero(places == 0))
    by_town = tested.group_accuracy(places, data.test.place_names)
    assert by_town["Town01"] == evaluate_detector(data.task, judge, in_first.images, in_first.labels).map50


def test_a_town_that_shows_nothing_has_no_map():
    padding = np.zeros((2, 3, 5), np.float32)
    padding[:, :, 0] = -1
    padding[0, 0] = (1, 0.5, 0.5, 0.2, 0.2)
    empty = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    tested = DetectionEvaluation([empty, empty], padding)
    assert tested.group_accuracy(np.array([0, 1]), ("Town01", "Town02")) == {"Town01": 0.0}
    assert tested.num_samples == 2


def test_an_interrupted_run_of_buffers_goes_on_and_ends_like_another(tmp_path: Path):
    whole = run(prepare(options(tmp_path, method="der-fedgp")))
    begun = options(tmp_path, method="der-fedgp", out=tmp_path / "again")
    fields = {name: getattr(begun, name) for name in RunSpec.__dataclass_fields__}
    assert prepare(RunSpec(**{**fields, "minutes": 0.0})).run(on_round=print, on_client=print) is None
    rest = run(prepare(RunSpec(**{**fields, "resume": True})))
    assert rest.summary == whole.summary


def test_the_command_says_map_and_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = options(tmp_path)
    words = ["fedavg", "--scenario", "driving", "--dataset", "carla-boxes", "--settings", "tiny", "--threads", "1"]
    words += ["--set", "late_town=Town03", "--rounds", "3", "--data-root", str(asked.data_root), "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["fleet-sim", *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "carla-boxes, driving: 2 clients, 3 rounds" in out
    assert "mAP@0.5 " in out
    assert "final mAP@0.5 " in out


@pytest.mark.parametrize("missing", ["torchmetrics.detection", "faster_coco_eval"])
def test_without_what_measures_detectors_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=r"pip install 'replayfleet\[detection\]'"):
        prepare(options(tmp_path))
    assert not (tmp_path / "out").exists()


def test_methods_that_need_a_class_for_every_picture_refuse(tmp_path: Path):
    with pytest.raises(SettingsError, match="needs one class for every picture"):
        prepare(options(tmp_path, method="pfedgrp"))


def test_other_scenarios_refuse_boxes(tmp_path: Path):
    with pytest.raises(SettingsError, match="take --scenario driving"):
        prepare(options(tmp_path, scenario="circulating", overrides=[]))


def test_runs_without_a_late_town_are_known_as_ever(tmp_path: Path):
    asked = options(tmp_path, dataset="carla-crops", overrides=[])
    job = prepare(asked)
    assert "late_town" not in job.identity["stream"]
    assert identity_of(asked, job.simulation) == job.identity
    late = prepare(options(tmp_path)).identity["stream"]
    assert (late["late_town"], late["late_rounds"]) == ("Town03", 1)


@pytest.mark.parametrize("preset", SETTINGS)
@pytest.mark.parametrize("method", [name for name in BOX_METHODS if name in METHODS])
def test_every_preset_makes_every_method_that_learns_boxes(tmp_path: Path, preset: str, method: str):
    made = method_from(METHODS[method], boxes(tmp_path).task, preset, {})
    assert made.weight_decay == 0.0005
    assert detector_settings_for(method, preset, known=["weight_decay"])["weight_decay"] == 0.0005


def test_an_unknown_preset_is_named():
    with pytest.raises(SettingsError, match="did you mean 'small'"):
        detector_settings_for("fedavg", "smal")


def client(**by_place: float) -> ClientRecord:
    """Return a record that no run made."""
    return ClientRecord(
        classes=(),
        accuracy=0.5,
        num_test=1,
        num_seen=1,
        class_accuracy={},
        train_s=0.0,
        bytes_up=0,
        bytes_up_everything=0,
        bytes_down=0,
        bytes_down_everything=0,
        sub_generators_sent=(),
        num_sub_generators_held=0,
        accuracy_by_place=by_place,
    )


def rounds(*of_client: ClientRecord) -> list[RoundRecord]:
    other = client(Town01=0.9)
    return [
        RoundRecord(round=index, accuracy=0.0, clients={"a": own, "b": other}, aggregate_s=0.0, round_s=0.0)
        for index, own in enumerate(of_client)
    ]


def test_what_is_kept_is_of_the_earlier_towns_of_who_changed_before_and_after():
    records = rounds(client(Town01=0.7), client(Town01=0.6, Town02=0.2), client(Town01=0.2, Town02=0.1, Town05=1.0))
    found = kept_accuracy(records, LateChange(client="a", town="Town05", round=2))
    assert found == pytest.approx({"earlier_before": 0.4, "earlier_after": 0.15, "earlier_kept": 0.375})


def test_where_there_was_nothing_to_keep_there_is_no_share():
    records = rounds(client(Town01=0.0), client(Town01=0.1))
    assert kept_accuracy(records, LateChange(client="a", town="Town05", round=1)) == {
        "earlier_before": 0.0,
        "earlier_after": 0.1,
    }
