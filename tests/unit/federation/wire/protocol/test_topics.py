from __future__ import annotations

import pytest

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol import topics


@pytest.mark.parametrize(
    ("topic", "peer", "channel"),
    [
        (topics.topic_of("yard", "state", "cam-1"), "cam-1", "state"),
        (topics.topic_of("yard", "up", "cam-1"), "cam-1", "up"),
        (topics.topic_of("yard", "down", "cam-1"), "cam-1", "down"),
        (topics.topic_of("yard", "down"), "*", "down"),
        (topics.topic_of("yard", "control", "cam-1"), "cam-1", "control"),
        (topics.topic_of("yard", "round"), "*", "round"),
    ],
)
def test_every_topic_parses_to_what_it_was_built_from(topic: str, peer: str, channel: str):
    address = topics.parse_topic(topic)
    assert (address.fleet, address.peer, address.channel) == ("yard", peer, channel)
    assert topics.topic_of(address.fleet, address.channel, address.peer) == topic
    assert topic.count("/") <= 5


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "replayfleet/v2/yard/round",
        "replayfleet/v1/yard/up",
        "replayfleet/v1/yard/clients/cam-1",
        "replayfleet/v1/yard/clients/cam-1/round",
        "replayfleet/v1/yard/clients/+/up",
        "replayfleet/v1/../clients/cam-1/up",
        "replayfleet/v1/yard/clients/cam\n/up",
        "replayfleet/v1/yard/clients/" + "x" * 65 + "/up",
        "replayfleet/v1/yard/clients/cam-1/up/more",
    ],
)
def test_a_foreign_topic_is_refused(topic: str):
    with pytest.raises(MalformedMessage):
        topics.parse_topic(topic)


@pytest.mark.parametrize("client", ["", "*", "a/b", "+", "#", "ü", "x" * 65, "a\n", "all"])
def test_no_topic_is_built_from_a_bad_id(client: str):
    with pytest.raises(MalformedMessage, match="client id"):
        topics.topic_of("yard", "up", client)


def test_each_side_listens_to_what_the_other_sends():
    client = topics.client_subscriptions("yard", "cam-1")
    assert topics.topic_of("yard", "down", "cam-1") in client.data
    assert topics.topic_of("yard", "down") in client.data
    assert topics.topic_of("yard", "control", "cam-1") in client.control
    assert topics.topic_of("yard", "round") in client.control
    aggregator = topics.aggregator_subscriptions("yard")
    assert aggregator.data == ("replayfleet/v1/yard/clients/+/up",)
    assert set(aggregator.control) == {
        "replayfleet/v1/yard/round",  # another aggregator's
        "replayfleet/v1/yard/clients/+/state",
        "replayfleet/v1/yard/clients/+/control",
        "replayfleet/v1/yard/clients/+/thumbnail",
    }
