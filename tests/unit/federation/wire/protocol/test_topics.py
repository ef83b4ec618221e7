from __future__ import annotations

import pytest

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.wire.protocol import topics


@pytest.mark.parametrize(
    ("topic", "peer", "channel", "carries_blocks"),
    [
        (topics.state_topic("yard", "cam-1"), "cam-1", "state", False),
        (topics.up_topic("yard", "cam-1"), "cam-1", "up", True),
        (topics.down_topic("yard", "cam-1"), "cam-1", "down", True),
        (topics.down_topic("yard", "*"), "*", "down", True),
        (topics.control_topic("yard", "cam-1"), "cam-1", "control", False),
        (topics.round_topic("yard"), "*", "round", False),
    ],
)
def test_every_topic_parses_to_what_it_was_built_from(topic: str, peer: str, channel: str, carries_blocks: bool):
    address = topics.parse_topic(topic)
    assert (address.fleet, address.peer, address.channel) == ("yard", peer, channel)
    assert address.carries_blocks is carries_blocks
    assert address.topic == topic
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


@pytest.mark.parametrize("client", ["", "a/b", "+", "#", "ü", "x" * 65, "a\n"])
def test_no_topic_is_built_from_a_bad_id(client: str):
    with pytest.raises(MalformedMessage, match="client id"):
        topics.up_topic("yard", client)


def test_each_side_listens_to_what_the_other_sends():
    client = topics.client_subscriptions("yard", "cam-1")
    assert topics.down_topic("yard", "cam-1") in client.data
    assert topics.down_topic("yard", "*") in client.data
    assert topics.control_topic("yard", "cam-1") in client.control
    assert topics.round_topic("yard") in client.control
    aggregator = topics.aggregator_subscriptions("yard")
    assert aggregator.data == ("replayfleet/v1/yard/clients/+/up",)
    assert set(aggregator.control) == {"replayfleet/v1/yard/clients/+/state", "replayfleet/v1/yard/clients/+/control"}
