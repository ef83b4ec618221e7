"""Processes die, stand still and lose sight of each other at random moments: to the bit, all is as if they hadn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replayfleet.aggregator.steps import DEEDS, Step

ALWAYS = [step.value for step in Step if step not in {Step.EPOCH_RAISED, *DEEDS}]
"""Steps that every run takes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Lived = Callable[..., dict[str, Any]]
Undisturbed = Callable[[str, int], str]


@pytest.mark.parametrize("method", ["fedavg", "pfedgrp"])
def test_fifty_kills_of_client_aggregator_and_broker_change_no_bit(
    method: str, lived: Lived, undisturbed: Undisturbed
) -> None:
    said = lived(method=method, kills=50, seed=17)
    assert said["faults"] == 50
    assert set(said["deaths"]) == {"broker", "aggregator", "cam-0", "cam-1"}
    assert said["digest"] == undisturbed(method, said["rounds"])


@pytest.mark.parametrize("method", ["fedavg", "pfedgrp"])
def test_kills_at_every_marked_step_change_no_bit(method: str, lived: Lived, undisturbed: Undisturbed) -> None:
    said = lived(method=method, steps=ALWAYS)
    assert said["deaths"]["aggregator"] == len(ALWAYS) + 1  # and once to be told when to end
    assert said["digest"] == undisturbed(method, said["rounds"])


@pytest.mark.parametrize(
    "plan",
    [
        {"line": {"delay_s": 0.5, "loss": 0.2}, "partitions": 4},
        {"stops_s": 6.0},
        {"starved": ["memory_limit 1000000", "max_queued_messages 1", "max_inflight_messages 1"]},
    ],
    ids=["half a second late, a fifth lost, partitions", "stopped beyond their keepalive", "a broker without memory"],
)
def test_rounds_end_as_ever_though_the_fleet_is_disturbed(
    plan: dict[str, Any], lived: Lived, undisturbed: Undisturbed
) -> None:
    said = lived(rounds=4, **plan)
    assert said["faults"] > 0
    assert said["digest"] == undisturbed("fedavg", said["rounds"])


def test_wall_clocks_may_jump_by_ten_years_either_way(lived: Lived, undisturbed: Undisturbed) -> None:
    said = lived(kills=6, jumps_s=10 * 365 * 86400.0, seed=1)
    assert said["digest"] == undisturbed("fedavg", said["rounds"])
