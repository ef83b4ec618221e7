from __future__ import annotations

import random

import pytest

from replayfleet.federation.wire.transport.interfaces import Will
from tests.support.memory_broker import Faults, MemoryBroker, MemorySession, matches

Inbox = list[tuple[str, bytes]]


def listener(broker: MemoryBroker, name: str, *topics: str, clean: bool = True) -> tuple[MemorySession, Inbox]:
    inbox: Inbox = []
    session = broker.session(name, on_message=lambda topic, payload: inbox.append((topic, payload)), clean=clean)
    session.subscribe(topics)
    session.start()
    return session, inbox


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/+", "a/b", True),
        ("a/+", "a/b/c", False),
        ("a/#", "a/b/c", True),
        ("+/b", "a/b", True),
        ("a/b/c", "a/b", False),
    ],
)
def test_filters_match_as_in_mqtt(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected


def test_a_late_subscriber_gets_what_is_retained_until_it_is_cleared() -> None:
    broker = MemoryBroker()
    talker, _ = listener(broker, "talker")
    talker.publish("state", b"online", retain=True)
    assert listener(broker, "late", "state")[1] == [("state", b"online")]
    talker.publish("state", b"", retain=True)
    assert listener(broker, "later", "state")[1] == []


def test_a_last_will_fires_on_death_and_not_on_goodbye() -> None:
    broker = MemoryBroker()
    _, inbox = listener(broker, "watcher", "state")
    session = broker.session("cam", on_message=lambda *_: None, will=Will("state", b"offline"))
    session.start()
    session.stop()
    assert inbox == []
    session.start()
    broker.kill("cam")
    assert inbox == [("state", b"offline")]
    assert broker.retained == {"state": b"offline"}
    assert session.num_connections == 2


def test_a_kept_session_gets_what_it_missed_and_a_clean_one_does_not() -> None:
    broker = MemoryBroker()
    talker, _ = listener(broker, "talker")
    kept, kept_inbox = listener(broker, "kept", "t", clean=False)
    clean, clean_inbox = listener(broker, "clean", "t")
    broker.kill("kept")
    broker.kill("clean")
    talker.publish("t", b"1")
    kept.start()
    clean.start()
    talker.publish("t", b"2")
    assert kept_inbox == [("t", b"1"), ("t", b"2")]
    assert clean_inbox == [("t", b"2")]


def test_publishing_while_disconnected_waits_for_the_connection() -> None:
    broker = MemoryBroker()
    _, inbox = listener(broker, "watcher", "t")
    session = broker.session("cam", on_message=lambda *_: None)
    session.publish("t", b"early")
    assert inbox == []
    session.start()
    assert inbox == [("t", b"early")]


def test_topics_overtake_each_other_but_each_keeps_its_order() -> None:
    broker = MemoryBroker(automatic=False, faults=Faults(random.Random(1), reorder=True, duplicate=0.3))
    talker, _ = listener(broker, "talker")
    _, inbox = listener(broker, "watcher", "a", "b")
    for number in range(50):
        talker.publish("a", b"%d" % number)
        talker.publish("b", b"%d" % number)
    broker.deliver()
    for topic in ("a", "b"):
        numbers = [int(payload) for name, payload in inbox if name == topic]
        assert numbers == sorted(numbers)
        assert len(numbers) > 50
    assert [name for name, _ in inbox] != ["a", "b"] * 50


def test_losses_happen_at_the_wanted_rate() -> None:
    broker = MemoryBroker(faults=Faults(random.Random(1), drop=0.5))
    talker, _ = listener(broker, "talker")
    _, inbox = listener(broker, "watcher", "a")
    for _ in range(200):
        talker.publish("a", b"x")
    assert 60 < len(inbox) < 140


def test_the_test_decides_when_messages_arrive() -> None:
    broker = MemoryBroker(automatic=False)
    talker, _ = listener(broker, "talker")
    _, inbox = listener(broker, "watcher", "a")
    for number in range(3):
        talker.publish("a", b"%d" % number)
    assert (inbox, broker.num_waiting) == ([], 3)
    assert broker.deliver(2) == 2
    assert [payload for _, payload in inbox] == [b"0", b"1"]


def test_an_oversized_payload_is_refused_at_the_sender() -> None:
    talker, _ = listener(MemoryBroker(max_payload_bytes=10), "talker")
    with pytest.raises(ValueError, match="the broker takes 10"):
        talker.publish("a", bytes(11))


def test_the_same_client_id_twice_ends_the_earlier_session() -> None:
    broker = MemoryBroker()
    earlier, _ = listener(broker, "cam", "t")
    later, inbox = listener(broker, "cam", "t")
    assert not earlier.connected
    later.publish("t", b"x")
    assert inbox == [("t", b"x")]
