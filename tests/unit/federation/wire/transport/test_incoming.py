"""All bundles that a process receives: what it says to whom, with ``now`` as a number and no network."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from replayfleet.federation.errors import Reason
from replayfleet.federation.wire.protocol.messages import Block, Message, Offer, Progress, Verdict, Want
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.claims import FETCH_S
from replayfleet.federation.wire.transport.courier import BLOCK_BYTES
from replayfleet.federation.wire.transport.incoming import IDLE_S, Incoming, TransferLimits
from replayfleet.federation.wire.transport.interfaces import Arrived, Event, Failed, Offered
from replayfleet.federation.wire.transport.receiving import MAX_BAD_BLOCKS
from tests.support.offers import blob, blocks_of, digest_of, offer_of

DATA, OTHER = blob(1, 2500), blob(2, 900)
LIMITS = TransferLimits(max_bundle_bytes=4000, max_blob_bytes=3000, max_open=2, max_waiting=0, give_up_s=60.0)


class Claims:
    """A store that takes its time."""

    usable = True
    queues = False

    def __init__(self) -> None:
        self.begun: list[tuple[Future[None], Path]] = []

    def fetch(self, _transfer_id: str, target: Path, _size_bytes: int) -> Future[None]:
        fetch: Future[None] = Future()
        if not self.queues:
            fetch.set_running_or_notify_cancel()
        self.begun.append((fetch, target))
        return fetch


class End:
    """An aggregator's receiving half, and all that it said."""

    def __init__(self, folder: Path, limits: TransferLimits = LIMITS, claims: Claims | None = None) -> None:
        self.said: list[tuple[str, Message]] = []
        self.counters: Counter[str] = Counter()
        self.store = DiskBlobStore(folder)
        self.incoming = Incoming(
            "aggregator",
            lambda peer, message: self.said.append((peer, message)),
            self.counters,
            self.store,
            credit=8,
            limits=limits,
            claims=cast("Any", claims),
        )

    def last(self) -> Message:
        return self.said[-1][1]

    def verdict(self) -> Verdict:
        message = self.last()
        assert isinstance(message, Verdict)
        return message

    def blocks(self, offer: Offer, *blobs: bytes, peer: str = "cam-1", now: float = 0.0) -> list[Event]:
        events: list[Event] = []
        for index, payload in enumerate(blocks_of(*blobs)):
            events += self.incoming.on_block(peer, Block(offer.transfer_id, index, payload), now)
        return events


@pytest.fixture
def end(tmp_path: Path) -> End:
    return End(tmp_path)


def test_an_offer_that_is_accepted_arrives_and_its_verdict_is_repeated(end: End) -> None:
    offer = offer_of(DATA)
    assert end.incoming.on_offer("cam-1", offer, 0.0) == [Offered("cam-1", offer)]
    assert end.incoming.accept("cam-1", offer, 0.0) == []
    assert isinstance(end.last(), Progress)
    assert end.blocks(offer, DATA) == [Arrived("cam-1", offer.transfer_id, offer.manifest, len(DATA))]
    assert end.store.read(digest_of(DATA)) == DATA
    end.incoming.conclude("cam-1", offer.manifest, offer.transfer_id, accepted=True, reason="", detail="")
    verdict = end.verdict()
    assert verdict.accepted
    assert end.incoming.on_offer("cam-1", offer, 9.0) == []  # nobody is asked twice
    assert end.said[-2:] == [("cam-1", verdict)] * 2


def test_many_who_send_at_a_time_share_the_room_that_there_is(tmp_path: Path) -> None:
    limits = TransferLimits(max_open=40, max_window_bytes=16 * 1024)
    end = End(tmp_path, limits)
    told = []
    for number in range(40):
        end.incoming.accept(f"cam-{number}", offer_of(DATA), 0.0)
        told.append(end.last().credit)
    assert told[:4] == [8, 8, 5, 4]
    assert told[-1] == 1
    end.incoming.resume(0.0)
    assert [message.credit for _, message in end.said[-40:]] == [1] * 40, "those who came first too"
    for number in range(1, 40):
        end.incoming.forget(f"cam-{number}")
    end.incoming.resume(0.0)
    assert end.last().credit == 8


