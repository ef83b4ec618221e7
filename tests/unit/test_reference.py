"""The pages that list every option of every program."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from replayfleet.scripts.reference import FOLDER, METHODS_INDEX, PROGRAMS, methods_index, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_programs_page_is_the_one_that_its_options_make(program: str) -> None:
    written = (FOLDER / f"{program}.md").read_text(encoding="utf-8")
    assert written == page(program), "`make reference` writes it anew"


def test_the_list_of_methods_is_the_one_that_the_code_makes() -> None:
    assert METHODS_INDEX.read_text(encoding="utf-8") == methods_index(), "`make reference` writes it anew"


def test_every_program_has_a_page() -> None:
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(PROGRAMS) == set(scripts)
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in PROGRAMS if f"reference/{name}" not in index] == []
