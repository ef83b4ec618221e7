"""Benchmarks run by hand; that what they take of the product is still there is known in a moment."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

from benchmarks.run import BENCHMARKS

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = sorted(
    one.name
    for one in pkgutil.walk_packages([str(FOLDER)], "benchmarks.")
    if not one.name.startswith("benchmarks.rivals")
)


def test_they_are_found() -> None:
    assert len(MODULES) > 30


def test_make_bench_runs_what_its_page_says() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    run = {
        found[1].rpartition(".")[2]
        for row in rows
        if "not part of `make bench`" not in row and (found := re.search(r"python -m benchmarks\.([\w.]+)", row))
    }
    assert run == BENCHMARKS.keys()


@pytest.mark.parametrize("name", MODULES)
def test_what_a_benchmark_imports_of_the_product_is_there(name: str) -> None:
    path = FOLDER.parent / (name.replace(".", "/") + ".py")
    if not path.exists():  # a package
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replayfleet"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
