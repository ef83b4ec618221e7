"""The recipe for a method in CONTRIBUTING.md: its four blocks are all that a method needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from support.image_sets import write_fashion_mnist

import replayfleet.federation.methods
from replayfleet.federation.methods import METHODS
from replayfleet.federation.service.fleet.presets import SETTINGS, TASKS
from replayfleet.federation.service.fleet.spec import make_spec, method_of
from replayfleet.federation.simulator.job import prepare
from replayfleet.federation.simulator.run_spec import RunSpec

ROOT = Path(__file__).parents[2]
NAME = "trimmed_mean"
MODULE = f"replayfleet.federation.methods.{NAME}"

DEMANDED = {
    "closed form": "extremes_at_both_ends_are_left_out",
    "inputs untouched": "uploads_stay_as_they_are",
    "one seed, same bits": "one_seed_gives_the_same_bits",
    "arrival order irrelevant": "order_of_arrival_changes_nothing",
    "a limit that equals a simpler method": "without_trimming_it_is_the_plain_mean",
    "better than chance": "learns_better_than_chance",
    "than the baseline it claims to beat": "harms_fedavg_and_not_it",
}
"""What the recipe says that a method's tests must show -> what the example calls it."""


class Example(NamedTuple):
    """The four blocks, in their order."""

    method: str
    entry: str
    tests: str
    page: str


def worked_example() -> Example:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.split(r"^###+ ", text.split("#### Worked example", 1)[1], flags=re.MULTILINE)[0]
    return Example(*re.findall(r"^```(?:python|markdown)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))


@pytest.fixture
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the example's file to the package and its line to ``METHODS``, until the test is over."""
    example = worked_example()
    (tmp_path / f"{NAME}.py").write_text(example.method, encoding="utf-8")
    monkeypatch.setattr(
        replayfleet.federation.methods, "__path__", [*replayfleet.federation.methods.__path__, str(tmp_path)]
    )
    importlib.invalidate_caches()
    table = {"Any": object}
    exec(example.entry, table)
    for name, kind in table["METHODS"].items():
        monkeypatch.setitem(METHODS, name, kind)
    yield
    sys.modules.pop(MODULE, None)
    if hasattr(replayfleet.federation.methods, NAME):
        delattr(replayfleet.federation.methods, NAME)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("_added")
def test_the_example_runs_two_rounds_of_the_simulator_and_writes_a_result(tmp_path: Path):
    write_fashion_mnist(tmp_path / "data", train_per_class=6, test_per_class=4)
    options = RunSpec(
        method=NAME,
        scenario="circulating",
        dataset="fashion-mnist",
        preset="tiny",
        out=tmp_path / "out",
        clients=3,
        rounds=2,
        data_root=tmp_path / "data",
        overrides=["trim=0.4", "samples_per_class=3", "test_samples_per_class=1", "local_epochs=1"],
        threads=1,
    )
    result = prepare(options).run(on_round=lambda _: None, on_client=lambda *_: None)
    assert [record.round for record in result.rounds] == [0, 1]
    assert result.run["settings"]["trim"] == 0.4
    assert (tmp_path / "out" / "result.json").is_file()


@pytest.mark.usefixtures("_added")
@pytest.mark.parametrize("preset", SETTINGS)
def test_a_fleet_accepts_the_example_with_every_preset(preset: str):
    task = TASKS["fashion-mnist"]
    spec = make_spec("yard", NAME, task, preset=preset, overrides={"trim": "0.1"}, run_seed=0)
    assert method_of(spec).trim == 0.1


@pytest.mark.usefixtures("_added")
def test_the_example_passes_its_own_tests(tmp_path: Path):
    path = tmp_path / f"test_methods_{NAME}.py"
    path.write_text(worked_example().tests, encoding="utf-8")
    tests = {name: test for name, test in vars(load(path)).items() if name.startswith("test_")}
    assert len(tests) >= 4
    for test in tests.values():
        test()


@pytest.mark.parametrize("demand", DEMANDED)
def test_the_example_has_the_tests_that_the_recipe_demands(demand: str):
    recipe, _ = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("#### Worked example", 1)
    assert demand in " ".join(recipe.split())
    assert DEMANDED[demand] in worked_example().tests


def test_the_example_s_page_has_the_shape_of_the_others():
    def headings(page: str) -> list[str]:
        return re.findall(r"^## (.+)$", page, re.MULTILINE)

    example = worked_example()
    shortest = (ROOT / "docs/methods/fedavg.md").read_text(encoding="utf-8")
    assert set(headings(example.page)) <= set(headings(shortest))
    named = re.findall(r"^\| [^|]* \| `(\w+)` \|", example.page, re.MULTILINE)
    assert named
    assert set(named) <= set(re.findall(r"\w+", example.method))


def test_the_example_is_no_method_of_ours_yet():
    assert importlib.util.find_spec(MODULE) is None
    assert NAME not in METHODS