def test_blocks_that_come_before_the_decision_wait_for_it(end: End) -> None:
    offer = offer_of(DATA)
    end.incoming.on_offer("cam-1", offer, 0.0)
    assert end.blocks(offer, DATA) == []
    assert [type(event) for event in end.incoming.accept("cam-1", offer, 0.0)] == [Arrived]


def test_of_an_offer_that_is_not_decided_on_no_more_than_the_first_window_waits(tmp_path: Path) -> None:
    end, data = End(tmp_path, TransferLimits()), blob(3, 10 * 1024)
    end.incoming.on_offer("cam-1", offer_of(data), 0.0)
    end.blocks(offer_of(data), data)
    end.incoming.accept("cam-1", offer_of(data), 0.0)
    assert end.last().next_missing == 8


def test_blocks_wait_for_the_decision_on_no_more_peers_than_may_send(end: End) -> None:
    for client in ("cam-1", "cam-2", "cam-3"):
        end.incoming.on_offer(client, offer_of(DATA), 0.0)
    for client in ("cam-1", "cam-2", "cam-3"):
        end.blocks(offer_of(DATA), DATA, peer=client)
    assert end.incoming.useless == {"cam-1": 3}


def test_what_is_held_already_arrives_without_a_block(end: End) -> None:
    end.store.put(DATA)
    offer = offer_of(DATA)
    assert [type(event) for event in end.incoming.accept("cam-1", offer, 0.0)] == [Arrived]
    assert end.said == []


@pytest.mark.parametrize("carried", [(blob(3, 2500), blob(4, 2500)), (blob(3, 3500),)])
def test_what_is_too_large_is_refused_before_anybody_decides(end: End, carried: tuple[bytes, ...]) -> None:
    assert end.incoming.on_offer("cam-1", offer_of(*carried), 0.0) == []
    assert (end.verdict().accepted, end.verdict().reason) == (False, Reason.TOO_LARGE.value)


def test_more_transfers_than_allowed_are_refused_as_busy_which_is_not_remembered(end: End) -> None:
    for client in ("cam-1", "cam-2", "cam-3"):
        end.incoming.accept(client, offer_of(DATA), 0.0)
    assert end.said[-1][0] == "cam-3"
    assert end.verdict().reason == Reason.BUSY.value
    assert end.incoming.on_offer("cam-3", offer_of(DATA), 1.0) == [Offered("cam-3", offer_of(DATA))]


def test_a_refusal_is_repeated_and_ends_the_transfer(end: End) -> None:
    offer = offer_of(DATA)
    end.incoming.accept("cam-1", offer, 0.0)
    end.incoming.refuse("cam-1", offer, Reason.WRONG_ROUND.value, "late")
    assert end.blocks(offer, DATA) == []
    assert not end.store.has(digest_of(DATA))
    assert end.incoming.on_offer("cam-1", offer, 1.0) == []
    assert end.verdict().reason == Reason.WRONG_ROUND.value


def test_a_verdict_on_what_one_client_offers_is_not_anothers_that_says_the_same(end: End) -> None:
    """Transfer ids are the sender's to choose: a stranger would have a member's upload refused."""
    offer = offer_of(DATA)
    end.incoming.refuse("stranger", offer, Reason.UNKNOWN_CLIENT.value, "not a member")
    assert end.incoming.on_offer("cam-1", offer, 0.0) == [Offered("cam-1", offer)]


