"""How hot a board is and what it draws, and how much of its time training may have because of that.

Temperatures come from ``/sys/class/thermal``, power from INA chips under ``/sys/class/hwmon``. Where both are missing
``tegrastats`` is asked, and where that is missing too, jtop (``devices/jtop.py``). All of that works without root.

Facts: the kernel's documents driver-api/thermal/sysfs-api, hwmon/sysfs-interface, hwmon/ina3221 and hwmon/ina2xx;
NVIDIA's Jetson Linux developer guide, "Thermal Management" and "Power Management", for the names of Jetson's rails and
the output of ``tegrastats``. No Jetson was at hand.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.jtop import Jtop, is_present

BELOW_TRIP_C = 5.0
"""How far below a zone's own passive trip, where the kernel slows the whole board down, training is slowed."""

HYSTERESIS_C = 3.0
HYSTERESIS_SHARE = 0.05
PAUSE_OVER_C = 5.0
"""This far above the limit training stands still."""

MIN_TIME_SHARE = 0.1

MAX_ZONE_C = 200.0
"""No board is so hot: what says so is no sensor."""
ANSWER_S = 3.0
"""For ``tegrastats`` to print a line of ``MAX_LINE_BYTES`` at most."""
MAX_LINE_BYTES = 4096

_INA = re.compile(r"ina(219|220|226|230|231|233|234|237|238|260|700|780|3221)")
_BOARD_RAILS = ("VDD_IN", "VIN", "POM_5V_IN")
"""Rails that all of a Jetson's power comes through; others are parts of it."""
_DUMMY_ZONES = ("pmic",)
"""Reads 100 degrees for ever on Jetsons before Orin."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the sensors said; None for what there is no sensor of.

    Attributes:
        temperature_c: of the zone that is nearest to its limit, or over it by most.
        zone: its name.
        over_c: degrees above that zone's limit, negative below; None where nothing limits it.
        power_w: of the whole board.
    """

    temperature_c: float | None = None
    zone: str = ""
    over_c: float | None = None
    power_w: float | None = None


class Sensors:
    """Reads a board's sensors; a sensor that can't be read is left out, for some are off while their unit sleeps.

    Args:
        allowance: its limits.
        root: what stands before ``/sys``.
        tegrastats: what to run where sysfs tells nothing; None looks for it.
    """

    def __init__(self, allowance: TrainingAllowance, root: Path = Path("/"), tegrastats: str | None = None) -> None:
        self._allowance = allowance
        self._thermal = root / "sys/class/thermal"
        self._hwmon = root / "sys/class/hwmon"
        self._tegrastats = tegrastats or shutil.which("tegrastats")
        self._jtop = Jtop() if is_present(root) else None

    def read(self) -> Reading:
        """Return what the sensors say now; takes milliseconds, seconds where ``tegrastats`` or jtop must be asked."""
        zones, power_w = self._zones(), self._power_w()
        if not zones and power_w is None and self._tegrastats is not None:
            zones, power_w = parse_tegrastats(_first_line(self._tegrastats))
        if not zones and power_w is None and self._jtop is not None:
            degrees, power_w = self._jtop.read()
            zones = {name: (temp, None) for name, temp in degrees.items() if not name.lower().startswith(_DUMMY_ZONES)}
        zones = {name: zone for name, zone in zones.items() if 0 < zone[0] < MAX_ZONE_C}
        if not zones:
            return Reading(power_w=power_w)
        limits = {name: self._limit_c(trip_c) for name, (_, trip_c) in zones.items()}
        bounded = {name: zones[name][0] - limit for name, limit in limits.items() if limit is not None}
        if not bounded:
            zone, (temperature_c, _) = max(zones.items(), key=lambda item: item[1][0])
            return Reading(temperature_c, zone, None, power_w)
        zone = max(bounded, key=lambda name: bounded[name])
        return Reading(zones[zone][0], zone, bounded[zone], power_w)

    def close(self) -> None:
        """End what a reading started. Idempotent."""
        if self._jtop is not None:
            self._jtop.close()

    def _limit_c(self, trip_c: float | None) -> float | None:
        limits = [self._allowance.max_temperature_c, None if trip_c is None else trip_c - BELOW_TRIP_C]
        return min((limit for limit in limits if limit is not None), default=None)

    def _zones(self) -> dict[str, tuple[float, float | None]]:
        """Zone -> (degrees, its lowest passive trip)."""
        zones: dict[str, tuple[float, float | None]] = {}
        for folder in sorted(self._thermal.glob("thermal_zone*")):
            name, milli = _text(folder / "type"), _number(folder / "temp")
            if milli is None or milli <= 0 or name.lower().startswith(_DUMMY_ZONES):
                continue
            trips = [
                _number(folder / f"{kind.name.removesuffix('_type')}_temp")
                for kind in folder.glob("trip_point_*_type")
                if _text(kind) == "passive"
            ]
            own = f"{name} {folder.name}" if name in zones else name or folder.name  # several may be called alike
            zones[own] = (milli / 1000, min((t / 1000 for t in trips if t and t > 0), default=None))
        return zones

    def _power_w(self) -> float | None:
        """The board's input rail, or the sum of all rails where none is known to be that; None without a sensor."""
        rails: dict[str, float] = {}
        for folder in sorted(self._hwmon.glob("hwmon*")):
            if _INA.fullmatch(_text(folder / "name")):
                rails.update({f"{folder.name}/{name}": watts for name, watts in _rails(folder).items()})
        for name, watts in rails.items():
            if name.rpartition("/")[2] in _BOARD_RAILS:
                return watts
        return sum(rails.values()) if rails else None


