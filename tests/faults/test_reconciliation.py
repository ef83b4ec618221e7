"""An aggregator that comes back older than its fleet, or twice: nobody's hand is needed. Real clients and training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfleet.aggregator.operator.backup import back_up, restore
from tests.support.client_world import World, events, world_of_two


@pytest.fixture
def world(tmp_path: Path, served_here: None) -> Iterator[World]:
    made = world_of_two(tmp_path)
    yield made
    made.close()


def goes_on_from(world: World, index: int) -> None:
    """Round ``index`` is trained again by all and committed, and another one after it."""
    world.until_round(index)
    world.until_round(index + 2)
    assert all(client.client.serving_version >> 32 >= 1 for client in world.clients.values())


@pytest.mark.parametrize(
    ("age", "by_hand"),
    [
        (1, False),
        (5, False),
        pytest.param(50, False, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
    ids=["1 round", "5 rounds", "50 rounds", "5 rounds, copied back by hand"],
)
def test_a_fleet_goes_on_with_an_aggregator_that_was_restored_some_rounds_old(
    world: World, tmp_path: Path, age: int, by_hand: bool
) -> None:
    world.until_round(1)
    back_up(tmp_path / "aggregator", tmp_path / "backup")
    world.until_round(1 + age, 600)
    world.kill_aggregator()
    if by_hand:
        shutil.rmtree(tmp_path / "aggregator")
        shutil.copytree(tmp_path / "backup", tmp_path / "aggregator")
    else:
        restore(tmp_path / "backup", tmp_path / "aggregator", replace=True)
    world.aggregator = world.start_aggregator()
    world.until(lambda: world.aggregator.coordinator.leads)
    assert world.round == 1
    world.until(lambda: any("restored to round 1" in client.client.notice for client in world.clients.values()))
    goes_on_from(world, 1)


@pytest.mark.slow
def test_a_fleet_goes_on_with_an_empty_aggregator_where_the_store_was_lost(world: World, tmp_path: Path) -> None:
    world.until_round(3)
    world.kill_aggregator()
    shutil.rmtree(tmp_path / "aggregator")
    world.aggregator = world.start_aggregator()
    world.until(lambda: world.aggregator.coordinator.leads)
    assert world.round == 0
    goes_on_from(world, 0)


@pytest.mark.slow
def test_a_fleet_goes_on_with_an_empty_aggregator_though_the_broker_forgot_everything_too(
    world: World, tmp_path: Path
) -> None:
    world.until_round(3)
    world.kill_aggregator()
    shutil.rmtree(tmp_path / "aggregator")
    world.broker.retained.clear()
    world.aggregator = world.start_aggregator()
    goes_on_from(world, 0)
    assert {entry["client"] for entry in events(world, "client ahead")} == {"cam-0", "cam-1"}


def test_a_second_aggregator_stands_by_loses_no_upload_and_takes_over_when_the_first_is_gone(
    world: World, tmp_path: Path
) -> None:
    world.until_round(1)
    first = world.aggregator
    back_up(tmp_path / "aggregator", tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "second", as_spare=True)
    second = world.stand_by()
    world.until_round(4)
    assert second.coordinator.rounds.index == 1
    assert not events(world, "upload rejected")
    world.kill_aggregator()
    world.aggregator = second
    world.others.clear()
    world.until(lambda: second.coordinator.leads)
    goes_on_from(world, 1)
    world.others.append(world.start_aggregator())  # the first one comes back
    world.until(lambda: "standing by" in world.others[0].coordinator.notice)
    assert second.coordinator.leads
    assert first is not second


@pytest.mark.slow
def test_a_restored_aggregator_takes_the_fleet_from_the_one_that_runs(world: World, tmp_path: Path) -> None:
    world.until_round(1)
    back_up(tmp_path / "aggregator", tmp_path / "backup")
    world.until_round(3)
    restore(tmp_path / "backup", tmp_path / "restored")
    first = world.aggregator
    world.others.append(first)
    world.aggregator = world.start_aggregator("restored")
    world.until(lambda: "standing by" in first.coordinator.notice)
    goes_on_from(world, 1)
