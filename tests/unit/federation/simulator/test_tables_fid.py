"""Table 10 on a real, very small run of pFedGRP."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_sets import write_fashion_mnist

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator import cli
from replayfleet.federation.simulator.tables import fid_cells
from replayfleet.federation.simulator.tables.fid_cells import FinishedFleet, finished_fleet, replayed
from replayfleet.federation.simulator.tables.paper import paper_table
from replayfleet.federation.simulator.tables.plan import Choice, PlannedRun, Planner, State

SETTINGS = ("samples_per_class=6", "test_samples_per_class=1", "sub_generator_epochs=1", "max_tries_factor=2")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Choice:
    """A folder with data and one finished run."""
    folder = tmp_path_factory.mktemp("fid")
    write_fashion_mnist(folder / "data", train_per_class=12, test_per_class=2)
    choice = Choice(
        out=folder / "out",
        preset="tiny",
        methods=("pfedgrp", "pfedgrp-as3"),
        datasets=("fashion-mnist",),
        clients=2,
        rounds=2,
        overrides=SETTINGS,
        data_root=folder / "data",
    )
    run = next(run for run in Planner(choice).runs(paper_table("10")) if run.row.method == "pfedgrp")
    cli.run(run.spec, run.spec.command())
    return choice


def planned(world: Choice) -> dict[str, PlannedRun]:
    return {run.row.label: run for run in Planner(world).runs(paper_table("10"))}


@pytest.fixture
def fleet(world: Choice) -> FinishedFleet:
    return finished_fleet(planned(world)["Only WGAN-GP as sub-generator"])


def test_both_rows_of_a_run_are_measured_and_a_run_that_is_missing_is_said(world: Choice):
    runs = list(planned(world).values())
    cells = fid_cells.fid_cells(paper_table("10"), runs, [], features="task", show=lambda _line: None)
    single, plain, filtered = cells
    assert single.missing == {0: "not run"}
    assert single.ours("FID") is None
    assert plain.published == {"FID": 187.622}
    for cell in (plain, filtered):
        (value,) = cell.values["FID"].values()
        assert 0 < value < float("inf")
        assert cell.missing == {}


def test_the_finished_fleet_is_that_of_the_last_round(fleet: FinishedFleet):
    assert len(fleet.clients) == 2
    for client in fleet.clients:
        assert client.memory.seen.keys() == client.memory.sub_generators.keys()
        assert sum(client.memory.seen.values()) == 2 * 2 * 6
        assert len(client.real) == 24
        classes = {round(float((image.mean() + 1) * 127.5) / 10) for image in client.real}
        assert classes == set(client.memory.seen)
    assert fleet.average.keys() == fleet.clients[0].personalised.keys()


def test_replay_is_as_much_as_was_met_and_repeats_with_its_seed(fleet: FinishedFleet):
    first = replayed(fleet, filtered=True, seed=1)
    assert first.shape == (48, 1, 28, 28)
    assert torch.equal(first, replayed(fleet, filtered=True, seed=1))
    assert not torch.equal(first, replayed(fleet, filtered=True, seed=2))


def test_the_filter_is_on_or_off_as_the_row_says(world: Choice, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    original = fid_cells.draw

    def noted(settings: Any, *arguments: Any) -> Any:
        asked.append(settings.filter_replay)
        return original(settings, *arguments)

    monkeypatch.setattr(fid_cells, "draw", noted)
    runs = planned(world)
    for label in ("Only WGAN-GP as sub-generator", "WGAN-GP as sub-generator + ResNet20"):
        fid_cells.measured_fid(runs[label], runs[label])
    assert asked == [False, False, True, True]


def test_no_more_than_a_thousand_samples_of_a_client_are_compared(world: Choice, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fid_cells, "SAMPLES_PER_CLIENT", 5)
    fleet = finished_fleet(planned(world)["Only WGAN-GP as sub-generator"])
    assert [len(client.real) for client in fleet.clients] == [5, 5]
    assert len(replayed(fleet, filtered=False, seed=0)) == sum(
        max(5, len(client.memory.seen)) for client in fleet.clients
    )


def test_without_pfedgrps_run_there_are_no_features(world: Choice):
    folder = next(run.folder for run in planned(world).values() if run.state is State.FINISHED)
    runs = [
        dataclasses.replace(run, state=State.FINISHED, spec=dataclasses.replace(run.spec, out=folder))
        if run.row.method == "pfedgrp-as3"
        else dataclasses.replace(run, state=State.MISSING)
        for run in planned(world).values()
    ]
    single, *others = fid_cells.fid_cells(paper_table("10"), runs, [], features="task", show=lambda _line: None)
    assert "pfedgrp's run, which is not finished" in single.missing[0]
    assert all(cell.missing == {0: "not run"} for cell in others)


@pytest.fixture
def copied(world: Choice, tmp_path: Path) -> Choice:
    """The same in a folder of its own, to be damaged."""
    shutil.copytree(world.out, tmp_path / "out")
    return dataclasses.replace(world, out=tmp_path / "out")


def test_a_run_whose_checkpoints_are_gone_is_said_and_the_others_go_on(copied: Choice, world: Choice):
    single, plain, filtered = planned(copied).values()
    shutil.rmtree(plain.folder / "state")
    kept = planned(world)[filtered.row.label]
    said: list[str] = []
    runs = [single, plain, dataclasses.replace(kept, row=filtered.row)]
    cells = fid_cells.fid_cells(paper_table("10"), runs, [], features="task", show=said.append)
    assert cells[1].missing == {0: "its checkpoints are gone, and FID needs those of the last round"}
    assert (cells[1].values, cells[1].results, cells[1].folders) == ({}, {}, {})
    assert list(cells[2].values["FID"]) == [0]
    assert any(line.startswith("not measured: Only WGAN-GP") and "are gone" in line for line in said)


def test_checkpoints_that_are_damaged_or_end_early_are_said(copied: Choice):
    run = planned(copied)["Only WGAN-GP as sub-generator"]
    last = run.folder / "state" / "round-0001.json"
    content = last.read_bytes()
    for damage, complaint in ((b"{", "round-0001.json can't be read"), (None, "end after 1 of 2 rounds")):
        last.unlink() if damage is None else last.write_bytes(damage)
        (cell,) = fid_cells.fid_cells(paper_table("10"), [run], [], features="task", show=lambda _line: None)
        assert complaint in cell.missing[0]
    last.write_bytes(content)
    for blob in (run.folder / "state/blobs").iterdir():
        blob.write_bytes(b"?")
    (cell,) = fid_cells.fid_cells(paper_table("10"), [run], [], features="task", show=lambda _line: None)
    assert "is damaged" in cell.missing[0]


def test_features_of_a_run_whose_checkpoints_are_gone_are_said(copied: Choice, world: Choice):
    extractor = planned(copied)["Only WGAN-GP as sub-generator"]
    shutil.rmtree(extractor.folder / "state")
    with pytest.raises(SettingsError, match="the features are those of pfedgrp's run: its checkpoints are gone"):
        fid_cells.measured_fid(planned(world)["Only WGAN-GP as sub-generator"], extractor)


def test_the_command_writes_the_table(
    world: Choice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    size = ["--settings", "tiny", "--clients", "2", "--rounds", "2", "--dataset", "fashion-mnist", *words]
    place = ["--out", str(world.out), "--data-root", str(world.data_root), "--methods", "pfedgrp"]
    monkeypatch.setattr("sys.argv", ["fleet-sim", "table", "10", *place, *size])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "0 runs to do, 1 finished before" in capsys.readouterr().out
    text = Path(world.out / "table-10.md").read_text()
    assert "| WGAN-GP as sub-generator + ResNet20 (`pfedgrp`) | 165.552 |" in text
    assert "ours never with the paper's" in text
    assert "Eq. 6" not in text
    assert not list(world.out.glob("*.png"))
