"""Honest rivals' curves for the report: results of the simulator that come with this package, where they fit a demo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.simulator.result import Result

FOLDER = Path(__file__).with_name("rivals")
NAMES = {"fedavg-replay": "FedAvg with replay", "fedcil": "FedCIL", "pfedgrp-plus": "pFedGRP-plus"}
"""Who is shown, where its result is there -> its name for people, in the order of the legend."""


def rivals(baseline: Result, method: str) -> dict[str, Result]:
    """Return the runs on the very stream of a demo, at its settings and seed: method -> its result.

    Empty where the demo was asked for something else than what these were run with.

    Args:
        baseline: what ran beside the fleet.
        method: the fleet's, which is no rival of its own.
    """
    found = {}
    for name in NAMES:
        path = FOLDER / f"{name}.json"
        if name != method and path.is_file():
            result = msgspec.json.decode(path.read_bytes(), type=Result)
            if _shared(result.run) == _shared(baseline.run):
                found[name] = result
    return found


def _shared(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what defines a run, but for the method."""
    return {key: value for key, value in run.items() if key not in {"method", "settings"}}
