"""``replayfleet init``: what a fleet is set up with, explained line by line, and nothing overwritten."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from replayfleet.cli import cli

ROOT = Path(__file__).parents[2]


def run(*words: str) -> click.testing.Result:
    return CliRunner().invoke(cli, ["init", *words])


def test_it_writes_what_the_repository_has_and_says_what_to_do_next(tmp_path: Path) -> None:
    done = run(str(tmp_path / "yard"))
    assert done.exit_code == 0, done.output
    for name in ("docker", "monitoring", "systemd"):
        for path in (ROOT / "scripts" / name).iterdir():
            assert (tmp_path / "yard" / name / path.name).read_bytes() == path.read_bytes()
            assert f"written  {tmp_path}/yard/{name}/{path.name}\n" in done.output
    assert done.output.index("aggregator enroll cam-1") < done.output.index("edge-client doctor --config")


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "edge.toml").write_text("mine")
    done = run(str(tmp_path))
    assert (tmp_path / "systemd" / "edge.toml").read_text() == "mine"
    assert f"kept     {tmp_path}/systemd/edge.toml\n" in done.output
    assert (tmp_path / "systemd" / "aggregator.toml").is_file()
    assert "written" not in run(str(tmp_path)).output


def test_a_disk_that_is_full_leaves_no_half_of_a_file_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    done = run(str(tmp_path / "my yard"))
    assert re.search(r"my yard/docker/\S+ can't be written \(No space left", str(done.exception))
    assert [path for path in (tmp_path / "my yard").rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert f"--config '{tmp_path}/my yard'/systemd/edge.toml" in run(str(tmp_path / "my yard")).output


def test_a_folder_that_can_t_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(str(tmp_path / "file"))
    assert "is a file, not a folder; choose another" in str(done.exception)


@pytest.mark.parametrize("name", ["systemd/edge.toml", "systemd/aggregator.toml"])
def test_every_setting_has_a_comment_of_its_own(name: str) -> None:
    lines = (ROOT / "scripts" / name).read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert line.startswith("#") or re.search(r"\S +# \S", line), f"{name}: {line}"


@pytest.mark.parametrize("name", ["systemd/edge-client.service"])
def test_every_group_of_lines_has_a_comment_above(name: str) -> None:
    text = (ROOT / "scripts" / name).read_text(encoding="utf-8")
    longest = max(re.split(r"(?m)^#.*\n", text), key=lambda group: group.count("\n"))
    assert longest.count("\n") <= 11, f"{name}: nothing explains these lines:\n{longest}"
