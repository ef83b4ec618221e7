"""The page of results is what the committed raw results give, and a script that finds nothing says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from support.demo_journal import baseline_result
from support.image_sets import write_fashion_mnist

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator.result import Result
from replayfleet.scripts.experiments.raw_results import pack, unpacked
from replayfleet.scripts.experiments.reproduce import BLOCKS, Block, choice_of, reproduce, table_of
from replayfleet.scripts.experiments.results_page import found_in, page_of
from replayfleet.scripts.experiments.search import lines_of

ROOT = Path(__file__).parents[3]


STREAM = {"num_clients": 2, "num_rounds": 3}


def a_result() -> Result:
    result = baseline_result()
    return msgspec.structs.replace(
        result, run={**result.run, "stream": {**result.run["stream"], **STREAM}, "preset": "tiny"}
    )


def committed(tmp_path: Path, *blocks: str) -> Path:
    """Write the demo's result as that of two methods of some blocks; returns the folder."""
    for block in blocks:
        for name in ("centralized", "pfedgrp-plus"):
            folder = tmp_path / block / "runs" / name / "gradual" / "fashion-mnist" / "seed-0"
            folder.mkdir(parents=True)
            (folder / "result.json").write_bytes(a_result().encode())
    return tmp_path


def test_the_page_is_what_the_raw_results_give():
    raw, page = ROOT / "results/trained/runs.tar.xz", ROOT / "docs/results.md"
    text, charts = page_of(found_in(unpacked(raw)), lines_of(ROOT / "results/trained/trials.jsonl"))
    assert text == page.read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("results-*.png")} == charts.keys()


def test_raw_results_are_packed_to_the_same_bytes_and_read_again(tmp_path: Path):
    out = committed(tmp_path / "out", "small")
    (out / "small/runs/pfedgrp/gradual/fashion-mnist/seed-0").mkdir(parents=True)  # begun, without a round
    first, second = tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"
    assert (pack(out, first), pack(out, second)) == (2, 2)
    assert first.read_bytes() == second.read_bytes()
    found = found_in(unpacked(first))
    assert [(one.block, one.name, one.seed) for one in found] == [
        ("small", "centralized", 0),
        ("small", "pfedgrp-plus", 0),
    ]
    assert [record.accuracy for record in found[0].raw.rounds] == [r.accuracy for r in a_result().rounds]


def test_numbers_stand_in_the_page_and_what_isnt_run_is_said(tmp_path: Path):
    out = committed(tmp_path / "out", "small", "small-epochs")
    pack(out, tmp_path / "runs.tar.xz")
    text, charts = page_of(found_in(unpacked(tmp_path / "runs.tar.xz")))
    average = 100 * sum(record.accuracy for record in baseline_result().rounds) / len(baseline_result().rounds)
    (row,) = [line for line in text.splitlines() if line.startswith("| `pfedgrp-plus` |")]
    assert f"| {average:.1f} | 0.0 |" in row  # beside itself it has no regret
    assert "Largest change: 0.0 points" in text
    assert "Not run yet." in text  # Centralized on all samples
    assert len(charts) == 2


def test_of_a_search_as_many_trials_of_each_method_count(tmp_path: Path):
    def trial(method: str, number: int, score: float) -> dict[str, Any]:
        settings = {"learning_rate": f"0.{number}"} if number else {}
        line = {"method": method, "trial": number, "score": score, "settings": settings, "process_cpu_s": 60.0}
        return {**line, "fixed": ["precision=bfloat16"]}

    trials = [trial("pfedgrp", 0, 0.7), trial("fedcil", 0, 0.5), trial("pfedgrp", 1, 0.6), trial("fedcil", 1, 0.55)]
    text, _ = page_of([], [*trials, trial("pfedgrp", 2, 0.9)])
    assert "| `pfedgrp` | 70.0 | 70.0 | 60.0 | those of the tables | 2 |" in text
    assert "| `fedcil` | 50.0 | 55.0 | 50.0 | `learning_rate=0.1` | 2 |" in text
    assert "Begun, with [too few trials]" in page_of([], trials[:2])[0]
    assert "search pfedgrp fedcil --set precision=bfloat16 --trials 2 --out" in text


@pytest.mark.parametrize(("system", "said"), [("", "CPU seconds."), ("other", "CPU seconds, on machines that differ.")])
def test_processor_time_of_machines_that_differ_is_not_shown_as_if_it_compared(tmp_path: Path, system: str, said: str):
    out, result = committed(tmp_path / "out", "small", "small-epochs"), a_result()
    if system:
        made = msgspec.structs.replace(result, hardware={**result.hardware, "system": system})
        path = out / "small-epochs/runs/centralized/gradual/fashion-mnist/seed-0/result.json"
        path.write_bytes(made.encode())
    pack(out, tmp_path / "runs.tar.xz")
    assert said in page_of(found_in(unpacked(tmp_path / "runs.tar.xz")))[0]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_asks_for_something_that_its_table_can_run(block: Block, tmp_path: Path):
    choice = choice_of(block, tmp_path)
    assert choice.out == tmp_path / (block.below or block.name)
    table = table_of(block)
    assert {(column.scenario, column.dataset) for column in table.columns} >= {
        (scenario, dataset) for scenario in block.scenarios for dataset in block.datasets
    }
    (mfcl,) = [row for row in table.rows if row.method == "mfcl"] or [None]
    assert mfcl is None or mfcl.set["replay_labels"] == "latents"
    assert msgspec.json.encode(choice.overrides)


def test_what_is_left_is_said_and_nothing_is_run(tmp_path: Path):
    write_fashion_mnist(tmp_path / "data", train_per_class=200, test_per_class=10)
    words = ["--blocks", "pilot", "--dry-run", "--out", str(tmp_path / "out"), "--data-root", str(tmp_path / "data")]
    result = CliRunner().invoke(reproduce, words, standalone_mode=False)
    assert result.return_value == 3
    assert "pilot  0 of 64 runs done: two clients and ten rounds" in result.output
    assert "64 runs left: time not known before the first round with --jobs 2" in result.output
    assert not (tmp_path / "out").exists()


def test_a_block_that_is_none_is_refused_and_does_not_pass_for_one_that_is_done(tmp_path: Path):
    with pytest.raises(SettingsError, match="--blocks: unknown block 'pilto'; did you mean 'pilot'"):
        CliRunner().invoke(
            reproduce,
            ["--blocks", "pilto", "--out", str(tmp_path / "out")],
            standalone_mode=False,
            catch_exceptions=False,
        )
