"""Seconds from the end of a fault to the next committed round, untouched by hand: stores lost or put back, a takeover.

Clients and aggregator are whole, share this process and a broker in memory, and train very small models, so that a
round lasts well under a second and what is measured is how long the fleet takes to find together again.

    python -m benchmarks.recovery [--out benchmarks/results/recovery.json]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from replayfleet.aggregator.operator.backup import back_up, restore
from tests.support.client_world import World, world_of_two

MOST_S = 10.0
LIMIT_S = 900.0


def _restored(age: int) -> Callable[[World], None]:
    def befall(world: World) -> None:
        folder, backup = world.folder / "aggregator", world.folder / "backup"
        world.until_round(1)
        back_up(folder, backup)
        world.until_round(1 + age, LIMIT_S)
        world.kill_aggregator()
        restore(backup, folder, replace=True)
        world.aggregator = world.start_aggregator()

    return befall


def _lost(world: World) -> None:
    world.until_round(3)
    world.kill_aggregator()
    shutil.rmtree(world.folder / "aggregator")
    world.aggregator = world.start_aggregator()


def _taken_over(world: World) -> None:
    world.until_round(1)
    second = world.stand_by()
    world.kill_aggregator()
    world.aggregator = second
    world.others.clear()


FAULTS: Mapping[str, Callable[[World], None]] = {
    "restored, 1 round old": _restored(1),
    "restored, 5 rounds old": _restored(5),
    "restored, 50 rounds old": _restored(50),
    "store lost": _lost,
    "first of two aggregators killed": _taken_over,
}


def recovered(befall: Callable[[World], None]) -> dict[str, float]:
    """Return seconds, and CPU seconds of all of them together, until a round is committed after a fault."""
    with tempfile.TemporaryDirectory() as folder:
        world = world_of_two(Path(folder))
        try:
            befall(world)
            began, cpu = time.monotonic(), time.process_time()
            before = world.round
            world.until_round(before + 1, LIMIT_S)
            return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
        finally:
            world.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let each fault befall a fleet of its own, some times."""
    found: dict[str, Any] = {}
    for name, befall in FAULTS.items():
        turns = [recovered(befall) for _ in range(options.repeats)]
        found[name] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} | {"turns": turns}
        print(f"{name:32} {found[name]['seconds']:5.1f} s, {found[name]['cpu_s']:.1f} CPU s", flush=True)
    return found


def failed(result: dict[str, Any]) -> list[str]:
    return [f"{name}: {one['seconds']:.1f} s" for name, one in result.items() if one["seconds"] > MOST_S]


if __name__ == "__main__":
    run(measure, __doc__, failed=failed, repeats=1, threads=1)
