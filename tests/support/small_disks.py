"""A fleet whose disks are small, real and full for a while: what it says and does, as JSON. Runs in a mount namespace.

unshare -rm python -m tests.support.small_disks FOLDER client|aggregator
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import replayfleet.edge_client.serving.model
from replayfleet.federation.service.logs import configure_logging
from tests.support.client_world import World, events
from tests.support.served_here import ServedHere

SIZE_MB = 48


def mount(folder: Path) -> Path:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)], check=True)
    return folder


def fill(folder: Path) -> Path:
    """Take all that is left of a disk."""
    ballast = folder / "somebody-elses"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)) == 1 << 16:
                pass
        except OSError:
            pass
    return ballast


def rounds(world: World) -> int:
    return world.aggregator.coordinator.rounds.index


def frames(world: World) -> int:
    return world.clients["cam-0"].counts.num_frames


def main(place: Path, full: str) -> None:
    configure_logging()
    replayfleet.edge_client.serving.model.ServingProcess = ServedHere  # type: ignore[misc]
    mount(place / "aggregator")
    mount(place / "cam-0")
    world = World(place, num_clients=2, num_rounds=3, deadline_s=3600.0)
    client = world.start_client("cam-0", 0)
    world.start_client("cam-1", 1)
    disk = client.loop.disk if full == "client" else world.aggregator.loop.disk
    world.until(lambda: rounds(world) >= 1 and client.client.serving_version > 0)
    ballast = fill(place / ("cam-0" if full == "client" else "aggregator"))
    world.until(lambda: bool(disk.problem))
    before, served = rounds(world), frames(world)
    for _ in range(100):  # turns, in which nothing can be done
        world.pump()
    said: dict[str, Any] = {
        "problem": disk.problem,
        "rounds_while_full": rounds(world) - before,
        "frames_while_full": frames(world) - served,
        "phase": client.client.step.value,
        "client": client.status(),
        "client_summary": client.summary,
        "aggregator": dict(world.aggregator.health()),
        "aggregator_summary": world.aggregator.summary,
    }
    after = rounds(world)
    ballast.unlink()
    began = time.process_time()
    world.until(lambda: rounds(world) > after)
    said["cpu_s_to_the_next_round"] = time.process_time() - began
    world.until(lambda: all(service.client.finished for service in world.clients.values()))
    said["errors"] = [
        service.metrics.errors._value.get()  # type: ignore[attr-defined]
        for service in world.clients.values()
    ] + [world.aggregator._parts.metrics.errors._value.get()]
    said["aggregated"] = [entry["round"] for entry in events(world, "round committed")]
    said["problems_left"] = [disk.problem, client.status()["disk"], world.aggregator.health()["disk"]]
    world.close()
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
