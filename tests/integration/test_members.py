"""Real clients of a fleet whose operator excludes, pauses and rolls back, and what they say about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replayfleet.aggregator.control.verbs import Exclude, Pause, Readmit, Resume, RollBack, Verb
from replayfleet.edge_client.sync.parts import Compute
from tests.support.client_world import World, events


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    made = World(tmp_path, num_clients=3, num_rounds=None, deadline_s=600.0)
    yield made
    made.close()


def do(world: World, verb: Verb) -> None:
    world.aggregator.coordinator.control.do(verb, "ana", time.monotonic())


def reasons(world: World, client: str) -> list[str]:
    return [wait["reason"] for wait in world.clients[client].status()["waits"]]


def says(world: World, client: str, reason: str | None) -> Callable[[], bool]:
    return lambda: reasons(world, client) == ([] if reason is None else [reason])


def index(world: World) -> int:
    return world.aggregator.coordinator.rounds.index


def seen(world: World, client: str) -> Any:
    view = world.aggregator.coordinator.control.look(time.monotonic())
    return next(member for member in view.members if member.client == client)


def test_a_fleet_is_steered_and_its_clients_say_why_they_wait(world: World) -> None:
    world.start_client("cam-1", 0)
    world.start_client("cam-2", 1)
    rounds = world.aggregator.coordinator.rounds
    world.until(lambda: rounds.accepted == ("cam-1", "cam-2"))
    do(world, Exclude("cam-1"))
    assert rounds.accepted == ("cam-2",)
    world.until(says(world, "cam-1", "excluded"))
    do(world, Readmit("cam-1"))
    world.until(lambda: rounds.accepted == ("cam-1", "cam-2"))
    assert rounds.index == 0, "readmitted while its round is open, it still has its upload"

    world.start_client("cam-3", 2, compute=Compute(sampler="onnx", trains=False))
    world.until(lambda: index(world) >= 2)
    assert {event["uploads"] for event in events(world, "round closed")} == {2}, "who only serves is no trainer"
    assert world.clients["cam-3"].client.serving_version >= 2
    assert (reasons(world, "cam-3"), world.clients["cam-3"].status()["healthy"]) == (["serves-only"], True)
    assert seen(world, "cam-3").wait.reason == "serves-only"

    do(world, Pause())
    world.until(says(world, "cam-1", "paused"))
    do(world, Exclude("cam-2", "a dirty lens"))
    world.until(says(world, "cam-2", "excluded"))
    world.until(
        lambda: world.clients["cam-2"].status()["phase"] == "excluded from rounds"
    )  # what it trained ends first
    excluded = world.clients["cam-2"].status()
    assert not excluded["healthy"]
    assert "`aggregator readmit cam-2`" in excluded["waits"][0]["text"]
    before = index(world)
    do(world, Resume())
    world.until(lambda: index(world) >= before + 2)
    assert [event["uploads"] for event in events(world, "round closed")][-1] == 1

    do(world, Pause())
    world.until(lambda: world.aggregator.coordinator.rounds.is_open and says(world, "cam-1", "paused")())
    world.until(lambda: seen(world, "cam-1").confirmed_version == seen(world, "cam-1").version)
    served = world.aggregator._store.versions.current("cam-1")
    do(world, RollBack("cam-1"))
    world.until(lambda: world.clients["cam-1"].client.serving_version == served.manifest.version + 1)
    back = world.aggregator._store.versions.current("cam-1")
    assert back.origin < served.origin
    world.until(lambda: "rolled this client back" in world.clients["cam-1"].status()["notice"])

    do(world, Readmit("cam-2"))
    do(world, Resume())
    before = index(world)
    world.until(lambda: index(world) >= before + 2)
    assert [event["uploads"] for event in events(world, "round closed")][-1] == 2
    world.until(says(world, "cam-2", None))
    assert world.clients["cam-2"].status()["healthy"]
    assert [event["verb"] for event in events(world, "operator")] == [
        *("exclude", "readmit", "pause", "exclude", "resume", "pause", "rollback", "readmit", "resume")
    ]