def test_only_the_newest_verdicts_are_remembered(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfleet.federation.wire.transport.incoming.MAX_CONCLUDED", 2)
    offers = [offer_of(DATA, version=version) for version in (1, 2, 3)]
    for offer in offers:
        end.incoming.refuse("cam-1", offer, Reason.WRONG_ROUND.value, "late")
    assert [len(end.incoming.on_offer("cam-1", offer, 1.0)) for offer in offers] == [1, 0, 0]


def test_what_the_bundle_did_not_carry_is_asked_for_more_rarely_but_at_least_every_three_seconds(end: End) -> None:
    offer = offer_of(DATA, also=(OTHER,))
    end.incoming.accept("cam-1", offer, 0.0)
    assert end.blocks(offer, DATA) == []
    want = end.last()
    assert isinstance(want, Want)
    assert want.digests == (digest_of(OTHER),)
    for asked_at, num_asked in ((1.0, 2), (3.0, 3), (6.0, 4), (9.0, 5)):
        end.incoming.tick(asked_at - 0.1)
        assert end.said.count(("cam-1", want)) == num_asked - 1
        end.incoming.tick(asked_at)
        assert end.said.count(("cam-1", want)) == num_asked
    end.incoming.resume(9.5)
    end.incoming.tick(9.5)
    assert end.said.count(("cam-1", want)) == 6, "the broker is back"
    rest = offer_of(OTHER, also=(DATA,), transfer=1)
    again = Offer("client", rest.transfer_id, offer.manifest, rest.parts, rest.block_bytes, rest.block_digests)
    assert end.incoming.on_offer("cam-1", again, 16.0) == []
    arrived = end.blocks(again, OTHER, now=16.0)
    assert arrived == [Arrived("cam-1", again.transfer_id, offer.manifest, len(DATA) + len(OTHER))]


def test_a_silent_peer_is_given_up_and_what_arrived_is_kept(end: End) -> None:
    offer = offer_of(DATA)
    end.incoming.accept("cam-1", offer, 0.0)
    end.incoming.on_block("cam-1", Block(offer.transfer_id, 0, blocks_of(DATA)[0]), 1.0)
    assert end.incoming.tick(60.9) == []
    (failed,) = end.incoming.tick(61.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TimeoutError)
    end.incoming.accept("cam-1", offer, 70.0)
    report = end.last()
    assert isinstance(report, Progress)
    assert report.next_missing == 1


def test_of_a_peer_that_is_forgotten_for_good_nothing_stays(end: End) -> None:
    for peer in ("cam-1", "cam-2"):
        end.incoming.accept(peer, offer_of(DATA), 0.0)
    end.incoming.tick(61.0)  # both are given up, what arrived is kept
    end.incoming.accept("cam-1", offer_of(OTHER, DATA), 62.0)
    end.incoming.forget("cam-1")
    end.incoming.forget("cam-2", for_good=True)
    assert [part.name.split(".")[0] for part in end.store.parts.iterdir()] == ["cam-1"]
    end.incoming.forget("cam-1", for_good=True)
    assert not list(end.store.parts.iterdir())


def test_blocks_that_lie_end_the_transfer_with_a_verdict_that_is_not_remembered(end: End) -> None:
    offer = offer_of(DATA)
    end.incoming.accept("cam-1", offer, 0.0)
    events: list[Event] = []
    for _ in range(17):
        events += end.incoming.on_block("cam-1", Block(offer.transfer_id, 0, b"x" * 1024), 0.0)
    assert [type(event) for event in events] == [Failed]
    assert end.verdict().reason == Reason.WRONG_DIGEST.value
    assert end.incoming.on_offer("cam-1", offer, 1.0) == [Offered("cam-1", offer)]


def test_blocks_of_nothing_are_counted_and_dropped(end: End) -> None:
    assert end.blocks(offer_of(DATA), DATA) == []
    assert end.counters["duplicates"] == 3
    assert end.incoming.useless == {"cam-1": 3}


def test_a_block_of_a_slow_link_comes_before_its_place_goes_to_another() -> None:
    assert IDLE_S > 8 * BLOCK_BYTES / 0.5e6


def test_a_place_without_a_block_goes_to_a_newcomer_and_its_holder_may_come_again(end: End) -> None:
    offer = offer_of(DATA)
    for peer in ("idle-1", "idle-2"):
        end.incoming.on_offer(peer, offer, 0.0)
        assert end.incoming.accept(peer, offer, 0.0) == []
    end.incoming.accept("cam-1", offer, IDLE_S - 0.1)
    assert end.said[-1][0] == "cam-1"
    assert end.verdict().reason == "busy"
    freed = end.incoming.accept("cam-1", offer, IDLE_S)
    assert [(type(event), event.peer) for event in freed] == [(Failed, "idle-1")]
    assert isinstance(end.last(), Progress)
    assert ("idle-1", "busy") in [(peer, word.reason) for peer, word in end.said if isinstance(word, Verdict)]
    assert [type(event) for event in end.blocks(offer, DATA, now=IDLE_S)] == [Arrived]


def test_whoever_waits_has_its_turn_when_a_place_gets_idle_though_nobody_says_a_word(tmp_path: Path) -> None:
    end = End(tmp_path, TransferLimits(max_open=1))
    for client in ("cam-1", "cam-2"):
        end.incoming.accept(client, offer_of(DATA), 0.0)
    assert end.incoming.tick(IDLE_S - 0.1) == []
    assert [(type(event), event.peer) for event in end.incoming.tick(IDLE_S)] == [(Failed, "cam-1"), (Offered, "cam-2")]


def test_who_brought_blocks_keeps_its_place_for_five_seconds_and_what_arrived_for_good(end: End) -> None:
    offer = offer_of(DATA)
    for peer in ("slow-1", "slow-2"):
        end.incoming.accept(peer, offer, 0.0)
        end.incoming.on_block(peer, Block(offer.transfer_id, 0, blocks_of(DATA)[0]), 1.0)
    end.incoming.accept("cam-1", offer, 1.0 + IDLE_S - 0.1)
    assert end.verdict().reason == "busy"
    assert [event.peer for event in end.incoming.accept("cam-1", offer, 1.0 + IDLE_S)] == ["slow-1"]
    assert len(list(end.store.parts.glob("slow-1.*"))) == 1


def test_bundles_that_are_replaced_while_they_are_fetched_leave_nothing_and_come_one_at_a_time(tmp_path: Path) -> None:
    claims = Claims()
    end = End(tmp_path, claims=claims)
    offers = [msgspec.structs.replace(offer_of(DATA), transfer_id=f"{place:032x}", stored=True) for place in range(20)]
    end.incoming.accept("cam-1", offers[0], 0.0)
    for offer in offers[1:]:
        end.incoming.on_offer("cam-1", offer, 1.0)
    ((fetch, target),) = claims.begun
    target.write_bytes(DATA)
    fetch.set_result(None)
    assert not target.exists()


def test_who_is_fetched_from_the_store_keeps_its_place_until_that_has_ended(tmp_path: Path) -> None:
    claims = Claims()
    end = End(tmp_path, TransferLimits(max_open=1), claims)
    offer = msgspec.structs.replace(offer_of(DATA), stored=True)
    end.incoming.accept("cam-1", offer, 0.0)
    end.incoming.accept("cam-2", offer, 1.0)
    assert end.incoming.tick(FETCH_S - 1) == []
    fetch, target = claims.begun[0]
    target.write_bytes(DATA)
    fetch.set_result(None)
    assert [(type(event), event.peer) for event in end.incoming.tick(FETCH_S - 0.5)] == [(Arrived, "cam-1")]


@pytest.mark.parametrize("ended", ["its client was left out", "it took too long", "its blocks lied"])
def test_what_is_fetched_for_a_transfer_that_has_ended_leaves_nothing(tmp_path: Path, ended: str) -> None:
    claims = Claims()
    end = End(tmp_path, claims=claims)
    offer = msgspec.structs.replace(offer_of(DATA), stored=True)
    end.incoming.accept("slow-1", offer, 0.0)
    if ended == "its client was left out":
        end.incoming.forget("slow-1")
    elif ended == "it took too long":
        end.incoming.tick(FETCH_S)
    else:
        for _ in range(MAX_BAD_BLOCKS + 1):
            end.incoming.on_block("slow-1", Block(offer.transfer_id, 0, b"x"), 0.0)
    fetch, target = claims.begun[0]
    target.write_bytes(DATA)
    fetch.set_result(None)
    assert not target.exists()


def test_what_waits_for_the_store_in_vain_keeps_none_after_it_waiting(tmp_path: Path) -> None:
    claims = Claims()
    claims.queues = True
    end = End(tmp_path, claims=claims)
    end.incoming.accept("cam-1", msgspec.structs.replace(offer_of(DATA), stored=True), 0.0)
    end.incoming.tick(FETCH_S)
    assert claims.begun[0][0].cancelled()


def test_a_verdict_ends_what_was_kept_for_its_offer(end: End) -> None:
    offer = offer_of(DATA)
    end.incoming.on_offer("cam-1", offer, 0.0)
    end.blocks(offer, DATA)
    end.incoming.conclude("cam-1", offer.manifest, offer.transfer_id, accepted=True, reason="", detail="")
    assert not end.incoming._pending
