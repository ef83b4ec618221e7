"""The command line that is made from settings."""

from __future__ import annotations

import errno
import json
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED, CONNECTION, HELP, Program
from replayfleet.federation.service.command import explained, run_command, say, with_settings
from replayfleet.federation.service.logs import configure_logging
from replayfleet.federation.service.settings import TRAINING, Option, check_settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    depth: Annotated[int, Meta(ge=1), Option("How deep it is.", ADVANCED)] = 3
    deadline_s: Annotated[float, Meta(gt=0, le=60), Option("How long it waits.", TRAINING, unit="s")] = 6.0
    threads: Annotated[int, Option("Threads that it uses.", TRAINING, unset="half of the cores")] = 0
    view: Annotated[Literal["whole", "crops"], Option("What it sees.", TRAINING)] = "whole"
    source: Annotated[tuple[str, ...], Option("Cameras.", TRAINING, metavar="URI")] = ()
    secret: Annotated[Path | None, Option("File with the password.", CONNECTION)] = None
    broker: Annotated[str, Option("Where it is.", CONNECTION, metavar="URL")]
    stay: Annotated[bool, Option("Stay afterwards.", ADVANCED)] = True
    set: Annotated[dict[str, Any], Option("Changes.", ADVANCED, metavar="KEY=VALUE")] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)


@click.group(cls=Program, context_settings=HELP)
def program() -> None:
    """Do it."""


@program.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings(Settings, file="it.toml")
def run(settings: Settings, as_json: bool) -> None:
    """Run it."""
    click.echo(f"{settings} {as_json}")


@program.command()
@click.option("--json", is_flag=True, help="Print JSON.")
def status(json: bool) -> None:
    """Show it."""


def test_settings_and_what_is_the_commands_own_reach_the_function(tmp_path: Path) -> None:
    config = tmp_path / "it.toml"
    config.write_text("depth = 5\nstay = true\n")
    words = ["--config", str(config), "--broker", "b", "--no-stay", "--source", "a", "--source", "b", "--set", "k=v"]
    done = CliRunner().invoke(program, ["run", *words, "--json"], catch_exceptions=False)
    wanted = Settings(broker="b", depth=5, stay=False, source=("a", "b"), set={"k": "v"})
    assert done.output == f"{wanted} True\n"


def test_what_cannot_be_used_is_refused_by_its_option() -> None:
    with pytest.raises(SettingsError, match=r"^--depth is 'x', expected a whole number, at least 1$"):
        program.main(["run", "--broker", "b", "--depth", "x"], standalone_mode=False)


@click.command()
@with_settings(Settings)
def measure(settings: Settings) -> None:
    click.echo(f"{settings.depth} {settings.stay}")


def test_a_services_variables_are_not_those_of_a_tool_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYFLEET_DEPTH", "7")
    monkeypatch.setenv("REPLAYFLEET_STAY", "false")
    assert CliRunner().invoke(measure, ["--broker", "b"], catch_exceptions=False).output == "3 True\n"
    assert "depth=7" in CliRunner().invoke(program, ["run", "--broker", "b"], catch_exceptions=False).output


def test_help_stands_in_groups_with_defaults_ranges_and_units() -> None:
    text = CliRunner().invoke(program, ["run", "--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Connection:", "Training:", "Advanced:", "Other:"]
    words = " ".join(text.split())
    assert "--broker URL Where it is. [required] --secret PATH File with the password. Training:" in words
    assert "--deadline-s NUMBER How long it waits. [more than 0, at most 60 s; default: 6 s]" in words
    assert "--threads N Threads that it uses. [default: half of the cores]" in words
    assert "--view NAME What it sees. [whole or crops; default: whole]" in words
    assert "--source URI Cameras. [repeatable]" in words
    assert "--stay / --no-stay Stay afterwards. [default: on]" in words


def test_a_command_without_settings_has_one_group() -> None:
    text = CliRunner().invoke(program, ["status", "--help"]).output
    assert "Options:" in text
    assert "Other:" not in text


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (
            OSError(28, "No space left on device", "/data/x"),
            "/data/x: No space left on device; make room, then run it again",
            1,
        ),
        (
            sqlite3.OperationalError("database or disk is full"),
            "the disk: database or disk is full; make room, then run it again",
            1,
        ),
        (sqlite3.DatabaseError("database disk image is malformed"), "put a backup of the data dir in its place", 2),
        (IsADirectoryError(21, "Is a directory", "/data/x"), "/data/x: Is a directory; move it away, or put back", 2),
        (FileExistsError(17, "File exists", "/data/x"), "/data/x: File exists; move it away, or put back", 2),
        (
            OSError(40, "Too many levels of symbolic links", "/data/x"),
            "/data/x: Too many levels of symbolic links; ",
            2,
        ),
    ],
    ids=["file", "database", "damaged database", "folder", "file for a folder", "circle"],
)
def test_what_a_disk_does_to_a_command_is_one_line(error: Exception, said: str, code: int) -> None:
    text, found = explained("aggregator", error)
    assert said in text
    assert found == code


@pytest.mark.parametrize(("name", "what"), [("torch", "replayfleet[cpu]"), ("scippy", "what the package that asks")])
def test_a_module_that_is_missing_is_ours_or_another_package_s(name: str, what: str) -> None:
    text, code = explained("fleet-sim", ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert (code, f"install {what}" in text) == (2, True)


def test_without_arguments_a_program_prints_its_help_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = click.Group("edge-client", commands=[click.Command("start", help="Serve.")], no_args_is_help=True)
    monkeypatch.setattr("sys.argv", ["edge-client"])
    with pytest.raises(SystemExit):
        run_command(group, "edge-client")
    shown = capsys.readouterr()
    assert "\nCommands:\n" in shown.out + shown.err


def test_what_nobody_expected_is_raised() -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        explained("aggregator", sqlite3.OperationalError("no such table: rounds"))


def test_how_a_program_ends_is_said_in_the_form_of_its_logs(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        configure_logging(as_json=as_json)
        say("edge-client", "stopped before\nthe end")
    plain, line = capsys.readouterr().err.splitlines()
    assert plain == "edge-client: stopped before the end"
    told = json.loads(line)
    assert (told["event"], told["reason"], told["logger"]) == ("ended", "stopped before the end", "edge-client")
    configure_logging()


def test_who_is_stopped_by_a_closed_terminal_ends_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "write", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    say("edge-client", "stopped before the end")


_COMPUTES = """
import threading

import click
import torch

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.command import run_command
from replayfleet.federation.service.jobs import Jobs

begun = threading.Event()


def computes():
    weights = torch.ones(64, 64, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()
        begun.set()


@click.command()
@click.argument("wrong", type=bool)
def command(wrong):
    jobs = Jobs(lambda outcome: None, stop_timeout_s=0.1)
    jobs.submit(computes, print, print)
    begun.wait()
    jobs.stop()
    click.echo("goodbye")
    if wrong:
        raise SettingsError("another aggregator has the keys")


run_command(command, "aggregator")
"""


@pytest.mark.parametrize(("wrong", "code", "said"), [("no", 0, ""), ("yes", 2, "aggregator: another aggregator has")])
def test_a_service_that_ends_while_pytorch_computes_ends_with_its_own_code(wrong: str, code: int, said: str) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", _COMPUTES, wrong]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (code, "goodbye\n")
    assert ended.stderr.startswith(said)
    assert "terminate called" not in ended.stderr
