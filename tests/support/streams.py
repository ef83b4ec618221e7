"""Vehicles that stream recorded driving as processes of their own, watched from outside through their health ports."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replayfleet.scripts.carla.plan import Plan, Work
from replayfleet.scripts.carla.roads import HOLD_OUT
from replayfleet.scripts.launch.processes import Child, Children
from replayfleet.scripts.launch.record import FleetRecord, JournalTail
from tests.support.ports import free_port

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Look:
    """A vehicle at one moment: what it counts, then its newest prediction, then what it counts again.

    Attributes:
        before: ``/healthz``.
        frame_id: of the newest prediction; -1 without one.
        after: ``/healthz`` once more.
    """

    before: Mapping[str, Any]
    frame_id: int
    after: Mapping[str, Any]

    @property
    def serves(self) -> bool:
        """Whether a model answered; before the first, and while the vehicle stops, there is none."""
        return self.before["serving_version"] > 0 and self.after["serving_version"] > 0 and self.frame_id >= 0


@dataclass(slots=True)
class Streamed:
    """What was seen of a fleet from its start to its end.

    Attributes:
        record: its aggregator's journal.
        exit_codes: process -> exit code.
        looks: vehicle -> looks, in the order of time.
        status: vehicle -> what it wrote about itself last.
        seconds: from the first process to the last end.
    """

    record: FleetRecord
    exit_codes: dict[str, int] = field(default_factory=dict)
    looks: dict[str, list[Look]] = field(default_factory=dict)
    status: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0


def num_counted(health: Mapping[str, Any]) -> int:
    """Return how many captured frames a vehicle has accounted for."""
    return int(health["frames"]) + int(health["dropped"]) + int(health["failed"])


def stream(
    plan: Plan, work: Work, ways: Mapping[str, Sequence[str]], *, broker: str, min_pictures: int, timeout_s: float
) -> Streamed:
    """Run an aggregator and a vehicle per way until all of them have ended by themselves.

    Args:
        plan: says where, and how the aggregator is started; its towns are those of the ways.
        work: what is learned, and at how many frames a second the vehicles drive.
        ways: vehicle -> towns in the order of its drive, which begins again at its end.
        broker: URL.
        min_pictures: of a round.
        timeout_s: after it all are ended, and the test fails by what is missing.
    """
    plan.logs.mkdir(parents=True)
    plan.write_tasks()
    ports = {name: free_port() for name in ways}
    started = time.monotonic()
    with Children(plan.logs) as children:
        processes = {"aggregator": children.start("aggregator", [*plan.fleet(work).aggregator, "--broker", broker])}
        for name, way in ways.items():
            command = _vehicle(plan, work, name, way, broker)
            options = ["--min-pictures", str(min_pictures), "--health-port", str(ports[name])]
            processes[name] = children.start(name, [*command, *options])
        looks = _watch(processes, ports, started + timeout_s)
        record = FleetRecord(JournalTail(plan.fleet(work).data_dir / "events.jsonl").new_events())
        streamed = Streamed(record, looks=looks, seconds=time.monotonic() - started)
        for name, child in processes.items():
            code = child.process.poll()
            streamed.exit_codes[name] = -1000 if code is None else code  # -1000: it had to be ended
    for name in ways:
        streamed.status[name] = json.loads((plan.vehicle_dir(work, name) / "status.json").read_text())
    return streamed


def _vehicle(plan: Plan, work: Work, name: str, way: Sequence[str], broker: str) -> list[str]:
    source = f"front=carla-replay://{plan.out / 'roads'}?towns={','.join(way)}&rate={work.rate_hz:g}&loop=true"
    return [
        "edge-client", "start", "--device", "cpu", "--broker", broker, "--fleet", work.name, "--client-id", name,
        "--source", source, "--data-dir", str(plan.vehicle_dir(work, name)), "--threads", "1",
        "--hold-out", str(HOLD_OUT), "--min-samples", "4", "--max-samples", str(work.max_samples),
    ]  # fmt: skip


def _watch(processes: Mapping[str, Child], ports: Mapping[str, int], deadline: float) -> dict[str, list[Look]]:
    """Look at the vehicles until all processes have ended, one has failed, or the time is up."""
    looks: dict[str, list[Look]] = {name: [] for name in ports}
    while time.monotonic() < deadline:
        codes = [child.process.poll() for child in processes.values()]
        if all(code is not None for code in codes) or any(codes):
            break
        for name, port in ports.items():
            with contextlib.suppress(OSError, KeyError):  # it isn't there yet, or no more
                looks[name].append(_look(f"http://127.0.0.1:{port}"))
        time.sleep(POLL_S)
    return looks


def _look(url: str) -> Look:
    before = _get(f"{url}/healthz")
    num_counted(before)  # a vehicle that is starting counts nothing yet
    newest = _get(f"{url}/predictions")["cameras"].get("front", {})
    return Look(before, int(newest.get("frame", -1)), _get(f"{url}/healthz"))


def _get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:  # unhealthy as long as there is no broker
        with error:
            found = json.load(error)
    return found
