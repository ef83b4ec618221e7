"""How far the vehicles are while they drive, and whether one has come to its road's end with nothing left to learn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from replayfleet.edge_client.operator.status import read_status
from replayfleet.edge_client.sync.session_logic import Step
from replayfleet.federation.errors import SettingsError
from replayfleet.scripts.carla.plan import VEHICLES, Plan, Work

STRANDED_S = 20.0
"""A vehicle that has driven all its way and waits for data so long will never have any."""


def stranding(plan: Plan, work: Work, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Return what says whether some vehicle has driven all its way and has nothing left to learn from."""
    since: dict[str, float] = {}

    def is_stranded() -> bool:
        for index, name in enumerate(VEHICLES):
            way = plan.roads.num_pictures(plan.drive(work, index))
            status = _status(plan, work, name)
            if way is not None and _num_pictures(status) >= way and status.get("phase") == Step.WAIT_DATA.value:
                since.setdefault(name, clock())
            else:
                since.pop(name, None)
        return any(clock() - start >= STRANDED_S for start in since.values())

    return is_stranded


def places(plan: Plan, work: Work) -> str:
    """Say how far the vehicles are, for the live table."""
    parts = []
    for index, name in enumerate(VEHICLES):
        drive, done = plan.drive(work, index), _num_pictures(_status(plan, work, name))
        town = drive.towns[done // plan.roads.frames_per_town % len(drive.towns)]
        way = plan.roads.num_pictures(drive)
        parts.append(f"{name}: {town}, picture {done}" + (f" of {way}" if way is not None else ""))
    return f"{work.name}: " + "; ".join(parts)


def _status(plan: Plan, work: Work, vehicle: str) -> dict[str, Any]:
    try:
        return read_status(plan.vehicle_dir(work, vehicle))
    except SettingsError:  # it hasn't written anything yet
        return {}


def _num_pictures(status: dict[str, Any]) -> int:
    return int(sum(status.get(key, 0) for key in ("frames", "dropped", "failed")))
