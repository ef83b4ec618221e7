"""A fleet begins with a trained model: of its task, by the names of its classes, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayfleet.export.first_model import initial_parameters
from replayfleet.export.parameters import Model
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import ALL_METHODS
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import DetectionSpec, TaskSpec

TASK = TaskSpec(1, 28, ("bag", "boot", "coat"), architecture="lenet")
STREET = DetectionSpec(3, 32, 64, ("car", "bus"), ((0.1, 0.2),), width=4)


def method(name: str = "fedavg", task: Any = TASK) -> Any:
    return ALL_METHODS.named(name)(task=task)


def model(task: Any = TASK, **changes: Any) -> Model:
    task = dataclasses.replace(task, **changes)
    drawn = initialise(build_task_model(task), torch.Generator().manual_seed(8)).state_dict()
    kind = "detector" if isinstance(task, DetectionSpec) else "task"
    return Model(kind, task, {name: tensor.numpy() for name, tensor in drawn.items()})


@pytest.mark.parametrize("name", ["fedavg", "pfedgrp", "fedgp", "mfcl", "sdd", "ewc", "pfedgraph"])
def test_everybody_begins_with_the_given_model(name: str, tmp_path: Path) -> None:
    given = model()
    parameters = initial_parameters(given.save(tmp_path / "m.safetensors"), method(name), run_seed=3)
    download = first_download(method(name), 3, parameters)
    assert type(download) is type(first_download(method(name), 3))
    models = [
        value
        for value in (getattr(download, field.name) for field in dataclasses.fields(download))
        if isinstance(value, dict) and "head.weight" in value
    ]
    assert len(models) == (2 if name == "pfedgrp" else 1)
    for found in models:
        assert all(np.array_equal(found[key].numpy(), given.parameters[key]) for key in given.parameters)


def test_classes_are_matched_by_name_and_a_new_one_begins_at_random(tmp_path: Path) -> None:
    given = model(class_names=("coat", "bag"))
    found = initial_parameters(given.save(tmp_path / "m.safetensors"), method(), run_seed=3)
    random = first_download(method(), 3).task_parameters
    for name in ("head.weight", "head.bias"):
        wanted = torch.stack(
            [torch.from_numpy(given.parameters[name])[1], random[name][1], torch.from_numpy(given.parameters[name])[0]]
        )
        assert torch.equal(found[name], wanted)
    assert all(np.array_equal(found[name].numpy(), given.parameters[name]) for name in found if "head" not in name)


def test_a_detector_s_file_begins_a_fleet_of_detectors(tmp_path: Path) -> None:
    given = model(STREET)
    found = initial_parameters(given.save(tmp_path / "m.safetensors"), method(task=STREET), run_seed=3)
    assert all(np.array_equal(found[name].numpy(), given.parameters[name]) for name in given.parameters)


@pytest.mark.parametrize(
    ("given", "fleet", "says"),
    [
        (model(architecture="resnet20"), method(), "its model has architecture resnet20, the fleet's has lenet"),
        (model(image_channels=3), method(), "its model has image_channels 3, the fleet's has 1"),
        (model(class_names=("bag", "hat")), method(), "its model knows hat; the fleet has bag, boot, coat"),
        (model(STREET), method(), "holds a detector model, expected a task model"),
        (model(STREET), method(task=dataclasses.replace(STREET, class_names=("bus", "car"))), "finds car, bus"),
        (dataclasses.replace(model(), kind="sub-generator"), method(), "expected a task model"),
        (dataclasses.replace(model(), parameters={"w": np.ones(3)}), method(), "is missing"),
        (model(), method("fedcil"), "clients of method 'fedcil' don't begin with one task model"),
        (model(), method("fedem"), "clients of method 'fedem' don't begin with one task model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_begin_with_is_refused(given: Model, fleet: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        initial_parameters(given.save(tmp_path / "m.safetensors"), fleet, run_seed=0)


@pytest.mark.parametrize(
    "spoilt", [np.full((3, 84), np.nan, np.float32), np.ones((4, 84), np.float32), np.ones((3, 84), np.float64)]
)
def test_a_tensor_that_is_not_what_it_should_be_is_named(spoilt: Any, tmp_path: Path) -> None:
    given = model()
    name = "head.weight"
    spoilt = np.resize(spoilt, (len(spoilt), given.parameters[name].shape[1]))
    path = dataclasses.replace(given, parameters={**given.parameters, name: spoilt}).save(tmp_path / "m.safetensors")
    with pytest.raises(SettingsError, match=r"tensor 'head.weight' is"):
        initial_parameters(path, method(), run_seed=0)


def test_tensors_without_a_header_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save

    (tmp_path / "m.safetensors").write_bytes(save({"w": np.ones(3)}))
    for task, kind in ((TASK, "task"), (STREET, "detector")):
        expected = f"doesn't say what it holds; write it with `model-export {kind} --split"
        with pytest.raises(SettingsError, match=expected):
            initial_parameters(tmp_path / "m.safetensors", method(task=task), run_seed=0)
