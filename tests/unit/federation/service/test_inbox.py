"""Who may put how much into an inbox, and whose turn it is. Time is a number."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from replayfleet.federation.service.inbox import (
    NUM_STRANGER_LANES,
    OVERHEAD_BYTES,
    QUANTUM_BYTES,
    STRANGERS,
    FairInbox,
    Message,
    Rate,
    Work,
)
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Block

FREE = Rate(1e12, 1e12, 0)
FLOOD = b"\1" + bytes(9999)


def topic(client: str, channel: str = "up") -> str:
    return f"replayfleet/v1/fleet/clients/{client}/{channel}"


def inbox(*members: str, **changes: Any) -> FairInbox:
    return FairInbox(frozenset(members), **{"messages": FREE, "newcomers": FREE, "blocks": FREE, **changes})


def drained(made: FairInbox) -> list[Any]:
    items = []
    while (item := made.get(0)) is not None:
        items.append(item)
    return items


def client_of(message: Message) -> str:
    return message.topic.split("/")[4]


def payloads(made: FairInbox, client: str) -> list[bytes]:
    return [item.payload for item in drained(made) if client_of(item) == client]


def test_messages_of_one_client_keep_their_order_over_all_its_topics():
    made = inbox("cam")
    for number in range(50):
        made.put(topic("cam", "up" if number % 2 else "control"), bytes([number]), 0)
    assert payloads(made, "cam") == [bytes([number]) for number in range(50)]


def test_what_waits_is_bounded_in_bytes_however_small_the_messages_are():
    made = inbox("cam", max_bytes=100 * OVERHEAD_BYTES)
    for _ in range(1000):
        made.put(topic("cam"), b"", 0)
    assert len(drained(made)) < 100
    assert made.num_dropped > 900


def test_when_it_is_full_whoever_has_most_in_it_loses_its_newest():
    made = inbox("loud", "calm", max_bytes=20 * len(FLOOD))
    for number in range(40):
        made.put(topic("loud"), bytes([number]) + FLOOD, 0)
    for number in range(5):
        made.put(topic("calm"), bytes([number]) + FLOOD, 0)
    found = drained(made)
    assert [item.payload[0] for item in found if client_of(item) == "calm"] == [0, 1, 2, 3, 4]
    loud = [item.payload[0] for item in found if client_of(item) == "loud"]
    assert loud == list(range(len(loud)))
    assert made.take_dropped() == Counter({"loud": 40 - len(loud)})
    assert made.take_dropped() == Counter()


def test_the_services_own_work_always_fits_and_goes_first():
    made = inbox("cam", max_bytes=2000)
    for _ in range(10):
        made.put(topic("cam"), b"", 0)
    work = [Work("job", True, lambda now: None) for _ in range(100)]
    for item in work:
        made.put_own(item)
    assert drained(made)[:100] == work


def test_a_client_that_floods_takes_no_more_turns_than_one_that_does_not():
    made = inbox("loud", "calm")
    for _ in range(1000):
        made.put(topic("loud"), FLOOD, 0)
    for _ in range(10):
        made.put(topic("calm"), FLOOD, 0)
    before = 0
    while client_of(made.get(0)) != "calm":
        before += 1
    assert before <= QUANTUM_BYTES / len(FLOOD)
    assert sum(client_of(made.get(0)) == "calm" for _ in range(18)) >= 7


def test_it_says_of_whom_something_waits():
    made = inbox("cam-1", "cam-2")
    made.put(topic("cam-1"), b"1", 0)
    made.put(topic("cam-1"), b"2", 0)
    assert made.senders() == {"cam-1"}
    made.get(0)
    assert made.senders() == {"cam-1"}
    made.get(0)
    assert made.senders() == frozenset()


def test_turns_are_shared_by_size_not_by_number():
    made = inbox("large", "small")
    for _ in range(100):
        made.put(topic("large"), bytes(4 * QUANTUM_BYTES), 0)
    for _ in range(10_000):
        made.put(topic("small"), b"", 0)
    sent: Counter[str] = Counter()
    for _ in range(2000):
        item = made.get(0)
        assert isinstance(item, Message)
        sent[client_of(item)] += len(item.payload) + OVERHEAD_BYTES
    assert sent["large"] == pytest.approx(sent["small"], rel=0.3)


def test_ids_that_nobody_knows_share_a_few_lanes_and_members_keep_theirs():
    made = inbox("cam", max_bytes=200 * len(FLOOD))
    for number in range(3000):
        made.put(topic(f"made-up-{number}", "state"), FLOOD, 0)
    for _ in range(5):
        made.put(topic("cam"), FLOOD, 0)
    assert [client_of(item) for item in drained(made)[: NUM_STRANGER_LANES * 7]].count("cam") == 5
    assert set(made.take_dropped()) == {STRANGERS}


def test_more_messages_than_the_rate_are_dropped_before_they_wait_and_come_in_again_with_time():
    made = inbox("cam", messages=Rate(per_s=1000, burst=5000, overhead=1000))
    for _ in range(100):
        made.put(topic("cam"), b"", 0)
    assert len(drained(made)) == 5
    for _ in range(100):
        made.put(topic("cam"), b"", 2)
    assert len(drained(made)) == 2
    assert made.num_dropped == 193


def test_large_messages_cost_more_of_the_rate():
    made = inbox("cam", messages=Rate(per_s=1, burst=25_000, overhead=0))
    for _ in range(100):
        made.put(topic("cam"), FLOOD, 0)
    assert len(drained(made)) == 2


def test_blocks_have_a_rate_of_their_own_and_delay_no_message():
    made = inbox("cam", blocks=Rate(per_s=1, burst=2000, overhead=0))
    block = encode(Block("0" * 32, 0, bytes(900)))
    for _ in range(10):
        made.put(topic("cam"), block, 0)
    made.put(topic("cam"), b"\1", 0)
    assert [len(item.payload) for item in drained(made)] == [len(block), len(block), 1]


def test_clients_that_nobody_knows_bring_little_together_and_each_alone_what_a_newcomer_says():
    made = FairInbox(frozenset({"cam"}))
    for number in range(3000):
        made.put(topic(f"made-up-{number}", "state"), bytes(300), 0)
    assert 16 * 50 < len(drained(made)) <= 16 * 64
    made.put(topic("new", "state"), bytes(300), 1)
    made.put(topic("new", "control"), bytes(300), 1)
    assert len(drained(made)) == 2


def test_what_was_sent_in_vain_weighs_by_size_but_for_blocks_and_includes_what_was_of_no_use():
    made = inbox("cam", messages=Rate(1, 1, 1), blocks=Rate(1, 1, 1))
    for payload in (b"\1", b"\1" + bytes(640 << 10), encode(Block("0" * 32, 0, bytes(900 << 10)))):
        made.put(topic("cam"), payload, 0)
    made.blame("cam", 5)
    assert made.take_waste() == {"cam": 1 + 11 + 1 + 5}
    assert made.take_waste() == Counter()


def test_one_clients_rate_is_not_anothers():
    made = inbox("loud", "calm", messages=Rate(per_s=1, burst=3, overhead=1))
    for client in ("loud",) * 50 + ("calm",) * 3:
        made.put(topic(client), b"", 0)
    assert Counter(client_of(item) for item in drained(made)) == {"loud": 3, "calm": 3}


def test_a_client_whose_messages_take_the_loops_time_loses_them_and_others_lose_nothing():
    """A few bytes may have a bundle decoded, or a part file hashed."""
    made = inbox("heavy", "calm", work=(0.5, 3.0))
    for number in range(5):
        made.put(topic("heavy"), bytes([number]), 0)
        made.put(topic("calm"), bytes([number]), 0)
    assert made.get(0) is not None
    made.charge(topic("heavy"), 4.0, 0)
    made.charge(topic("calm"), 2.9, 0)
    made.put(topic("heavy"), b"again", 1.9)
    assert [client_of(item) for item in drained(made)] == ["calm"] * 5
    assert made.take_waste()["heavy"] >= 50  # it is muted: see Loop
    made.put(topic("heavy"), b"when it has some left", 2.1)
    assert payloads(made, "heavy") == [b"when it has some left"]


def test_clients_that_nobody_knows_pay_for_the_loops_time_together():
    made = inbox("cam", work=(0.5, 3.0))
    made.charge(topic("made-up"), 4.0, 0)
    made.put(topic("made-up"), b"x", 0)
    assert drained(made) == []
    assert {*made.take_waste()} == {STRANGERS}


def test_honest_traffic_passes_as_it_is():
    """A round's download over loopback: 800 MB in blocks, with a report for every second one of its window."""
    made = FairInbox(frozenset({"cam"}))
    block = encode(Block("0" * 32, 0, bytes(256 << 10)))
    for number in range(3000):
        made.put(topic("cam"), block, number / 400)
        if number % 4 == 0:
            made.put(topic("cam", "control"), bytes(100), number / 400)
        drained(made)
    assert made.num_dropped == 0


