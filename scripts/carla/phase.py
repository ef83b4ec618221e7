"""One part of the driving demo while it runs: an aggregator, two vehicles, and an end also where the road ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from replayfleet.edge_client.operator.status import read_status
from replayfleet.edge_client.sync.session_logic import Step
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.scripts.carla.plan import VEHICLES, Plan, Work
from replayfleet.scripts.demo.processes import Child, Children
from replayfleet.scripts.demo.watch import Limit, Watch, seconds_from_now
from replayfleet.scripts.fleet.record import FleetRecord

LEAVE_S = 30.0
"""Vehicles leave by themselves within this time after the aggregator did."""

STRANDED_S = 20.0
"""A vehicle that has driven all its way and waits for data so long will never have any."""


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """How a part ended.

    Attributes:
        record: what happened.
        complete: all rounds were done; otherwise the road was over before.
        seconds: from the start of its processes.
    """

    record: FleetRecord
    complete: bool
    seconds: float


def run_phase(plan: Plan, work: Work, broker: str, console: Console, limit: Limit) -> PhaseEnd:
    """Run one part from its start to its end.

    Raises:
        ChildFailed: A process ended before its time.
        ReplayfleetError: The time is up, or the road was over before a single round was done.
    """
    began = time.monotonic()
    with Children(plan.logs) as children:
        aggregator = children.start(f"{work.name}-aggregator", plan.aggregator(work, broker))
        vehicles = [
            children.start(f"{work.name}-{name}", plan.vehicle(work, index, broker))
            for index, name in enumerate(VEHICLES)
        ]
        journal = plan.aggregator_dir(work) / "events.jsonl"
        watch = Watch(journal, children, console, limit, lambda: places(plan, work))
        with watch.shown():
            complete = _wait(plan, work, watch, aggregator, vehicles)
    record = watch.record
    if not record.committed_rounds():
        raise ReplayfleetError(
            f"{work.name}: the road was over before the first round was done; this machine needs slower vehicles, "
            f"for example --slower {3 * plan.slower:g}"
        )
    return PhaseEnd(record, complete, time.monotonic() - began)


def _wait(plan: Plan, work: Work, watch: Watch, aggregator: Child, vehicles: Sequence[Child]) -> bool:
    everybody = [aggregator, *vehicles]
    if not watch.wait_for([aggregator], may_end=everybody, until=stranding(plan, work)):
        return False
    watch.wait_for(vehicles, may_end=everybody, until=seconds_from_now(LEAVE_S))
    return True


def stranding(plan: Plan, work: Work, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """Return what says whether some vehicle has driven all its way and has nothing left to learn from."""
    since: dict[str, float] = {}

    def is_stranded() -> bool:
        for index, name in enumerate(VEHICLES):
            way = plan.roads.num_pictures(plan.drive(work, index))
            status = vehicle_status(plan, work, name)
            arrived = way is not None and sum(status.get(key, 0) for key in ("frames", "dropped", "failed")) >= way
            if arrived and status.get("phase") == Step.WAIT_DATA.value:
                since.setdefault(name, clock())
            else:
                since.pop(name, None)
        return any(clock() - start >= STRANDED_S for start in since.values())

    return is_stranded


def vehicle_status(plan: Plan, work: Work, vehicle: str) -> dict[str, Any]:
    """Return what a vehicle wrote about itself last; nothing before it has."""
    try:
        return read_status(plan.vehicle_dir(work, vehicle))
    except SettingsError:
        return {}


def places(plan: Plan, work: Work) -> str:
    """Say how far the vehicles are, for the live table."""
    parts = []
    for index, name in enumerate(VEHICLES):
        drive = plan.drive(work, index)
        status = vehicle_status(plan, work, name)
        done = int(sum(status.get(key, 0) for key in ("frames", "dropped", "failed")))
        town = drive.towns[done // plan.roads.frames_per_town % len(drive.towns)]
        way = plan.roads.num_pictures(drive)
        parts.append(f"{name}: {town}, picture {done}" + (f" of {way}" if way is not None else ""))
    return f"{work.name}: " + "; ".join(parts)
