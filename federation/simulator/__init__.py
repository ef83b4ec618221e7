"""Metrics, simulator, charts; the streams themselves are in ``federation.streams``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayfleet.federation.streams.stream import SCENARIOS

__all__ = ["SCENARIOS"]


def __getattr__(name: str) -> Any:
    """Import the scenarios on first use (PEP 562), so that ``fleet-sim --help`` loads no numpy."""
    if name != "SCENARIOS":
        raise AttributeError(f"module 'replayfleet.federation.simulator' has no attribute {name!r}")
    return importlib.import_module("replayfleet.federation.streams.stream").SCENARIOS
