from __future__ import annotations

import msgspec
import pytest

from federation.errors import SettingsError
from federation.methods import METHODS
from federation.service.fleet_spec import make_spec, method_of, task_of
from federation.service.presets import SETTINGS, TASKS, settings_for, task_for
from federation.service.settings import split_overrides

FASHION = TASKS["fashion-mnist"]


@pytest.mark.parametrize("preset", SETTINGS)
@pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if kind.deployable))
def test_a_spec_survives_the_wire_and_gives_the_same_method(method: str, preset: str):
    spec = make_spec("f", method, FASHION, preset=preset, overrides={}, run_seed=3)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec))
    assert travelled == spec
    assert method_of(travelled) == METHODS[method](task=FASHION, **settings_for(method, preset))
    assert task_of(travelled) == FASHION


@pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if not kind.deployable))
def test_a_method_that_no_device_can_serve_is_refused_with_those_that_can(method: str):
    with pytest.raises(SettingsError, match=rf"method '{method}' predicts .* fleet-sim.*, or take one of .*pfedgrp"):
        make_spec("f", method, FASHION, preset="tiny", overrides={}, run_seed=0)


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
