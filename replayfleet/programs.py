"""Where the installed programs begin: Ctrl-C while they still import ends them in one line, as it does later."""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType


def aggregator() -> None:
    """Run ``aggregator``."""
    _run("aggregator", "replayfleet.aggregator.cli")


def edge_client() -> None:
    """Run ``edge-client``."""
    _run("edge-client", "replayfleet.edge_client.cli")


def fleet_sim() -> None:
    """Run ``fleet-sim``."""
    _run("fleet-sim", "replayfleet.federation.simulator.cli")


def model_export() -> None:
    """Run ``model-export``."""
    _run("model-export", "replayfleet.cli", "model_export")


def replayfleet() -> None:
    """Run ``replayfleet``."""
    _run("replayfleet", "replayfleet.cli")


def _run(name: str, home: str, main: str = "main") -> None:
    pressed = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        module = importlib.import_module(home)
    except (KeyboardInterrupt, Exception):  # what is half imported may fail of that
        if not pressed:
            raise
    if pressed:  # some libraries swallow it while they import
        sys.stderr.write(f"{name}: stopped\n")
        sys.exit(130)
    if signal.getsignal(signal.SIGINT) is interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    getattr(module, main)()
