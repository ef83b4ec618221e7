"""Which Pythons ``make test-pythons`` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.environments import PYTHONS, pythons


def test_a_name_without_a_python_behind_it_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"python{PYTHONS[0]}"
    (tmp_path / name).write_text("#!/bin/sh\nexit 127\n")  # as pyenv's, of a version that isn't chosen
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(pythons, catch_exceptions=False)
    assert (done.exit_code, done.output.count(": not on this machine")) == (1, len(PYTHONS))
