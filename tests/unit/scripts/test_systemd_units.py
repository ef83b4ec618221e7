"""The unit files: read as systemd reads them, and by systemd itself where it is at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import replayfleet.aggregator.cli
import replayfleet.edge_client.cli
from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.service.settings import read_settings

FOLDER = Path(__file__).parents[3] / "scripts" / "systemd"
UNITS = ("edge-client.service", "aggregator.service")
COMMANDS = {"edge-client": replayfleet.edge_client.cli.cli, "aggregator": replayfleet.aggregator.cli.cli}


def read_unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Section -> key -> values, as systemd.syntax(7) has it."""
    sections: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = line.strip("[]")
        else:
            key, _, value = line.partition("=")
            sections.setdefault(section, {}).setdefault(key, []).append(value)
    return sections


def seconds(text: str) -> float:
    assert re.fullmatch(r"\d+", text)
    return float(text)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_says_when_to_restart_and_when_to_stop_trying(name: str) -> None:
    unit = read_unit(name)
    service = {key: values[-1] for key, values in unit["Service"].items()}
    assert (service["Type"], service["NotifyAccess"], service["Restart"]) == ("notify", "main", "on-failure")
    prevented = service["RestartPreventExitStatus"].split()
    assert prevented == (["2", "4"] if name == "aggregator.service" else ["2"]), (
        "wrong settings stay wrong, a run in vain too"
    )
    assert service["OOMPolicy" if name == "edge-client.service" else "KillMode"] in {"continue", "mixed"}
    burst = float(unit["Unit"]["StartLimitBurst"][0])
    interval = seconds(unit["Unit"]["StartLimitIntervalSec"][0])
    a_watchdog_cycle = seconds(service["WatchdogSec"]) + seconds(service["RestartSec"])
    assert interval / a_watchdog_cycle < burst, "a client whose watchdog ends it is tried for ever"
    assert interval / (seconds(service["RestartSec"]) + 5) > burst, "one that dies at once is not"
    assert unit["Install"]["WantedBy"] == ["multi-user.target"]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_command_that_exists_in_the_folder_that_it_may_write(name: str) -> None:
    service = read_unit(name)["Service"]
    program, command, *words = service["ExecStart"][0].split()
    group = COMMANDS[Path(program).name]
    assert isinstance(group, click.Group)
    known = {option for parameter in group.commands[command].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    state = service["StateDirectory"][0]
    assert words[words.index("--data-dir") + 1] == f"/var/lib/{state}"
    assert service["ProtectSystem"] == ["strict"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["User"] != ["root"]


def test_the_example_settings_are_settings(tmp_path: Path) -> None:
    for name in ("ca.crt", "member.crt", "member.key"):
        (tmp_path / name).touch()
    for name in ("edge.toml", "aggregator.toml"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(re.sub(r'identity = "[^"]*"', f'identity = "{tmp_path}"', text), encoding="utf-8")
    client = read_settings(ClientSettings, tmp_path / "edge.toml", {"data_dir": Path("x")})
    aggregator_settings = read_settings(AggregatorSettings, tmp_path / "aggregator.toml", {"data_dir": Path("x")})
    assert (client.health_port, aggregator_settings.health_port) == (9101, 19100)
    assert client.broker == aggregator_settings.broker


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_no_fault(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine: the unit was only parsed by this test's own reader")
    text = (FOLDER / name).read_text(encoding="utf-8")
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program is not None
    unit = tmp_path / name
    unit.write_text(text.replace(program[1], sys.executable), encoding="utf-8")  # /opt/replayfleet needn't be here
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if name in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_user_is_in_the_group_that_owns_cameras() -> None:
    lines = (FOLDER / "sysusers.conf").read_text(encoding="utf-8").splitlines()
    assert "m replayfleet video" in lines
    assert read_unit("edge-client.service")["Service"]["User"] == ["replayfleet"]
