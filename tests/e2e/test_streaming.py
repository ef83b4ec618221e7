"""Two vehicles as real processes stream recorded CARLA frames at 10 a second while their fleet learns from them.

As in section 5.2 of FedGP: both drive through the same towns; then one gets to a town that neither has met (there it is
a highway, at round 60). Needs the recording (``REPLAYFLEET_DATA``, a folder that holds ``carla/``) and mosquitto.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import pytest
from support.streams import Look, Streamed, num_counted, stream

from replayfleet.federation.streams.datasets import DATA_ROOT_VARIABLE
from replayfleet.federation.wire.transport.broker import find_mosquitto, open_broker
from replayfleet.scripts.carla.plan import Plan, Size, Work
from replayfleet.scripts.carla.roads import find_recording, thin
from replayfleet.scripts.launch.record import ClientRound

RATE_HZ = 10.0
FRAMES_PER_TOWN = 100
LATE_TOWN = "Town05"
WAYS = {
    "vehicle-1": (*3 * ("Town01", "Town02", "Town03"), "Town01", LATE_TOWN, "Town02", "Town03"),
    "vehicle-2": ("Town02", "Town03", "Town01"),
}
"""The late town begins after 100 s; twelve rounds of at least 10 s go on for two minutes or more."""

MIN_PICTURES = 75
"""Of a round: what a town leaves when every fourth is held out."""

WORKS = {
    "crops": Work(name="crops", method="pfedgrp", preset="tiny", overrides={}, rate_hz=RATE_HZ, max_samples=128),
    "boxes": Work(
        name="boxes",
        method="fedgp",
        preset="tiny",
        overrides={"base": "der"},
        rate_hz=RATE_HZ,
        max_samples=64,
        detector=(160, 96, 2),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("task", WORKS)
def test_vehicles_stream_through_a_change_of_domain_while_their_fleet_learns(task: str, tmp_path: Path) -> None:
    recording = find_recording(None, os.environ.get(DATA_ROOT_VARIABLE))
    if recording is None:
        pytest.skip(f"no recorded CARLA frames: {DATA_ROOT_VARIABLE} names no folder that holds carla/")
    if find_mosquitto() is None:
        pytest.skip("no mosquitto on this machine")
    work = WORKS[task]
    roads = thin(recording, tmp_path / "roads", num_towns=4, frames_per_town=FRAMES_PER_TOWN)
    assert set(roads.towns) == {town for way in WAYS.values() for town in way}
    size = Size(num_towns=3, rounds_per_town=4, frames_per_town=roads.frames_per_town, works=(work,))
    plan = Plan(out=tmp_path, size=size, roads=roads)
    with open_broker(log=logging.getLogger("streaming")) as broker:
        streamed = stream(plan, work, WAYS, broker=broker.url, min_pictures=MIN_PICTURES, timeout_s=1400.0)

    assert streamed.exit_codes == dict.fromkeys(("aggregator", *WAYS), 0), plan.logs
    assert streamed.record.finished
    assert [found.index for found in streamed.record.committed_rounds()] == list(range(size.num_rounds))
    assert streamed.record.troubles == []
    for vehicle in WAYS:
        frames_flow_while_rounds_advance(streamed, vehicle)
        every_frame_is_accounted_for(streamed, vehicle)
        models_are_swapped_while_they_serve(streamed.looks[vehicle])
        every_town_of_the_way_is_measured(streamed, vehicle)
    the_change_of_domain_shows(streamed)


def reported(streamed: Streamed, vehicle: str) -> list[ClientRound]:
    """What a vehicle told after each round; where it is slow, the aggregator is gone before it tells of the last."""
    rounds = [found.clients[vehicle] for found in streamed.record.committed_rounds()]
    told = [found for found in rounds if found.frames is not None]
    assert len(told) >= len(rounds) - 1
    return told


def frames_flow_while_rounds_advance(streamed: Streamed, vehicle: str) -> None:
    frames = [found.frames or 0 for found in reported(streamed, vehicle)]
    assert all(later > earlier for earlier, later in itertools.pairwise(frames)), frames
    assert frames[-1] <= streamed.seconds * RATE_HZ + 1  # a recording is played at its own pace


def every_frame_is_accounted_for(streamed: Streamed, vehicle: str) -> None:
    """Frame ids count what was captured; what became of it is counted apart from them."""
    looks, end = streamed.looks[vehicle], streamed.status[vehicle]
    served = [look for look in looks if look.serves]
    assert len(served) >= 10
    for look in served:
        assert num_counted(look.before) - 1 <= look.frame_id + 1 <= num_counted(look.after)  # one may be in work
    assert num_counted(end) >= served[-1].frame_id + 1
    assert end["failed"] == 0
    assert end["dropped"] == served[0].before["dropped"]  # what came before the first model, and nothing since


def models_are_swapped_while_they_serve(looks: list[Look]) -> None:
    first_frames: dict[int, int] = {}
    for look in looks:
        if look.serves:
            first_frames.setdefault(look.before["serving_version"], look.before["frames"])
    assert len(first_frames) >= 4
    assert list(first_frames) == sorted(first_frames)
    frames = list(first_frames.values())
    assert all(later > earlier for earlier, later in itertools.pairwise(frames)), first_frames


def every_town_of_the_way_is_measured(streamed: Streamed, vehicle: str) -> None:
    rounds = reported(streamed, vehicle)
    assert {town for found in rounds for town in found.place_accuracy} == set(WAYS[vehicle])
    for found in rounds:
        assert found.num_stream > 0
        assert all(0.0 <= share <= 1.0 for share in (found.stream_accuracy or 0.0, *found.place_accuracy.values()))
        assert found.num_test  # held-out pictures, which were never learned from


def the_change_of_domain_shows(streamed: Streamed) -> None:
    """The late town's accuracy begins in the middle, at the one vehicle that got there."""
    first = {vehicle: first_rounds(streamed, vehicle) for vehicle in WAYS}
    late = first["vehicle-1"].pop(LATE_TOWN)
    assert late > 0
    assert all(index <= late for index in first["vehicle-1"].values())
    assert min(first["vehicle-1"].values()) < late
    assert LATE_TOWN not in first["vehicle-2"]


def first_rounds(streamed: Streamed, vehicle: str) -> dict[str, int]:
    """Town -> the first round whose report tells how the vehicle did there."""
    found: dict[str, int] = {}
    for index, told in enumerate(reported(streamed, vehicle)):
        for town in told.place_accuracy:
            found.setdefault(town, index)
    return found
