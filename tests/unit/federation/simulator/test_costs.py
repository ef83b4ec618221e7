from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from replayfleet.federation.simulator.measures.costs import MODELS, SERIES, NotBuilt, size_of, training_cost
from replayfleet.federation.simulator.tables.costs_paper import CostRow, CostTable, amount, cost_tables, size_table
from replayfleet.federation.simulator.tables.costs_report import cost_report

ROWS = [(table, row) for table in cost_tables().values() for row in table.rows]
NOT_REPRODUCED = {("acgan", "cifar"), ("acgan", "imagenet")}


def test_amounts_are_read_with_their_unit():
    assert amount("7.19M") == 7.19e6
    assert amount("186.27K") == 186.27e3
    assert amount("35.568B") == 35.568e9
    assert amount("12") == 12


@pytest.mark.parametrize("model", [row.model for row in size_table().rows])
@pytest.mark.parametrize("series", size_table().series)
def test_models_have_the_papers_parameters_unless_the_page_says_that_they_havent(model: str, series: str):
    table = size_table()
    (row,) = [row for row in table.rows if row.model == model]
    flops, parameters = row.published(table.series.index(series))
    if flops == "-" or model in {"lander-generator", "ddpm"} or (model, series) in NOT_REPRODUCED:
        return
    try:
        size = size_of(model, series)
    except NotBuilt:
        return
    assert size.num_parameters == pytest.approx(amount(parameters), rel=2e-5)


@pytest.mark.parametrize(
    ("model", "series", "rel"),
    [
        ("task-model", "mnist", 2e-4),
        ("affcl-task-model", "cifar", 2e-4),
        ("wgan-gp", "mnist", 2e-4),
        ("wgan-gp", "cifar", 2e-4),
        ("wgan-gp-double", "cifar", 2e-4),
        ("acgan", "mnist", 2e-4),
        ("mfcl-generator", "imagenet", 2e-4),
        ("target-generator", "mnist", 2e-3),
    ],
)
def test_models_have_the_papers_flops(model: str, series: str, rel: float):
    table = size_table()
    (row,) = [row for row in table.rows if row.model == model]
    flops, _ = row.published(table.series.index(series))
    assert size_of(model, series).flops == pytest.approx(amount(flops), rel=rel)


def test_a_model_that_cannot_be_made_here_is_said(monkeypatch: pytest.MonkeyPatch):
    with contextlib.suppress(NotBuilt):
        MODELS["ddpm"](SERIES["cifar"])  # that one was made before makes no difference
    monkeypatch.setattr("replayfleet.models.ddpm.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(NotBuilt, match="needs"):
        MODELS["ddpm"](SERIES["cifar"])


def test_the_denoiser_has_the_parameters_of_the_ddpm_paper():
    pytest.importorskip("diffusers")
    size = size_of("ddpm", "cifar")
    assert size.num_parameters == pytest.approx(35.7e6, rel=2e-3)
    assert size.flops > 6e9


def test_the_papers_flow_was_counted_for_ten_samples():
    assert 10 * size_of("flow", "mnist").flops == pytest.approx(amount("46.49M"), rel=2e-4)


def test_every_row_names_a_model_that_can_be_asked_for():
    assert {row.model for row in size_table().rows} == {row.model for _, row in ROWS} | {
        "task-model",
        "affcl-task-model",
    }
    assert set(MODELS) == {row.model for row in size_table().rows}


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[f"{table.number}-{row.label}" for table, row in ROWS])
def test_the_papers_costs_follow_the_formula_or_a_note_says_that_they_dont(table: CostTable, row: CostRow):
    for epochs, published in ((row.epochs, row.cost), (row.global_epochs, row.global_cost)):
        assert bool(epochs) == bool(published)
        if not epochs:
            continue
        cost = training_cost(row.updates, epochs, amount(row.flops), share=row.share)
        has_note = any(note.concerns(row.label, 0) for note in table.notes)
        if row.label == "LANDER" and table.number == "7":
            assert has_note
        else:
            assert cost == pytest.approx(amount(published), rel=1e-3) or (
                has_note and amount(published) == pytest.approx(2 * cost)
            )


