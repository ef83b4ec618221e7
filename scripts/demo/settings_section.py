"""The end of the report: enough to run the same again, and what it ran on."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping
from typing import Any

from replayfleet.scripts.demo.facts import Facts
from replayfleet.scripts.pages.parts import definitions
from replayfleet.scripts.words import clock


def settings_section(facts: Facts) -> str:
    """Return the section with settings, seeds, versions, hardware, commands and what went wrong."""
    spec, demo, baseline = facts.record.spec, facts.demo, facts.baseline
    stream = baseline.run["stream"]
    run = {
        "method": spec["method"],
        "data set": baseline.run["dataset"],
        "stream": f"{stream['scenario']}, {stream['samples_per_class']} images per class and round",
        "clients": len(facts.record.clients),
        "rounds": len(facts.rounds),
        "seed": spec["run_seed"],
        "settings": demo.get("preset", ""),
        "fleet's time": f"{clock(facts.record.ended_at - facts.record.started_at)} minutes",
        "FedAvg's simulation": f"{clock(baseline.wall_s)} minutes, beside the fleet",
        "broker": str(demo.get("broker", "")).partition(",")[0],
        "threads": "1 per process",
    }
    hardware = baseline.hardware
    machine = {
        "processor": hardware.get("processor") or hardware.get("machine", ""),
        "cores": hardware.get("num_cores", ""),
        "system": hardware.get("system", ""),
        "commit": baseline.commit[:12] + ("+" if baseline.commit.endswith("+") else "") or "outside a checkout",
        **baseline.versions,
    }
    commands = [shlex.join(map(str, demo.get("command", []))), shlex.join(baseline.command)]
    blocks = [
        _block("Run", run),
        _block("Machine and versions", machine),
        _block("Settings of pFedGRP", spec["settings"]),
        _block("Settings of FedAvg", baseline.run["settings"]),
    ]
    troubles = "".join(f"<li>{html.escape(line)}</li>" for line in facts.record.troubles)
    return (
        '<section id="settings"><h2>What ran</h2><div class="blocks">'
        + "".join(blocks)
        + "</div><h3>Commands</h3>"
        + "".join(f"<pre>{html.escape(command)}</pre>" for command in commands if command)
        + (f"<h3>Refused or failed on the way</h3><ul>{troubles}</ul>" if troubles else "")
        + "</section>"
    )


def _block(title: str, values: Mapping[str, Any]) -> str:
    return definitions(title, [(str(name), _text(value)) for name, value in values.items()])


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
