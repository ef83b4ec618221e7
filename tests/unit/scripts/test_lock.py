"""The lock files are those of pyproject.toml, and name every file by its digest and none by where it lies."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from replayfleet.scripts.lock import EXTRAS, faults, lock_file

ROOT = Path(__file__).parents[3]


def test_they_are_as_new_as_the_dependencies() -> None:
    assert faults(ROOT) == []


@pytest.mark.parametrize(("old", "new"), [('"click>=8.1,<9"', '"click>=8.2,<9"'), ('">=3.10,<3.15"', '">=3.11,<3.15"')])
def test_a_changed_range_makes_both_old(tmp_path: Path, old: str, new: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "pyproject.toml").write_text(text.replace(old, new), encoding="utf-8")
    shutil.copytree(ROOT / "scripts" / "locks", tmp_path / "scripts" / "locks")
    assert [line.split()[0] for line in faults(tmp_path)] == [f"scripts/locks/{extra}.txt" for extra in EXTRAS]


def test_a_changed_line_length_does_not(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(text.replace("line-length = 120", "line-length = 100"), encoding="utf-8")
    shutil.copytree(ROOT / "scripts" / "locks", tmp_path / "scripts" / "locks")
    assert faults(tmp_path) == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_package_has_one_version_and_digests_and_no_index(extra: str) -> None:
    text = re.sub(r"^#.*\n", "", lock_file(extra, ROOT).read_text(encoding="utf-8"), flags=re.MULTILINE)
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==[^ ;]+( ; [^\\]+)? \\\n +--hash=sha256:[0-9a-f]{64}", entry), (
            entry
        )
    assert "://" not in text
    assert "--index" not in text
    assert re.search(r"^torch==", text, re.MULTILINE)
