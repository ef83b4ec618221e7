"""What the driving demo's page says in numbers, all of it read from the demo's folder.

A town begins at the first round whose report names it: reports tell place by place how much of the stream was right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.edge_client.operator.status import read_status
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.scripts.carla.plan import MARKER, VEHICLES
from replayfleet.scripts.carla.quality import EVERYWHERE, Quality, read_quality
from replayfleet.scripts.launch.record import ClientRound, FleetRecord, read_record

PARTS = ("crops", "detection")


@dataclass(frozen=True, slots=True)
class Vehicle:
    """One vehicle in one part."""

    name: str
    rounds: Sequence[ClientRound]  # what it did in each finished round
    towns: Sequence[str]  # in the order of its way, as planned
    status: Mapping[str, Any]  # what it wrote about itself last
    quality: Mapping[str, Quality]  # town, or all towns together -> its last model on held-out pictures

    @property
    def held_out(self) -> list[float | None]:
        """After each round, on its own held-out data so far."""
        return [found.accuracy for found in self.rounds]

    @property
    def stream(self) -> list[float | None]:
        """During each round, on what came, before it was learned."""
        return [found.stream_accuracy for found in self.rounds]

    @property
    def town_starts(self) -> dict[int, str]:
        """Round -> the towns that its report names first."""
        starts: dict[int, list[str]] = {}
        known: set[str] = set()
        for index, found in enumerate(self.rounds):
            fresh = [town for town in self.towns if town in found.place_accuracy and town not in known]
            fresh += sorted(set(found.place_accuracy) - set(self.towns) - known)
            known |= set(found.place_accuracy)
            if fresh:
                starts[index] = fresh
        return {index: ", ".join(towns) for index, towns in starts.items()}

    def total(self, name: str) -> int:
        """Sum of a count over all rounds."""
        return sum(getattr(found, name) or 0 for found in self.rounds)

    def count(self, name: str) -> int:
        """A count of its last status: ``frames`` answered, ``dropped``, ``failed``."""
        return int(self.status.get(name, 0))

    @property
    def age_p95_s(self) -> float | None:
        """From capture to answer, of the newest thousand frames at the end."""
        value = self.status.get("latency_p95_s")
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the demo: ``crops`` or ``detection``."""

    name: str
    record: FleetRecord  # the fleet, from the aggregator's journal
    vehicles: Sequence[Vehicle]

    @property
    def is_detection(self) -> bool:
        """Whether boxes are found here; the page asks."""
        return bool(self.record.spec.get("task", {}).get("kind") == "detection")

    @property
    def num_rounds(self) -> int:
        """Finished rounds."""
        return len(self.record.committed_rounds())

    def mean(self, name: str) -> float | None:
        """Mean over the vehicles of a measure of ``Quality`` on all towns; None where any lacks it."""
        values = [getattr(vehicle.quality[EVERYWHERE], name) for vehicle in self.vehicles]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class Facts:
    """A finished driving demo."""

    parts: Sequence[Part]  # in the order in which they ran
    marker: Mapping[str, Any]  # what the demo noted about itself

    @property
    def synthetic(self) -> bool:
        """Whether streets were drawn."""
        return bool(self.marker.get("synthetic"))

    def part(self, name: str) -> Part:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)

    def total(self, name: str) -> int:
        """Sum of a count of the vehicles' last statuses over both parts."""
        return sum(vehicle.count(name) for part in self.parts for vehicle in part.vehicles)

    def bytes(self) -> tuple[int, int]:
        """Return (bytes up, bytes down) on the wire, both parts, first models included."""
        up = sum(vehicle.total("bytes_up") for part in self.parts for vehicle in part.vehicles)
        down = sum(vehicle.total("bytes_down") for part in self.parts for vehicle in part.vehicles)
        first = sum(client.first_bytes for part in self.parts for client in part.record.clients.values())
        return up, down + first


def read_marker(out: Path) -> dict[str, Any]:
    """Return what a demo noted in its folder.

    Raises:
        ReplayfleetError: It is no demo's folder.
    """
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayfleetError(f"{out} is no folder of a driving demo: {error}") from error
    if not isinstance(marker, dict) or "towns" not in marker:
        raise ReplayfleetError(f"{out}: its {MARKER} is of no driving demo that was begun")
    return marker


def read_facts(out: Path) -> Facts:
    """Read a demo whose models have been measured.

    Raises:
        ReplayfleetError: Something is missing or damaged; says what.
    """
    marker = read_marker(out)
    parts = []
    for name in PARTS:
        record = read_record(out / name / "aggregator")
        parts.append(Part(name, record, _vehicles(out / name, record, marker["towns"][name])))
    return Facts(parts, marker)


def _vehicles(folder: Path, record: FleetRecord, towns: Mapping[str, Sequence[str]]) -> list[Vehicle]:
    qualities, vehicles = read_quality(folder), []
    for name in VEHICLES:
        if name not in qualities:
            raise ReplayfleetError(f"{folder} has no measured models of {name}; write the report again")
        try:
            status = read_status(folder / name)
        except SettingsError as error:
            raise ReplayfleetError(str(error)) from error
        rounds = [found.clients.get(name, ClientRound()) for found in record.committed_rounds()]
        vehicles.append(Vehicle(name, rounds, towns.get(name, ()), status, qualities[name]))
    return vehicles
