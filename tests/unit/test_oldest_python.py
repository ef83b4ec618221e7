"""What Python 3.10, that of a Jetson with JetPack 6, refuses when it runs, though a type checker takes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aggregator", "devices", "edge_client", "export", "federation", "models", "scripts")


def refused(code: str) -> Iterator[str]:
    """Yield what Python 3.10 doesn't run."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Subscript) and ast.unparse(base.value).startswith("logging."):
                    yield f"class {node.name}: {ast.unparse(base)} takes no brackets before 3.11"
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ClassVar":
            yield f"{ast.unparse(node)}: get_type_hints takes no bare ClassVar before 3.11"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_written_that_only_later_versions_run(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [f"{path}: {what}" for path in files for what in refused(path.read_text(encoding="utf-8"))]
    assert found == []


def test_it_is_seen() -> None:
    code = "class A(logging.StreamHandler[str]):\n    b: ClassVar = 1\n    c: ClassVar[int] = 1"
    assert [what.partition(":")[0] for what in refused(code)] == ["class A", "b"]
