"""What a table says about its runs, on made-up results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replayfleet.federation.simulator.charts import Curve
from replayfleet.federation.simulator.records import ClientRecord, RoundRecord, losses
from replayfleet.federation.simulator.result import Part, Result
from replayfleet.federation.simulator.tables import report
from replayfleet.federation.simulator.tables.measured import Cell
from replayfleet.federation.simulator.tables.paper import Column, PaperTable, Row
from replayfleet.federation.simulator.tables.plan import Choice
from replayfleet.federation.simulator.tables.report import Report

GRADUAL, CIRCULATING = (Column(scenario=name, dataset="fashion-mnist") for name in ("gradual", "circulating"))


def a_result(column: Column, settings: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> Result:
    stream = {"scenario": column.scenario, "num_clients": 5, "num_rounds": 3, "samples_per_class": 100}
    return Result(
        run={
            "method": "fedavg",
            "settings": dict(settings or {}),
            "dataset": column.dataset,
            "task": {"class_names": [str(index) for index in range(num_classes)]},
            "stream": {**stream, "classes_per_task": 2},
        },
        stream={"changes": [], "change_name": ""},
        rounds=[RoundRecord(round=t, accuracy=0.5, clients={}, aggregate_s=0, round_s=1) for t in range(3)],
        summary={},
        hardware={},
        versions={},
        commit="",
        wall_s=3,
        command=[],
    )


def a_cell(column: Column = GRADUAL, label: str = "FedAVG", seeds: Sequence[int] = (0,), **changes: Any) -> Cell:
    given: dict[str, Any] = {
        "row": Row(label=label, method="fedavg", in_paper=False),
        "column": column,
        "published": {},
        "values": {"AA": dict.fromkeys(seeds, 50.0)},
        "results": {seed: a_result(column) for seed in seeds},
        "folders": {},
        "missing": {},
    }
    return Cell(**{**given, **changes})


def a_report(*cells: Cell, out: Path = Path("out"), **choice: Any) -> Report:
    columns = tuple({cell.column.slug: cell.column for cell in cells}.values())
    table = PaperTable(number="99", title="a title", metrics=("AA", "AR"), columns=columns, rows=())
    return Report(table=table, choice=Choice(out=out, **choice), cells=cells)


def test_settings_that_came_later_are_told_of_earlier_runs_too():
    """Their runs say nothing of ``passes``: all trained on joined batches then."""
    result = a_result(GRADUAL)
    old = msgspec.structs.replace(result, run={**result.run, "method": "target"})
    told = a_report(a_cell(label="TARGET", results={0: old})).markdown()
    assert "| TARGET | `passes=joined`, `replay_augmented=False` |" in told


def test_settings_are_the_papers_own_only_where_nothing_was_changed():
    sizes = "5 clients, 3 rounds, 100 samples per class and round"
    assert f"Settings `paper`, the paper's own: {sizes}." in a_report(a_cell(), preset="paper").markdown()
    changed = a_report(a_cell(), preset="paper", clients=5, rounds=3, overrides=("local_epochs=1",)).markdown()
    assert "the paper's own" not in changed
    changes = "`--clients 5`, `--rounds 3`, `--set local_epochs=1`"
    assert f"Settings `paper`, changed by {changes}: {sizes}. That is not what the paper ran: " in changed
    assert "ours are no reproduction of them" in changed
    assert f"Settings `small`: {sizes}. That is less than the paper's" in a_report(a_cell()).markdown()


def test_settings_that_differ_by_data_set_are_shown_for_each():
    cifar, mnist = (Column(scenario="gradual", dataset=name) for name in ("cifar-10", "mnist"))
    text = a_report(
        *(a_cell(column) for column in (GRADUAL, CIRCULATING, cifar)),
        a_cell(mnist, results={0: a_result(mnist, {"local_epochs": 99})}),
        *(
            a_cell(column, "FedProx", results={0: a_result(column, {"local_epochs": 98})})
            for column in (GRADUAL, cifar)
        ),
    ).markdown()
    assert [line for line in text.splitlines() if line.startswith("| Fed") and line.count("|") == 3] == [
        "| FedAVG on fashion-mnist, cifar-10 | defaults |",
        "| FedAVG on mnist | `local_epochs=99` |",
        "| FedProx | `local_epochs=98` |",
    ]


def test_a_metric_of_fewer_seeds_than_the_row_says_how_many():
    made = a_report(a_cell(seeds=(0, 1, 2), values={"AA": {0: 50.0, 1: 51.0, 2: 52.0}, "AR": {1: 4.0}}))
    assert "| - | 51.00 ± 1.00 | - | 4.00 (1 seed) | 3 |" in made.markdown()
    (cell,) = made.values()["cells"]
    assert cell["ours"]["AR"] == {"mean": 4.0, "spread": None, "num_seeds": 1, "values": {"1": 4.0}}


def test_what_was_not_run_stands_once_per_row_and_column():
    text = a_report(
        a_cell(missing={1: "not run", 2: "not run"}),
        a_cell(CIRCULATING, missing={2: "not run", 1: "failed: it broke"}),
    ).markdown()
    assert (
        "- not run:\n"
        "  - FedAVG on Expt. 1 (gradual), fashion-mnist, seeds 1, 2\n"
        "  - FedAVG on Expt. 2 (circulating), fashion-mnist, seed 2\n"
        "- failed: it broke: FedAVG on Expt. 2 (circulating), fashion-mnist, seed 1\n"
    ) in text


@pytest.mark.parametrize(
    ("seeds", "labels"),
    [((0, 1, 2), ["FedAVG, 3 seeds", "FedProx, 1 seed"]), ((0,), ["FedAVG", "FedProx"])],
)
def test_a_chart_names_numbers_of_seeds_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int], labels: list[str]
):
    drawn: list[str] = []

    def noted(curves: Sequence[Curve], **_: Any) -> bytes:
        drawn.extend(curve.label for curve in curves)
        return b""

    monkeypatch.setattr(report, "accuracy_chart", noted)
    a_report(a_cell(seeds=seeds), a_cell(label="FedProx"), out=tmp_path).write()
    assert drawn == labels


@pytest.mark.parametrize(("num_classes", "is_said"), [(62, True), (6, False)])
def test_rounds_that_end_before_the_pass_over_all_classes_are_said(num_classes: int, is_said: bool):
    column = Column(scenario="extreme", dataset="emnist-byclass")
    cell = a_cell(column, seeds=(0, 1), results={s: a_result(column, num_classes=num_classes) for s in (0, 1)})
    text = a_report(cell).markdown()
    said = "- Expt. 3 (extreme), emnist-byclass: the rounds end before one pass over all classes; "
    assert text.count(f"{said}clients meet 3 of their 31 task types.") == is_said


def test_other_scenarios_have_no_pass_to_end():
    assert "one pass" not in a_report(a_cell(results={0: a_result(GRADUAL, num_classes=62)})).markdown()


def test_everybody_who_ran_rounds_is_named_with_the_gpu() -> None:
    whole = a_result(GRADUAL)
    gpu = {"processor": "abacus", "num_cores": 16, "gpu": "a fast one", "cuda": "13.0"}
    parts = [
        Part(first_round=0, hardware=gpu, versions={"torch": "2.11", "python": "3.12"}, commit="before", command=[]),
        Part(first_round=2, hardware=gpu, versions={"torch": "2.12", "python": "3.12"}, commit="after", command=[]),
    ]
    resumed = msgspec.structs.replace(whole, parts=parts, commit="after")
    lines = a_report(a_cell(results={0: resumed}))._provenance()
    assert lines[2:5] == [
        "- after, before",
        "- abacus, 16 cores, a fast one with CUDA 13.0",
        "- torch 2.11, Python 3.12, torch 2.12, Python 3.12",
    ]


def trained(*each: tuple[float | None, ...]) -> RoundRecord:
    """Return a round of clients with these losses."""
    sizes = {"bytes_up": 0, "bytes_up_everything": 0, "bytes_down": 0, "bytes_down_everything": 0}
    counts = {"num_test": 1, "num_seen": 1, "num_sub_generators_held": 0}
    clients = {
        f"client-{place}": ClientRecord(
            classes=(0,),
            accuracy=0.5,
            class_accuracy={},
            train_s=0.0,
            sub_generators_sent=(),
            losses=own,
            **counts,
            **sizes,
        )
        for place, own in enumerate(each)
    }
    return RoundRecord(round=0, accuracy=0.5, clients=clients, aggregate_s=0, round_s=1)


def test_the_loss_of_an_epoch_is_the_mean_of_all_who_trained_so_long_and_are_finite():
    first = [trained((4.0, 2.0), ()), trained((3.0, None), (1.0,))]
    second = [trained((6.0, 4.0), (2.0, 3.0)), trained((2.0,)), trained((1.0,))]
    assert losses([first, second]) == [[4.0, 3.0], [2.0]]
    assert losses([[trained((), ())]]) == [[]]
    assert losses([]) == []


def test_how_training_went_is_drawn_beside_accuracy_where_it_was_measured(tmp_path: Path):
    result = msgspec.structs.replace(a_result(GRADUAL), rounds=[trained((2.0, 1.0)), trained((1.5, 0.5))])
    a_report(a_cell(results={0: result}), a_cell(CIRCULATING), out=tmp_path).write()
    charts = {path.name for path in tmp_path.glob("*.png")}
    assert charts == {
        "table-99-gradual-fashion-mnist.png",
        "table-99-gradual-fashion-mnist-losses.png",
        "table-99-circulating-fashion-mnist.png",
    }
    text = (tmp_path / "table-99.md").read_text()
    assert {f"]({name})" in text for name in charts} == {True}
    assert text.count(".png)") == 3
