from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.service.fleet.variants import VARIANTS, resolved
from replayfleet.federation.simulator.settings import StreamSize, method_fields, method_from
from replayfleet.federation.simulator.tables.measured import cells
from replayfleet.federation.simulator.tables.paper import (
    Column,
    Note,
    PaperTable,
    Place,
    Row,
    paper_table,
    paper_tables,
)
from replayfleet.federation.simulator.tables.plan import Choice, Planner, State
from replayfleet.federation.streams.datasets import BOX_DATASETS, DATASETS, DEBIAN_FASHION_MNIST
from replayfleet.federation.streams.stream import DRIVING, SCENARIOS, TASK_BY_TASK


def a_table(**changes: object) -> PaperTable:
    values = {
        "number": "99",
        "title": "a title",
        "metrics": ("AA", "AR"),
        "columns": (Column(scenario="gradual", dataset="mnist"), Column(scenario="gradual", dataset="cifar-10")),
        "rows": (Row(label="FedAVG", method="fedavg", values="51.39 37.78 | - -"),),
    }
    return PaperTable(**{**values, **changes})


def test_every_table_with_accuracies_is_there():
    numbers = ["1", "2", "3", "4", "5", "10", "11", "12", "13", "14", "15", *(f"v1-{i}" for i in range(1, 9))]
    numbers += ["driving-crops", "driving-boxes", "fedgp-rotated", "fedgp-messages", "mfcl-sequential"]
    numbers += ["sdd-few-shot", "sdd-released-steps", "sdd-forty-classes", "sdd-few-base"]
    numbers += [*(f"fedgp-{i}" for i in (1, 5, 2, 3, 4, 6)), "mfcl-4", "mfcl-5", "mfcl-8"]
    numbers += [f"sdd-{i}" for i in range(1, 6)]
    assert list(paper_tables()) == numbers


@pytest.mark.parametrize("number", paper_tables())
def test_rows_and_columns_name_what_the_project_has(number: str):
    table = paper_table(number)
    for row in table.rows:
        assert {row.method, *row.method_on.values()} <= {*METHODS, *VARIANTS}
    for column in table.columns:
        assert column.scenario in {*SCENARIOS, DRIVING, *TASK_BY_TASK}
        assert column.dataset in {*DATASETS, *BOX_DATASETS}
    for aim in table.aims:
        assert {aim.method, aim.beside} <= {name for row in table.rows for name in (row.method, row.label)}
        assert {aim.metric, aim.beside_metric or aim.metric} <= {*table.metrics, *table.also}


OTHER_PAPERS = [number for number in paper_tables() if number.startswith(("fedgp-", "mfcl-", "sdd-"))]


