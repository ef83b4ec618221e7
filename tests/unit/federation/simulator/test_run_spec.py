"""A run as a value: as JSON, as a command, and in a process of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import SETTINGS, TASKS
from replayfleet.federation.service.settings import settings_of
from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.run_spec import RunSpec
from replayfleet.federation.simulator.tables import running
from replayfleet.federation.simulator.tables.command import table
from replayfleet.federation.simulator.tables.paper import Column, Row
from replayfleet.federation.simulator.tables.plan import PlannedRun, State
from replayfleet.federation.streams.datasets import BOX_DATASETS, DATASETS

PLAIN = RunSpec(method="fedavg", out=Path("runs/a b"))
FULL = replace(
    PLAIN,
    scenario="driving",
    dataset="carla-boxes",
    preset="paper",
    clients=3,
    absent=1,
    data_root=Path("data"),
    download=True,
    overrides=("local_epochs=2", "late_town=Town05"),
    in_step=False,
    attack="label-flip",
    hostile=2,
    quarantine=True,
    minutes=0.25,
    compare=(Path("a/result.json"), Path("b/result.json")),
    resume=True,
)


@pytest.mark.parametrize("spec", [PLAIN, FULL, replace(FULL, in_step=True)])
def test_json_and_the_written_command_say_the_same_run(spec: RunSpec, monkeypatch: pytest.MonkeyPatch):
    assert RunSpec.decode(spec.encode()) == spec
    asked = []
    monkeypatch.setattr(cli, "run", lambda found, _command: asked.append(found))
    cli.fleet_sim.main(spec.command()[1:], standalone_mode=False)
    assert asked == [spec]


def test_a_written_command_names_what_defines_a_run_and_nothing_that_was_left_out():
    words = "fleet-sim fedavg --scenario circulating --dataset fashion-mnist --settings small --seed 0 --out"
    assert PLAIN.command() == [*words.split(), "runs/a b", "--threads", "1"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sampler": "onx"}, "sampler is 'onx', expected eager or onnx"),
        ({"threads": 0}, "threads is 0, expected a whole number, 1 to 256"),
        ({"threads": 100_000}, "threads is 100000, expected a whole number, 1 to 256"),
        ({"image_size": 0}, "image_size is 0, expected a whole number, at least 1"),
        ({"clients": 2, "overrides": ("num_clients=3",)}, "--clients and --set num_clients=3 are about the same"),
        ({"serve": "best", "overrides": ("serve=downloaded",)}, "--serve and --set serve=downloaded are about"),
        ({"absent": 1, "overrides": ("num_absent=1",)}, "leave one of them out"),
        ({"workers": 0}, "workers is 0, expected a whole number, at least 1"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_what_no_run_can_have_is_refused(change: dict[str, object], complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        replace(PLAIN, **change).check()


def test_a_child_runs_no_file_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("torch", "federation", "click", "replayfleet"):
        (tmp_path / f"{name}.py").write_text(f"open('planted-{name}', 'w').close()")
    monkeypatch.chdir(tmp_path)
    run = PlannedRun(
        row=Row(label="FedAVG", method="fedavg"),
        column=Column(scenario="gradual", dataset="mnist"),
        spec=replace(PLAIN, dataset="mnist", data_root=tmp_path / "absent", out=tmp_path / "out"),
        state=State.MISSING,
    )
    assert running.launch_process(run).wait(timeout=60) == 2
    assert "data root" in (tmp_path / "out" / running.LOG).read_text()
    assert not list(tmp_path.glob("planted-*"))


def test_the_help_names_every_data_set() -> None:
    option = settings_of(RunSpec)["dataset"].option
    assert {*DATASETS, *BOX_DATASETS} <= set(re.findall(r"[\w-]+", option.help))


def test_the_help_of_a_run_and_of_a_table_names_every_preset() -> None:
    helps = [option.help or "" for option in table.params if isinstance(option, click.Option)]
    for told in (next(text for text in helps if text.startswith("Preset")), settings_of(RunSpec)["preset"].option.help):
        assert set(SETTINGS) <= set(re.findall(r"\w+", told))


def test_the_help_names_the_methods_that_a_model_changes_nothing_of() -> None:
    task, rng = TASKS["mnist"], torch.Generator()
    first, other = (
        {name: kind(task=each).initial_download(rng).pack().parameter_sets for name, kind in METHODS.items()}
        for each in (task, replace(task, architecture="lenet"))
    )
    option = settings_of(RunSpec)["model"].option
    assert option is not None
    for name in METHODS:
        names = [{key: sets[name][key].keys() for key in sets[name]} for sets in (first, other)]
        assert (names[0] == names[1]) == bool(re.search(rf"\b{name}\b", option.help)), name
