"""Whom the aggregator listens to, with sessions that note it and time as a number."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from replayfleet.aggregator.listening import FIRST_S, LONGEST_S, SETTLE_S, Listening
from replayfleet.federation.service.inbox import STRANGERS

BASE = "replayfleet/v1/fleet"
CLIENTS = frozenset({"calm", "loud"})


class Session:
    def __init__(self) -> None:
        self.topics: set[str] = set()
        self.num_renewed = 0

    def subscribe(self, topics: Sequence[str]) -> None:
        self.topics.update(topics)

    def unsubscribe(self, topics: Sequence[str], *, discard: bool = False) -> None:
        self.topics.difference_update(topics)
        self.num_renewed += discard


class World:
    def __init__(self) -> None:
        self.control, self.data = Session(), Session()
        links: Any = SimpleNamespace(control=self.control, data=self.data)
        self.listening = Listening("fleet", links)
        self.listening.update(CLIENTS, (), 0)


def test_each_client_that_is_taken_in_has_topics_of_its_own_and_newcomers_one_for_all():
    world = World()
    assert world.data.topics == {f"{BASE}/clients/calm/up", f"{BASE}/clients/loud/up"}
    assert world.control.topics == {
        f"{BASE}/round",
        f"{BASE}/clients/+/state",
        f"{BASE}/clients/calm/control",
        f"{BASE}/clients/loud/control",
        f"{BASE}/clients/calm/thumbnail",
        f"{BASE}/clients/loud/thumbnail",
    }
    world.listening.update(frozenset({"calm"}), (), 1)
    assert world.data.topics == {f"{BASE}/clients/calm/up"}
    assert world.data.num_renewed == 0, "nobody floods, so nothing is thrown away"


def test_one_that_floods_is_muted_at_the_broker_and_what_was_queued_is_thrown_away():
    world = World()
    assert world.listening.update(CLIENTS, ["loud"], 1) == {"loud": FIRST_S}
    assert world.data.topics == {f"{BASE}/clients/calm/up"}
    assert f"{BASE}/clients/loud/control" not in world.control.topics
    assert world.data.num_renewed == world.control.num_renewed == 1
    assert world.listening.muted(1) == ["loud"]


def test_it_is_heard_again_after_a_while_and_muted_for_longer_if_it_floods_again():
    world, now, lengths = World(), 1.0, []
    for _ in range(9):
        (for_s,) = world.listening.update(CLIENTS, ["loud"], now).values()
        lengths.append(for_s)
        now += for_s
        world.listening.update(CLIENTS, (), now)
        assert f"{BASE}/clients/loud/up" in world.data.topics
    assert lengths[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert lengths[-1] == LONGEST_S
    assert world.listening.update(CLIENTS, ["loud"], now + 2 * LONGEST_S) == {"loud": FIRST_S}


def test_what_was_on_its_way_mutes_nobody_else():
    world = World()
    world.listening.update(CLIENTS, ["loud"], 1)
    assert world.listening.update(CLIENTS, ["loud"], 1 + SETTLE_S / 2) == {}


def test_one_that_floods_on_with_presences_costs_newcomers_their_topic_and_members_none():
    world = World()
    world.listening.update(CLIENTS, ["loud"], 1)
    assert world.listening.update(CLIENTS, ["loud"], 1 + SETTLE_S) == {STRANGERS: FIRST_S}
    own = {f"{BASE}/clients/calm/{channel}" for channel in ("state", "control", "thumbnail")}
    assert world.control.topics == {f"{BASE}/round"} | own


def test_made_up_ids_are_muted_together_and_newcomers_come_in_afterwards():
    world = World()
    assert world.listening.update(CLIENTS, [STRANGERS], 1) == {STRANGERS: FIRST_S}
    assert f"{BASE}/clients/+/state" not in world.control.topics
    assert {f"{BASE}/clients/{client}/state" for client in CLIENTS} <= world.control.topics
    world.listening.update(CLIENTS, (), 1 + FIRST_S)
    assert f"{BASE}/clients/+/state" in world.control.topics
    assert f"{BASE}/clients/calm/state" not in world.control.topics


def test_topics_that_all_share_are_never_muted():
    world = World()
    assert world.listening.update(CLIENTS, ["*", "nobody"], 1) == {}
    assert world.control.num_renewed == 0