@pytest.mark.parametrize("number", [number for number in OTHER_PAPERS if not paper_table(number).is_ours])
def test_each_row_has_a_method_a_command_and_a_state_among_what_is_reproducible(number: str):
    """``| table and choice, behind "fleet-sim table" | row | method and settings | state |``."""
    page = (Path(__file__).parents[4] / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    for row in paper_table(number).rows:
        choice = f"`{number} --methods {row.method}`"
        found = [cells for cells in lines if cells[:2] == [choice, row.label]]
        assert len(found) == 1, (choice, row.label)
        assert all(f"`{key}={value}`" in found[0][2] for key, value in row.set.items())
        assert found[0][-1]


@pytest.mark.parametrize("number", [number for number, table in paper_tables().items() if "AR" in table.metrics])
def test_accuracy_and_regret_add_up_to_centralized_or_a_note_says_that_they_dont(number: str):
    table = paper_table(number)
    (upper,) = [row for row in table.rows if row.method == "centralized"]
    for row in table.rows:
        for place in range(len(table.columns)):
            published = table.published(row, place)
            if not published:
                continue
            total = published["AA"] + published["AR"]
            adds_up = abs(total - table.published(upper, place)["AA"]) < 0.025
            assert adds_up or any(note.concerns(row.label, place) for note in table.notes), (row.label, place)


@pytest.mark.parametrize("number", OTHER_PAPERS)
def test_columns_set_what_a_stream_or_all_methods_of_the_table_have(number: str):
    table = paper_table(number)
    stream = {field.name for field in dataclasses.fields(StreamSize)}
    everywhere = set.intersection(*(set(method_fields(METHODS[resolved(r.method, "paper")[0]])) for r in table.rows))
    for column in table.columns:
        assert column.set.keys() <= stream | everywhere, column.title


@pytest.mark.parametrize("number", paper_tables())
def test_rows_set_what_their_methods_have(number: str):
    table = paper_table(number)
    for row in table.rows:
        for column in table.columns:
            known = method_fields(METHODS[resolved(row.method_for(column.dataset), "paper")[0]])
            assert row.settings_for(column.dataset, "paper").keys() <= set(known), (row.label, column.slug)


@pytest.mark.parametrize(("number", "dataset"), [("v1-1", "cifar-10"), ("v1-3", "cifar-100"), ("v1-8", "cifar-10")])
def test_the_first_version_trains_diffusion_models_by_its_own_schedule_at_full_scale(number: str, dataset: str):
    (row,) = [row for row in paper_table(number).rows if row.label == "pFedGRP"]
    full, small = (row.settings_for(dataset, preset) for preset in ("paper", "small"))
    assert row.method_for(dataset) == "pfedgrp-ddpm"
    assert small == row.set
    assert full == {**row.set, "first_sub_generator_epochs": "6000", "ddpm_epochs": "600"}
    settings = {**VARIANTS["pfedgrp-ddpm"][1], **full}
    method = method_from(
        METHODS["pfedgrp"], TASKS[dataset], "paper", {key: str(value) for key, value in settings.items()}
    )
    assert (method.first_sub_generator_epochs, method.ddpm_epochs) == (6000, 600)


def test_the_first_version_trains_its_gans_by_another():
    (row,) = [row for row in paper_table("v1-1").rows if row.label == "pFedGRP"]
    changed = {"first_sub_generator_epochs": "1000", "sub_generator_epochs": "100"}
    assert row.settings_for("mnist", "paper") == {**row.set, **changed}


@pytest.mark.parametrize("number", ["v1-4", "v1-5"])
def test_every_ablation_of_the_first_version_keeps_its_schedule_at_full_scale(number: str):
    for row in paper_table(number).rows:
        name, settings = resolved(row.method_for("fashion-mnist"), "paper")
        given = {**settings, **row.settings_for("fashion-mnist", "paper")}
        method = method_from(METHODS[name], TASKS["fashion-mnist"], "paper", given)
        assert (method.first_sub_generator_epochs, method.sub_generator_epochs) == (1000, 100), row.label
        if name == "pfedgrp":
            assert method.alignment_on == "earlier-classes", row.label
        if method.generators == "per-class":  # one of all classes has its samples labelled by who filters
            assert not method.gate, row.label
            assert not method.filter_replay, row.label


def test_known_errors_of_the_paper_stand_at_their_cells():
    table = paper_table("3")
    copied = {"pFedGRP-ASG": "FedCIL", "pFedGRP-ASP": "TARGET"}
    rows = {row.label: row for row in table.rows}
    originals = {row.label: row for row in paper_table("1").rows}
    for label, original in copied.items():
        assert table.published(rows[label], 2) == paper_table("1").published(originals[original], 3)
        assert any("Copies" in note.text and note.concerns(label, 2) for note in table.notes)
        assert not any("Copies" in note.text and note.concerns(label, 0) for note in table.notes)
    assert any("Eq. 6" in note.text and note.is_general for note in paper_table("14").notes)


def test_a_number_that_the_paper_leaves_out_is_absent():
    table = a_table()
    assert table.published(table.rows[0], 0) == {"AA": 51.39, "AR": 37.78}
    assert table.published(table.rows[0], 1) == {}
    assert table.published(Row(label="mine", method="mine", in_paper=False), 0) == {}


def test_the_thresholds_update_counts_are_read_with_their_row():
    table = paper_table("5")
    row = next(row for row in table.rows if row.set == {"gate_threshold": "0.25"})
    assert table.published(row, 1) == {"AA": 41.94, "AR": 18.66, "AUC": 34.4}


def test_numbers_that_dont_fit_the_columns_are_refused():
    with pytest.raises(ValueError, match="don't fit"):
        a_table(rows=(Row(label="FedAVG", method="fedavg", values="51.39 37.78"),))
    with pytest.raises(ValueError, match="no such place"):
        a_table(notes=(Note(text="x", on=Place(rows=("FedProx",))),))
    with pytest.raises(ValueError, match="no such place"):
        a_table(notes=(Note(text="x", on=Place(columns=(3,))),))


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(SettingsError, match="did you mean 'v1-1'"):
        paper_table("v11")


def test_slugs_of_a_tables_columns_differ():
    for table in paper_tables().values():
        assert len({column.slug for column in table.columns}) == len(table.columns)


def test_a_table_with_an_unknown_key_is_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"scenario": "gradual", "dataset": "mnist", "sett": {}}, type=Column)


def test_committed_results_of_table_1_are_still_found_and_read():
    """Made by earlier versions of this code, on the images that Debian has."""
    if not DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip(f"needs {DEBIAN_FASHION_MNIST}")
    results = Path(__file__).parents[4] / "results/small"
    of_before = (  # what ``small`` was when they were made
        *("local_epochs=2", "batch_size=16", "learning_rate_schedule=constant", "sub_generator_epochs=50"),
        *("generator_width=16", "width=16", "flow_hidden=128", "samples_per_round=0", "test_samples_per_class=null"),
    )
    choice = Choice(
        out=results, seeds=(0, 1, 2), scenarios=("gradual",), datasets=("fashion-mnist",), overrides=of_before
    )
    table = paper_table("1")
    planner = Planner(choice)
    runs = planner.runs(table)
    assert len([run for run in runs if run.state is State.FINISHED]) >= 20
    references = {(run.column.slug, run.seed): planner.reference(run.column, run.seed) for run in runs}
    written = json.loads((results / "table-1.json").read_text())["cells"]
    for cell in cells(table, runs, references):
        (earlier,) = [
            one for one in written if (one["method"], one["scenario"]) == (cell.row.label, cell.column.scenario)
        ]
        for metric in earlier["ours"]:
            values = {str(seed): value for seed, value in cell.values[metric].items()}
            assert values == pytest.approx(earlier["ours"][metric]["values"])
