from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import SETTINGS, TASKS, detector_settings_for, settings_for
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.logs import TextFormatter
from replayfleet.federation.service.settings import split_overrides
from replayfleet.federation.simulator.settings import method_from
from replayfleet.federation.streams.datasets import task_for
from replayfleet.models.specs import DetectionSpec

FASHION = TASKS["fashion-mnist"]


@pytest.mark.parametrize("preset", SETTINGS)
@pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if kind.deployable))
def test_a_spec_survives_the_wire_and_gives_the_same_method(method: str, preset: str):
    spec = make_spec("f", method, FASHION, preset=preset, overrides={}, run_seed=3)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))
    assert travelled == spec
    assert method_of(travelled) == METHODS[method](task=FASHION, **settings_for(method, preset))
    assert task_of(travelled) == FASHION


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        (
            "pfedgrp",
            {"gan_batch_size": "8", "pca_dims": "4"},
            ["setting=pca_dims reason=\"sub_generator is 'wgan-gp'\""],
        ),
        (
            "pfedgrp",
            {"sub_generator": "pca-gaussian", "pca_components": "2", "pca_dims": "4"},
            ["setting=pca_components"],
        ),
        ("pfedgrp", {"generators": "single", "gate": "false"}, ["setting=gate reason=\"generators is 'single'\""]),
        ("pfedgrp", {"filter_replay": "false", "max_tries_factor": "4"}, ["setting=max_tries_factor"]),
        ("pfedgrp-plus", {"local_epochs": "2", "gate_samples": "9"}, ['setting=gate_samples reason="gate is false"']),
        ("fedavg", {"local_epochs": "2"}, []),
    ],
)
def test_a_setting_that_does_nothing_beside_the_others_is_told(
    method: str, given: dict[str, str], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    make_spec("f", method, FASHION, preset="tiny", overrides=given, run_seed=3)
    for record, words in zip(caplog.records, told, strict=True):
        assert f"setting does nothing {words}" in TextFormatter().format(record)


@pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if not kind.deployable))
def test_a_method_that_no_device_can_serve_is_refused_with_those_that_can(method: str):
    with pytest.raises(SettingsError, match=rf"method '{method}' predicts .* fleet-sim.*, or take one of .*pfedgrp"):
        make_spec("f", method, FASHION, preset="tiny", overrides={}, run_seed=0)


BOXES = DetectionSpec(3, 192, 320, ("car", "light"), ((0.1, 0.2), (0.01, 0.03)), width=4, stride=16, max_boxes=15)


def test_a_detection_task_travels_as_one_and_an_older_task_without_a_kind_stays_a_classification():
    spec = make_spec("f", "fedavg", BOXES, preset="tiny", overrides={}, run_seed=3)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))
    assert travelled.task["kind"] == "detection"
    assert "architecture" not in travelled.task
    assert task_of(travelled) == BOXES
    small = replace(BOXES, architecture="pyramid")
    assert task_of(make_spec("f", "fedavg", small, preset="tiny", overrides={}, run_seed=3)) == small
    assert method_of(travelled) == METHODS["fedavg"](task=BOXES, **detector_settings_for("fedavg", "tiny"))
    older = make_spec("f", "fedavg", FASHION, preset="tiny", overrides={}, run_seed=3)
    assert "kind" not in older.task
    assert task_of(older) == FASHION


@pytest.mark.parametrize("preset", SETTINGS)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "centralized", "der", "agem", "fedgp", "ideal"])
def test_a_deployed_detector_has_the_simulators_presets(method: str, preset: str):
    spec = make_spec("f", method, BOXES, preset=preset, overrides={}, run_seed=3)
    assert method_of(spec) == method_from(METHODS[method], BOXES, preset, {})
    assert spec.settings["weight_decay"] == 0.0005


def test_a_task_that_no_build_knows_is_one_clear_line():
    spec = make_spec("f", "fedavg", BOXES, preset="tiny", overrides={}, run_seed=3)
    with pytest.raises(SettingsError, match="unknown kind of task 'detektion'; did you mean 'detection'"):
        task_of(msgspec.structs.replace(spec, task={**spec.task, "kind": "detektion"}))
    with pytest.raises(SettingsError, match="the fleet's task is not usable: stride is 5"):
        task_of(msgspec.structs.replace(spec, task={**spec.task, "stride": 5}))
    founded_before = {**spec.task, "class_names": ["car", "x" * 300]}
    with pytest.raises(SettingsError, match="task is not usable: a class's name has 300 characters, expected at most"):
        task_of(msgspec.structs.replace(spec, task=founded_before))


@pytest.mark.parametrize("preset", SETTINGS)
def test_a_method_that_needs_classes_is_refused_for_boxes_before_a_fleet_exists(preset: str):
    with pytest.raises(SettingsError, match="method 'pfedgrp' needs one class for every picture"):
        make_spec("f", "pfedgrp", BOXES, preset=preset, overrides={}, run_seed=3)


def test_overrides_are_texts_that_become_the_fields_type():
    overrides = {"local_epochs": "3", "gate": "false", "gate_threshold": "0.5"}
    spec = make_spec("f", "pfedgrp", FASHION, preset="tiny", overrides=overrides, run_seed=0)
    assert {key: spec.settings[key] for key in overrides} == {"local_epochs": 3, "gate": False, "gate_threshold": 0.5}


@pytest.mark.parametrize(
    ("method", "overrides", "complaint"),
    [
        ("pfedgpr", {}, "unknown method 'pfedgpr'; did you mean 'pfedgrp'?"),
        (
            "pfedgrp",
            {"gate_treshold": "1"},
            "method 'pfedgrp' has no setting 'gate_treshold'; did you mean 'gate_threshold'?",
        ),
        ("pfedgrp", {"task": "x"}, "has no setting 'task'"),
        ("pfedgrp", {"local_epochs": "many"}, "setting 'local_epochs' of method 'pfedgrp' is 'many': expected int"),
        ("pfedgrp", {"start_from": "nowhere"}, "start_from is 'nowhere'"),
    ],
)
def test_wrong_names_and_values_are_one_clear_line(method: str, overrides: dict[str, str], complaint: str):
    with pytest.raises(SettingsError) as caught:
        make_spec("f", method, FASHION, preset="small", overrides=overrides, run_seed=0)
    assert complaint.lower() in str(caught.value).lower()


def test_unknown_presets_and_data_sets_name_the_nearest():
    with pytest.raises(SettingsError, match="did you mean 'small'"):
        settings_for("pfedgrp", "smal")
    with pytest.raises(SettingsError, match="did you mean 'fashion-mnist'"):
        task_for("fashion_mnist")


def test_overrides_need_an_equals_sign_and_come_once():
    assert split_overrides(["a=1", "b=c=d"]) == {"a": "1", "b": "c=d"}
    with pytest.raises(SettingsError, match="expected KEY=VALUE"):
        split_overrides(["a"])
    with pytest.raises(SettingsError, match="twice"):
        split_overrides(["a=1", "a=2"])
