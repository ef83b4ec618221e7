"""Heat and power as jtop's service tells them, for containers that were given its socket and little else of the board.

jtop's client (package ``jetson-stats``) unpickles what its service sends and waits for it without bound. So it runs in
a process of its own, which prints a JSON line for every reading and ends with its pipe.

Facts: jetson-stats 7.2, documentation of ``jtop.temperature`` (degrees Celsius, ``online``) and ``jtop.power``
(``tot``, milliwatts). No Jetson was at hand: tried with the real client where no service answers, and with a stand-in.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.federation.children import Child, ChildLost, Parent, child_command

log = logging.getLogger(__name__)

SOCKET = "run/jtop.sock"
EVERY_S = 2.0
TIMEOUT_S = 10.0


def is_present(root: Path) -> bool:
    """Return whether jtop's service has a socket below ``root`` and its client is installed."""
    return (root / SOCKET).exists() and importlib.util.find_spec("jtop") is not None


class Summary(msgspec.Struct, frozen=True):
    """One reading: zone -> degrees Celsius, and watts of the board where they are known."""

    zones: dict[str, float]
    power_w: float | None


class Jtop:
    """jtop's client in a process that is started at the first reading, and given up when it ends or falls silent.

    Args:
        timeout_s: how long to wait for a reading; they come every ``EVERY_S``.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._child: Child[Summary] | None = None
        self._given_up = False

    def read(self) -> tuple[dict[str, float], float | None]:
        """Return (zone -> degrees Celsius, watts of the board); empty and None where jtop says nothing."""
        if self._given_up:
            return {}, None
        try:
            self._child = self._child or Child(
                child_command("replayfleet.devices.jtop"), Summary, errors=subprocess.DEVNULL
            )
            heard = self._child.receive(self._timeout_s)
            if heard is None:
                raise TimeoutError(f"no reading within {self._timeout_s:g} s")
            while (newer := self._child.receive(0)) is not None:  # those before it are stale
                heard = newer
            return heard[0].zones, heard[0].power_w
        except (OSError, ChildLost) as error:
            self._given_up = True
            self.close()
            log.warning("jtop tells nothing: %s; heat and power are unknown, training runs at full speed", error)
            return {}, None

    def close(self) -> None:
        """End the process. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def summarise(temperature: dict[str, Any], power: dict[str, Any]) -> Summary:
    """Return what jtop's client says, in short.

    Args:
        temperature: ``jtop.temperature``, name -> ``{"temp": degrees, "online": bool}``; -256 where it is off.
        power: ``jtop.power``, whose ``tot`` has ``power`` in milliwatts.
    """
    zones = {
        name: float(sensor["temp"])
        for name, sensor in temperature.items()
        if sensor.get("online", True) and sensor.get("temp", -256) > 0
    }
    milliwatts = power.get("tot", {}).get("power")
    return Summary(zones, None if milliwatts is None else milliwatts / 1000)


def main() -> None:
    """Print what the service says, a JSON line per reading, until nobody reads or it fails."""
    parent = Parent()
    with contextlib.suppress(BrokenPipeError), importlib.import_module("jtop").jtop(interval=EVERY_S) as board:
        while board.ok():
            parent.say(summarise(board.temperature, board.power))
