from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from replayfleet.edge_client.cameras.uri import DatasetUri, parse_source
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.scripts.carla import plan as carla_plan
from replayfleet.scripts.demo import __main__ as demo_command
from replayfleet.scripts.demo.plan import BASELINE, MARKER, OWN, Plan, make_plan
from replayfleet.scripts.fleet import plan as fleet_plan
from replayfleet.scripts.launch import plan as launch_plan
from replayfleet.scripts.launch.folder import claimed_folder, clear_folder
from replayfleet.scripts.launch.plan import find_data


def plan(tmp_path: Path, **changes: Any) -> Plan:
    options: dict[str, Any] = {"preset": "tiny", "seed": 3, "clients": None, "rounds": None, "data_root": None}
    return make_plan(tmp_path / "demo", **{**options, **changes})


def clear(out: Path) -> None:
    clear_folder(out, MARKER, OWN, ("logs", "clients"))


def value(command: Sequence[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_sizes_are_those_of_the_preset_unless_asked_for(tmp_path: Path):
    assert (plan(tmp_path).clients, plan(tmp_path).rounds) == (2, 3)
    assert (plan(tmp_path, clients=5).clients, plan(tmp_path, rounds=4).rounds) == (5, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "tinny"}, "unknown settings 'tinny'; did you mean 'tiny'?"),
        ({"clients": 0}, "--clients is 0, expected at least 1"),
        ({"rounds": -1}, "--rounds is -1"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_impossible_plans_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        plan(tmp_path, **changes)


def test_fleet_and_baseline_meet_the_same_stream(tmp_path: Path):
    found = plan(tmp_path, data_root=tmp_path)
    uri = parse_source(value(found.fleet().clients["client-1"], "--source"))
    assert isinstance(uri, DatasetUri)
    baseline = found.fleet().beside[BASELINE]
    assert (uri.client, uri.seed, uri.samples) == (1, 3, 20)
    assert value(baseline, "--set") == f"samples_per_class={uri.samples}"
    assert (uri.test, baseline.count("--set")) == (0, 1)
    assert value(baseline, "--scenario") == uri.scenario
    for option, number in (("--clients", uri.clients), ("--rounds", uri.rounds), ("--seed", uri.seed)):
        assert value(baseline, option) == str(number)
    aggregator = found.fleet().aggregator
    assert value(aggregator, "--settings") == value(baseline, "--settings")
    assert value(aggregator, "--seed") == value(baseline, "--seed")


def test_the_demos_test_part_is_the_same_for_fleet_and_baseline(tmp_path: Path):
    found = make_plan(tmp_path, "demo", 0, clients=None, rounds=None, data_root=None)
    uri = parse_source(value(found.fleet().clients["client-0"], "--source"))
    assert isinstance(uri, DatasetUri)
    assert uri.test == 100
    assert f"test_samples_per_class={uri.test}" in found.fleet().beside[BASELINE]


def test_the_fleet_learns_by_the_method_that_is_asked_for(tmp_path: Path):
    assert value(plan(tmp_path).fleet().aggregator, "--method") == "pfedgrp"
    assert value(plan(tmp_path, method="pfedgrp-plus").fleet().aggregator, "--method") == "pfedgrp-plus"


def test_both_divide_the_test_part_alike_where_a_preset_spreads_it_over_the_rounds(tmp_path: Path):
    found = make_plan(tmp_path, "small", 0, clients=2, rounds=3, data_root=None)
    uri = parse_source(value(found.fleet().clients["client-0"], "--source"))
    assert isinstance(uri, DatasetUri)
    assert uri.test == 0
    assert "test_samples_per_class=null" in found.fleet().beside[BASELINE]


def test_every_process_computes_with_one_thread(tmp_path: Path):
    found = plan(tmp_path)
    for command in (found.fleet().aggregator, *found.fleet().clients.values(), *found.fleet().beside.values()):
        assert value(command, "--threads") == "1"


def test_an_earlier_demo_is_replaced_and_its_neighbours_stay(tmp_path: Path):
    found = plan(tmp_path)
    clear(found.out)
    found.note(broker="x")
    (found.out / "report.html").write_text("old")
    (found.out / "clients" / "client-0").mkdir()
    (found.out / "notes.txt").write_text("mine")
    clear(found.out)
    assert not (found.out / "report.html").exists()
    assert list((found.out / "clients").iterdir()) == []
    assert (found.out / "notes.txt").read_text() == "mine"


def test_somebody_elses_folder_is_left_alone(tmp_path: Path):
    out = tmp_path / "demo"
    out.mkdir()
    (out / "logs").write_text("mine")
    with pytest.raises(SettingsError, match="not of a demo"):
        clear(out)
    assert (out / "logs").read_text() == "mine"
    with pytest.raises(SettingsError, match="is a file"):
        clear(out / "logs")


def test_a_folder_is_of_one_demo_at_a_time_and_what_one_left_stays_until_the_next_begins(tmp_path: Path):
    out = tmp_path / "demo"
    with claimed_folder(out, MARKER):
        clear(out)
        (out / "report.html").write_text("hours of work")
        with pytest.raises(SettingsError, match="in use: another process runs there"), claimed_folder(out, MARKER):
            pass
    with claimed_folder(out, MARKER):
        assert (out / "report.html").exists()
        clear(out)
        assert not (out / "report.html").exists()
    with pytest.raises(SettingsError, match="not of a demo"), claimed_folder(tmp_path, MARKER):
        pass


def test_a_demo_that_can_t_begin_leaves_an_earlier_one_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "demo"
    with claimed_folder(out, MARKER):
        clear(out)
    (out / "report.html").write_text("hours of work")
    monkeypatch.setattr(demo_command, "find_data", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, problem in (
            (["--port", str(port)], f"broker port {port} can't be used"),
            (["--seed", str(2**63)], "expected 0 to 9223372036854775807"),
            (["--settings", "small"], "--fast is --settings tiny"),
        ):
            with pytest.raises(SettingsError, match=problem):
                demo_command.demo(["--fast", "--out", str(out), *words], standalone_mode=False)
    assert (out / "report.html").read_text() == "hours of work"


def test_notes_add_up(tmp_path: Path):
    found = plan(tmp_path)
    clear(found.out)
    found.note(broker="b")
    found.note(fleet_s=2.5)
    noted = json.loads((found.out / "demo.json").read_text())
    assert (noted["broker"], noted["fleet_s"], noted["seed"], noted["preset"]) == ("b", 2.5, 3, "tiny")


def test_missing_data_are_downloaded_and_the_operator_is_told(monkeypatch: pytest.MonkeyPatch):
    calls, said = [], []

    def load(name: str, *, data_root: Path | None, download: bool = False) -> str:
        calls.append(download)
        if not download:
            raise SettingsError(f"data set {name} not found (looked in /nowhere)")
        return "data"

    monkeypatch.setattr(launch_plan, "load_dataset", load)
    assert find_data(None, said.append) == "data"
    assert calls == [False, True]
    assert any("apt install dataset-fashion-mnist" in line for line in said)


def test_damaged_data_are_not_downloaded_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_plan, "load_dataset", Mock(side_effect=SettingsError("train-images.gz is damaged")))
    with pytest.raises(SettingsError, match="damaged"):
        find_data(None, print)


def test_a_services_data_dir_is_nobodys_to_clear(tmp_path: Path) -> None:
    claim_data_dir(tmp_path, fleet="street", role="aggregator").close()
    for marker in (MARKER, fleet_plan.MARKER, carla_plan.MARKER):
        with pytest.raises(SettingsError, match="choose another folder with --out"):
            clear_folder(tmp_path, marker, OWN, ("logs",))
    assert (tmp_path / "fleet.json").is_file()
