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
import json
import logging
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from replayfleet.federation.children import child_command, child_environment

log = logging.getLogger(__name__)

SOCKET = "run/jtop.sock"
EVERY_S = 2.0
TIMEOUT_S = 10.0


def is_present(root: Path) -> bool:
    """Return whether jtop's service has a socket below ``root`` and its client is installed."""
    return (root / SOCKET).exists() and importlib.util.find_spec("jtop") is not None


class Jtop:
    """jtop's client in a process that is started at the first reading, and given up when it ends or falls silent.

    Args:
        timeout_s: how long to wait for a reading; they come every ``EVERY_S``.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def read(self) -> tuple[dict[str, float], float | None]:
        """Return (zone -> degrees Celsius, watts of the board); empty and None where jtop says nothing."""
        if self._given_up:
            return {}, None
        try:
            self._process = self._process or _start()
            return _parsed(_line(self._process, self._timeout_s))
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._given_up = True
            self.close()
            log.warning("jtop tells nothing: %s; heat and power are unknown, training runs at full speed", error)
            return {}, None

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        child_command("replayfleet.devices.jtop"),
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the newest line that the process printed, waiting up to ``timeout_s``; lines before it are stale."""
    pipe = process.stdout
    assert pipe is not None
    if not select.select([pipe], [], [], timeout_s)[0]:
        raise TimeoutError(f"no reading within {timeout_s:g} s")
    line = pipe.readline()
    while line and select.select([pipe], [], [], 0)[0]:
        line = pipe.readline()
    if not line:
        raise EOFError("its client ended; is jtop.service running, in the same version?")
    return line


def _parsed(line: bytes) -> tuple[dict[str, float], float | None]:
    said = json.loads(line)
    power_w = said["power_w"]
    zones = {str(name): float(degrees) for name, degrees in said["zones"].items()}
    return zones, None if power_w is None else float(power_w)


def summarise(temperature: dict[str, Any], power: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"zones": {name: degrees}, "power_w": watts or None}`` of what jtop's client says.

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
    return {"zones": zones, "power_w": None if milliwatts is None else milliwatts / 1000}


def main() -> None:
    """Print what the service says, a JSON line per reading, until nobody reads or it fails."""
    with contextlib.suppress(BrokenPipeError), importlib.import_module("jtop").jtop(interval=EVERY_S) as board:
        while board.ok():
            sys.stdout.write(json.dumps(summarise(board.temperature, board.power)) + "\n")
            sys.stdout.flush()