def test_a_word_about_each_frame_that_is_kept_passes_at_once_and_crowds_out_nothing():
    made = FairInbox(frozenset({"cam"}))
    for number in range(5000):
        made.put(topic("cam", "feedback"), b'{"frame": %d, "class": "bag"}' % number, 0)
    made.put(topic("cam", "control"), bytes(300), 0)
    found = [item.topic for item in drained(made)]
    assert 2048 <= len(found) - 1 < 4000
    assert found.index(topic("cam", "control")) < 100  # its turn, not the last place
    assert made.take_dropped().keys() == {"cam/feedback"}
    made.set_members(frozenset({"other"}))
    made.put(topic("cam", "feedback"), bytes(30), 0)  # no member's: a stranger's
    assert [item.topic for item in drained(made)] == [topic("cam", "feedback")]


def test_a_new_member_gets_a_lane_and_nobody_a_full_bucket_for_it():
    made = inbox("loud", messages=Rate(per_s=1, burst=3, overhead=1))
    for _ in range(10):
        made.put(topic("loud"), b"", 0)
    made.set_members(frozenset({"loud", "new"}))
    made.put(topic("loud"), b"", 0)
    made.put(topic("new"), b"", 0)
    assert Counter(client_of(item) for item in drained(made)) == {"loud": 3, "new": 1}


@pytest.mark.parametrize("odd", ["", "/", "replayfleet/v1/fleet/round", "a/b/c/clients/x", "$SYS/x"])
def test_topics_that_are_no_clients_share_a_lane(odd: str):
    made = inbox("cam")
    made.put(odd, b"x", 0)
    assert drained(made) == [Message(odd, b"x")]


def test_the_loop_wakes_when_something_comes():
    made = inbox("cam")
    threading.Timer(0.05, made.put, (topic("cam"), b"x", 0.0)).start()
    started = time.monotonic()
    assert made.get(60) == Message(topic("cam"), b"x")
    assert time.monotonic() - started < 50
    assert made.get(0.001) is None