_EARLIER = "earlier: "


class Throttle:
    """Turns readings into the share of its time that training may run: halved while too hot, given back slowly.

    Attributes:
        time_share: 0 to 1.
        reason: why it is less than 1, ``earlier: ...`` while it is given back; empty if it isn't.
    """

    def __init__(self, allowance: TrainingAllowance) -> None:
        self._max_power_w = allowance.max_power_w
        self.time_share = 1.0
        self.reason = ""

    def update(self, reading: Reading) -> float:
        """Take a reading; returns ``time_share``, 0 to 1."""
        over_c = reading.over_c if reading.over_c is not None else -HYSTERESIS_C
        over_power = -HYSTERESIS_SHARE
        if reading.power_w is not None and self._max_power_w is not None:
            over_power = reading.power_w / self._max_power_w - 1
        if over_c > PAUSE_OVER_C:
            self.time_share = 0.0
        elif over_c > 0 or over_power > 0:
            self.time_share = max(MIN_TIME_SHARE, self.time_share / 2)
        elif over_c <= -HYSTERESIS_C and over_power <= -HYSTERESIS_SHARE:
            self.time_share = min(1.0, round(self.time_share + 0.1, 3))
        if over_c > 0:
            self.reason = f"{reading.zone} is {reading.temperature_c:.0f} degrees, {over_c:.0f} above its limit"
        elif over_power > 0:
            self.reason = f"the board draws {reading.power_w:.1f} W, expected at most {self._max_power_w:g}"
        elif self.time_share == 1:
            self.reason = ""
        elif self.reason and not self.reason.startswith(_EARLIER):
            self.reason = _EARLIER + self.reason
        return self.time_share


def parse_tegrastats(line: str) -> tuple[dict[str, tuple[float, float | None]], float | None]:
    """Return (zone -> (degrees, None), watts of the board) of a line that ``tegrastats`` printed.

    Temperatures stand as ``cpu@49.5C``, rails as ``VDD_IN 5069mW/5069mW`` (now and mean), before JetPack 5 without
    the unit.
    """
    zones: dict[str, tuple[float, float | None]] = {
        name: (float(degrees), None)
        for name, degrees in re.findall(r"(\w+)@(-?\d{1,4}(?:\.\d{1,3})?)C\b", line)
        if float(degrees) > 0 and not name.lower().startswith(_DUMMY_ZONES)
    }
    rails: dict[str, float] = {
        name: int(milli) / 1000 for name, milli in re.findall(r"\b([A-Z][A-Z0-9_]+) (\d{1,7})(?:mW)?/\d+(?:mW)?", line)
    }
    rails = {name: watts for name, watts in rails.items() if name not in {"RAM", "SWAP", "IRAM"}}
    for name in _BOARD_RAILS:
        if name in rails:
            return zones, rails[name]
    return zones, sum(rails.values(), 0.0) if rails else None


def _first_line(tegrastats: str) -> str:
    """Run ``tegrastats``, which never ends by itself, until it has printed a line; empty if it doesn't in time."""
    said, end = b"", time.monotonic() + ANSWER_S
    try:
        with subprocess.Popen(  # noqa: S603
            [tegrastats, "--interval", "200"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            pipe, poll = process.stdout.fileno(), select.poll()
            poll.register(pipe, select.POLLIN)
            try:
                while b"\n" not in said and len(said) < MAX_LINE_BYTES:
                    if not poll.poll(1000 * max(0.0, end - time.monotonic())) or not (piece := os.read(pipe, 1024)):
                        break
                    said += piece
            finally:
                process.kill()
    except OSError:
        return ""
    return said.partition(b"\n")[0].decode("utf-8", "replace")


def _rails(folder: Path) -> dict[str, float]:
    """Return rail -> watts of one chip: its own power, else volts times amperes of each labelled channel."""
    watts: dict[str, float] = {}
    for file in sorted(folder.glob("power*_input")):
        micro = _number(file)
        if micro is not None:
            watts[_text(folder / f"{file.name.removesuffix('_input')}_label") or folder.name] = micro / 1e6
    if watts:
        return watts
    for file in sorted(folder.glob("in[0-9]_input")):
        number = file.name[2]
        milli_volts, milli_amperes = _number(file), _number(folder / f"curr{number}_input")
        label = _text(folder / f"in{number}_label")
        if milli_volts is not None and milli_amperes is not None and label != "sum of shunt voltages":
            watts[label or f"{folder.name}-{number}"] = milli_volts * milli_amperes / 1e6
    return watts


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _number(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        number = float(path.read_text(encoding="ascii"))
        return number if math.isfinite(number) else None
    return None
