"""Heat and power as jtop's service tells them, for containers that were given its socket and little else of the board.

jtop's client (package ``jetson-stats``) unpickles what its service sends and waits for it without a bound.
So it runs in a process of its own, ``python -m devices.jtop``, which prints one JSON line and is ended when it takes
too long.

Facts: jetson-stats 7.2, documentation of ``jtop.temperature`` (degrees Celsius, ``online``) and ``jtop.power``
(``tot``, milliwatts). No Jetson was at hand: tried with the real client where no service answers, and with a stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOCKET = "run/jtop.sock"
TIMEOUT_S = 5.0


def is_present(root: Path) -> bool:
    """Return whether jtop's service has a socket below ``root`` and its client is installed."""
    return (root / SOCKET).exists() and importlib.util.find_spec("jtop") is not None


def ask(timeout_s: float = TIMEOUT_S) -> tuple[dict[str, float], float | None]:
    """Return (zone -> degrees Celsius, watts of the board); empty and None where jtop doesn't answer in time."""
    command = [sys.executable, "-m", "devices.jtop"]
    folder = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(  # noqa: S603
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
        said = json.loads(done.stdout)
        zones = {str(name): float(degrees) for name, degrees in said["zones"].items()}
        power_w = said["power_w"]
        return zones, None if power_w is None else float(power_w)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None


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
    """Ask the service once and print what it said as one JSON line; an exception ends the process."""
    with importlib.import_module("jtop").jtop() as board:
        board.ok()
        sys.stdout.write(json.dumps(summarise(board.temperature, board.power)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
