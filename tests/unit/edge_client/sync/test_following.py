from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replayfleet.edge_client.sync.following import ALIVE_S, Following
from replayfleet.federation.wire.protocol.messages import Announcement, FleetSpec

SPEC = FleetSpec("fleet", "fedavg", {}, {}, 0)


def said(instance: str, round_index: int, state: Any = "open", epoch: int = 0) -> Announcement:
    return Announcement(instance, round_index, state, 0.0, SPEC, epoch)


class Client:
    def __init__(self) -> None:
        self.following = Following("fleet")

    def hears(self, word: Announcement, now: float = 0.0) -> bool:
        follows = self.following.follows(word, now)
        if follows:
            self.following.take(word, now)
        return follows


@pytest.fixture
def client() -> Client:
    made = Client()
    assert made.hears(said("a", 5))
    return made


def test_a_restarted_aggregator_is_followed_at_once(client: Client) -> None:
    assert client.hears(said("b", 5), 1.0)
    assert client.following.notice == ""


def test_what_one_process_said_before_something_newer_is_not_heard_again(client: Client) -> None:
    assert not client.hears(said("a", 4))
    assert not client.hears(said("a", 4, "finished"))
    assert client.hears(said("a", 5, "aggregating"))


def test_the_end_of_an_earlier_run_said_again_ends_nothing_while_the_aggregator_lives(client: Client) -> None:
    assert not client.hears(said("earlier", 4, "finished"), ALIVE_S - 1)
    assert client.hears(said("earlier", 4, "finished"), ALIVE_S)


def test_after_the_broker_was_away_whoever_announces_may_lead(client: Client) -> None:
    """Broker and aggregator died together, so nobody said that the aggregator is gone."""
    client.following.reconnected()
    assert client.hears(said("new", 0), 1.0)
    assert "restored to round 0" in client.following.notice


def test_a_late_will_of_another_process_says_nothing(client: Client) -> None:
    assert not client.hears(said("older", 5, "offline"))
    assert client.hears(said("a", 0, "offline")), "a will was made when its process began"
    assert (client.following.word.state, client.following.word.round) == ("offline", 5)


def test_a_higher_epoch_is_followed_with_a_word_about_it_and_a_lower_one_while_nobody_else_lives(
    client: Client,
) -> None:
    assert client.hears(said("b", 2, epoch=1))
    assert "restored to round 2" in client.following.notice
    assert not client.hears(said("a", 6), ALIVE_S - 1)
    assert "second aggregator" in client.following.notice
    assert client.hears(said("b", 3, epoch=1), ALIVE_S - 1)
    assert client.following.notice == ""
    assert client.hears(said("a", 6), 2 * ALIVE_S)


def test_a_question_who_leads_and_another_fleets_word_are_nobodys_lead() -> None:
    client = Client()
    assert not client.hears(said("b", 0, "standby"))
    foreign = Announcement("x", 0, "open", 0.0, FleetSpec("other", "fedavg", {}, {}, 0))
    assert not client.hears(foreign)
    assert "other" in client.following.notice


def test_a_fleet_that_learns_more_classes_was_not_restored(client: Client) -> None:
    grown = msgspec.structs.replace(
        said("a", 5, epoch=1), spec=msgspec.structs.replace(SPEC, task={"class_names": ["bag", "tram"]})
    )
    assert client.hears(grown)
    assert client.following.notice == ""
    assert client.hears(msgspec.structs.replace(grown, round=4, epoch=2))
    assert "restored to round 4" in client.following.notice
