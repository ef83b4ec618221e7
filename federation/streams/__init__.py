"""Labelled image sets and the streams that clients meet them in; needs no torch, so devices and simulator share it.

``SCENARIOS``: name -> the order in which a client's task types come.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayfleet.federation.streams.stream import SCENARIOS

__all__ = ["SCENARIOS"]


def __getattr__(name: str) -> Any:
    """Import the scenarios on first use (PEP 562), so that a name of this package alone loads no numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("replayfleet.federation.streams.stream").SCENARIOS
