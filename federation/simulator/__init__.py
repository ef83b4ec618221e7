"""A simulated fleet: simulator, metrics, tables and charts; the streams themselves are in ``federation.streams``.

``SCENARIOS`` and the papers' metrics, each a function of ``federation.simulator.measures.metrics`` with its formula.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayfleet.federation.simulator.measures.metrics import (
        accuracy,
        average_accuracy,
        average_forgetting,
        average_forgetting_measure,
        average_regret,
        forgetting,
    )
    from replayfleet.federation.streams.stream import SCENARIOS

__all__ = [
    "SCENARIOS",
    "accuracy",
    "average_accuracy",
    "average_forgetting",
    "average_forgetting_measure",
    "average_regret",
    "forgetting",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use (PEP 562), so that ``fleet-sim --help`` loads no numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "streams.stream" if name == "SCENARIOS" else "simulator.measures.metrics"
    return getattr(importlib.import_module(f"replayfleet.federation.{home}"), name)