def test_the_known_double_of_table_7_is_exactly_a_double():
    assert 2 * training_cost(24.7, 200, 7.2e6, share=0.5) == pytest.approx(35.568e9, rel=1e-12)


def test_table_6_shows_both_and_its_notes():
    text = cost_report("6", None)
    assert "| ResNet-20 | 29.05M / 29.05M | 701.18K / 701.18K |" in text
    assert "338.40M [1] / 409.15M" in text
    assert "1. The paper's FLOPs are the generator's alone" in text


@pytest.mark.parametrize(
    ("number", "label", "model", "note"),
    [
        ("7", "AF-FCL", "46.5M [1] /", "1. The paper's FLOPs are those of ten samples."),
        ("7", "LANDER", "3173.19M [4] /", "4. Not reproduced; ours has the sizes of LANDER's public code."),
        ("8", "FedCIL", "957.5M [1] /", "1. The paper's FLOPs are those of a 28-pixel ACGAN of twice the width."),
        ("8", "pFedGRP + DDPM", "4061.7M [6] /", "6. Not reproduced; ours is the CIFAR-10 model of the DDPM paper"),
        ("9", "FedCIL", "1158.0M [1] /", "1. Not reproduced; ours is the ACGAN of the CIFAR series at 64 pixels."),
        ("9", "pFedGRP + WGAN-GP", "338.4M [5] /", "5. The paper's FLOPs are the generator's alone"),
    ],
)
def test_notes_of_table_6_stand_where_its_figures_are_used(number: str, label: str, model: str, note: str):
    lines = cost_report(number, None).splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {label} |")]
    assert f"| {model}" in row
    assert any(line.startswith(note) for line in lines)


def test_figures_that_are_reproduced_have_no_note():
    lines = cost_report("7", None).splitlines()
    assert any(line.startswith("| FedCIL | 150 / 150 | 1 | 400 | 241.1M / ") for line in lines)


def test_costs_take_the_papers_counts_where_nothing_ran(tmp_path: Path):
    text = cost_report("7", tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("| pFedGRP + WGAN-GP |")]
    assert "| 24.7 / 24.7 | 0.5 | 200 | 7.2M / 7.19M | 35.568B [" in line
    assert "] / 17.784B / 17.758B |" in line
    assert line.endswith("| 82.80 / - | 82.34 / - | paper |")


def test_counts_of_smaller_runs_are_shown_and_only_those_of_the_papers_size_are_reckoned_with(tmp_path: Path):
    """A run at ``small`` trains for other epochs: the paper's epochs times its updates would be nobody's cost."""
    run = Path(__file__).parents[4] / "results/small/runs/pfedgrp/gradual/fashion-mnist/seed-0/result.json"
    result = json.loads(run.read_bytes())
    result["summary"]["sub_generator_updates"] = 10.0
    copy = tmp_path / "runs/pfedgrp/gradual/fashion-mnist/seed-0/result.json"
    copy.parent.mkdir(parents=True)
    rounds = result["rounds"]
    for preset, times, ours in (("small", 1, "17.758B"), ("paper", 1, "17.758B"), ("paper", 8, "7.1895B")):
        result["run"]["preset"], result["rounds"] = preset, rounds * times
        copy.write_text(json.dumps(result))
        text = cost_report("7", tmp_path)
        (line,) = [line for line in text.splitlines() if line.startswith("| pFedGRP + WGAN-GP |")]
        assert "| 24.7 / 10 | 0.5 | 200 | 7.2M / 7.19M | 35.568B [" in line
        assert f"] / 17.784B / {ours} |" in line
        assert line.endswith(f"| gradual, settings {preset}, {20 * times} rounds, 1 seed |")
