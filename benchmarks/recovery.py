"""Seconds from the end of a fault until the fleet goes on, untouched by hand.

To the next committed round where a store was lost or put back, or an aggregator taken over; to the next message from
one end to the other where the broker was away.

Clients and aggregator are whole, share this process and a broker in memory, and train very small models, so that a
round lasts well under a second and what is measured is how long the fleet takes to find together again.

    python -m benchmarks.recovery [--out benchmarks/results/recovery.json]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from replayfleet.aggregator.operator.backup import back_up, restore
from replayfleet.federation.wire.transport.broker import open_broker
from replayfleet.federation.wire.transport.mqtt import MqttSession
from tests.support.client_world import World, world_of_two

MOST_S = 10.0
AWAY, MOST_MESSAGE_S = "broker away for ", 5.0
LIMIT_S = 900.0
log = logging.getLogger("recovery")


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
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(world_of_two(Path(folder))) as world:
        befall(world)
        began, cpu = time.monotonic(), time.process_time()
        before = world.round
        world.until_round(before + 1, LIMIT_S)
        return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}


def broker_returned(away_s: float) -> dict[str, float]:
    """Return seconds from a broker's return until one end's next message reaches the other; both have to come back."""
    heard: queue.SimpleQueue[float] = queue.SimpleQueue()
    with open_broker(log=log) as broker:
        url = broker.url
        listener = MqttSession(url, "listener", on_message=lambda topic, payload: heard.put(time.monotonic()))
        speaker = MqttSession(url, "speaker", on_message=lambda topic, payload: None)
        listener.subscribe(["t"])
        for session in (listener, speaker):
            session.start()
        while not (listener.connected and speaker.connected):
            time.sleep(0.01)
    time.sleep(away_s)
    with open_broker(log=log, port=int(url.rsplit(":", 1)[1])):
        began, cpu = time.monotonic(), time.process_time()
        while heard.empty():
            speaker.publish("t", b"hello")
            time.sleep(0.05)
        for session in (listener, speaker):
            session.stop()
        return {"seconds": heard.get() - began, "cpu_s": time.process_time() - cpu}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let each fault befall a fleet of its own, some times."""
    found: dict[str, Any] = {}
    faults = {name: partial(recovered, befall) for name, befall in FAULTS.items()}
    faults |= {f"{AWAY}{away_s} s": partial(broker_returned, away_s) for away_s in (1, 10, 30)}
    for name, fault in faults.items():
        turns = [fault() for _ in range(options.repeats)]
        found[name] = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} | {"turns": turns}
        print(f"{name:32} {found[name]['seconds']:5.1f} s, {found[name]['cpu_s']:.1f} CPU s", flush=True)
    return found


def failed(result: dict[str, Any]) -> list[str]:
    most = {name: MOST_MESSAGE_S if name.startswith(AWAY) else MOST_S for name in result}
    return [f"{name}: {one['seconds']:.1f} s" for name, one in result.items() if one["seconds"] > most[name]]


if __name__ == "__main__":
    run(measure, __doc__, failed=failed, repeats=1, threads=1)
