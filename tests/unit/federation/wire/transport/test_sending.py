from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from replayfleet.federation.wire.protocol.messages import Manifest, Progress
from replayfleet.federation.wire.transport.blob_store import EncodedBlob
from replayfleet.federation.wire.transport.sending import LAGGARD_S, STALL_S, Bundle, Sending, Step

TRANSFER = "0" * 32


def progress(next_missing: int, *missing: tuple[int, int], credit: int = 8) -> Progress:
    return Progress("client", TRANSFER, next_missing, missing, credit)


def test_the_first_window_leaves_with_the_offer_and_nothing_more_until_an_answer() -> None:
    sending = Sending(20, credit=8, now=0.0)
    assert sending.step(0.0) == Step(True, list(range(8)))
    assert sending.step(0.1) == Step(False)


def test_a_repeated_offer_is_a_question_and_carries_no_blocks() -> None:
    sending = Sending(20, credit=8, now=0.0)
    sending.step(0.0)
    sending.offer_again()
    sending.on_progress("cam-1", progress(4), 0.1)
    assert sending.step(0.1) == Step(True)


def test_what_the_answer_to_a_repeated_offer_does_not_show_counts_as_lost() -> None:
    sending = Sending(20, credit=8, now=0.0)
    sending.step(0.0)
    sending.offer_again()
    sending.step(0.1)
    sending.on_progress("cam-1", progress(2, (2, 3)), 0.2)
    assert sending.step(0.2).blocks == [2, 3, 5, 6, 7, 8, 9]
    assert sending.num_resent == 5


def test_a_gap_is_filled_once_and_again_only_after_a_while() -> None:
    sending = Sending(20, credit=8, now=0.0)
    sending.step(0.0)
    sending.on_progress("cam-1", progress(1, (1, 1)), 1.0)
    assert sending.step(1.0).blocks == [1, 8]
    sending.on_progress("cam-1", progress(1, (1, 1)), 1.1)
    assert sending.step(1.1).blocks == []


def test_the_stall_timer_starts_again_with_any_progress_and_backs_off_without() -> None:
    sending = Sending(100, credit=8, now=0.0)
    sending.step(0.0)
    sending.on_progress("cam-1", progress(2), STALL_S - 0.1)
    assert not sending.step(STALL_S + 0.1).offer
    offers = []
    now = STALL_S
    while now < 200:
        now += 0.5
        if sending.step(now).offer:
            offers.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(offers)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]


def test_what_was_never_answered_is_offered_again_as_soon_as_the_aggregator_speaks() -> None:
    sending = Sending(100, credit=8, now=0.0)
    sending.step(0.0)
    sending.announced(0.5)
    assert not sending.step(0.5).offer, "its answer may be on the way"
    sending.announced(1.0)
    assert sending.step(1.0) == Step(True)
    sending.on_progress("cam-1", progress(2), 1.1)
    sending.step(1.1)
    sending.announced(3.0)
    assert not sending.step(3.0).offer, "it was answered"


def test_a_slow_link_is_not_mistaken_for_a_stall() -> None:
    sending, now = Sending(100, credit=8, now=0.0), 0.0
    sending.step(now)
    for block in range(1, 30):
        now += 4.5  # a block of 256 KiB over half a megabit per second
        sending.on_progress("cam-1", progress(block), now)
        assert not sending.step(now).offer
    assert not sending.step(now + 12.0).offer
    assert sending.num_resent == 0


@pytest.mark.parametrize("block_s", [33.0, 16.5, 8.0, 5.1])
def test_what_is_on_its_way_over_a_slow_line_is_not_sent_again(block_s: float) -> None:
    """64 kbit/s and more: the receiver says each second what it has, whether it was asked meanwhile or not."""
    sending, offers = Sending(30, credit=8, now=0.0), 0
    sending.step(0.0)
    for second in range(1, int(29 * block_s)):
        sending.on_progress("aggregator", progress(int(second / block_s)), float(second))
        offers += sending.step(float(second)).offer
    assert offers, "it asks, for all may be lost"
    assert sending.num_resent == 0


def test_nor_is_what_several_receive_over_slow_lines() -> None:
    sending, offers = Sending(9, credit=8, now=0.0, shared=True), 0
    sending.step(0.0)
    for second in range(1, 80):
        for place, cam in enumerate(("cam-1", "cam-2", "cam-3")):
            sending.on_progress(cam, progress((second - place) // 10), float(second))
            offers += sending.step(float(second)).offer
    assert offers
    assert sending.num_resent == 0


@pytest.mark.parametrize("shared", [False, True])
def test_nor_is_what_waits_behind_something_else_until_its_first_word_comes(shared: bool) -> None:
    """A first word soon after a question answers that, and what was sent before is lost; else it answers the first."""
    for said_at, resent in ((STALL_S + 2.0, []), (100.0, []), (STALL_S + 0.2, list(range(8)))):
        sending = Sending(9, credit=8, now=0.0, shared=shared)
        sending.step(0.0)
        assert sending.step(STALL_S).offer
        sending.on_progress("cam-1", progress(0), said_at)
        assert sending.step(said_at).blocks == resent


def test_what_is_lost_on_a_quick_line_is_sent_again_at_the_first_question() -> None:
    sending = Sending(9, credit=8, now=0.0)
    sending.step(0.0)
    sending.on_progress("aggregator", progress(1), 0.2)
    assert sending.step(0.2).blocks == [8]
    assert sending.step(0.2 + STALL_S) == Step(True)
    sending.on_progress("aggregator", progress(1), 0.3 + STALL_S)
    assert sending.step(0.3 + STALL_S).blocks == list(range(1, 9))


def test_what_many_receivers_of_a_shared_transfer_lack_goes_to_all_of_them_now_and_then_not_once_for_each() -> None:
    sending = Sending(4, credit=8, now=0.0, shared=True)
    sending.step(0.0)
    sending.offer_again()
    sending.step(STALL_S)
    for place in range(1000):  # within five seconds
        now = STALL_S + place / 200
        sending.on_progress(f"cam-{place}", progress(0), now)
        sending.step(now)
    assert 4 <= sending.num_resent <= 4 * 3


def test_the_slowest_brisk_receiver_sets_the_pace_of_a_shared_transfer() -> None:
    sending = Sending(100, credit=8, now=0.0, shared=True)
    sending.step(0.0)
    sending.on_progress("quick", progress(8), 0.1)
    sending.on_progress("slow", progress(2), 0.1)
    assert sending.step(0.1).blocks == [8, 9]
    sending.on_progress("quick", progress(10), 0.1 + LAGGARD_S)
    assert sending.step(0.1 + LAGGARD_S).blocks == list(range(10, 18))


def test_a_receiver_that_goes_back_and_forth_holds_no_other_up() -> None:
    sending = Sending(200, credit=8, now=0.0, shared=True)
    sending.step(0.0)
    honest, now = 8, 0.1
    while honest < 200 and now < 60.0:
        sending.on_progress("honest", progress(honest), now)
        sending.on_progress("zz", progress(0, *([(0, 0)] if int(2 * now) % 2 else []), credit=1), now)
        honest = max([honest, *(index + 1 for index in sending.step(now).blocks)])
        now += 0.25
    assert now < 20.0, "one second for a receiver that says nothing better, then it no longer counts"


def test_the_id_of_a_transfer_depends_on_what_travels_between_whom_and_not_on_the_attempt() -> None:
    def transfer_id(digest: str = "ab" * 32, size: int = 5, client: str = "cam-1", version: int = 1) -> str:
        manifest = Manifest("up", "street", client, version, version, ())
        return Bundle([EncodedBlob(digest, "raw", Path("blob"), size)], 1024).transfer_id(manifest)

    assert transfer_id() == transfer_id(version=2)
    assert len({transfer_id(), transfer_id(digest="cd" * 32), transfer_id(size=6), transfer_id(client="cam-2")}) == 4


def test_of_what_lies_in_a_store_too_nothing_is_sent_to_all_because_one_of_them_has_fetched_it() -> None:
    sending = Sending(20, credit=8, now=0.0, shared=True, asks=True)
    assert sending.step(0.0) == Step(True)
    sending.on_verdict("cam-1")
    assert sending.step(0.1) == Step(False)
    sending.on_progress("cam-2", progress(0), 0.2)
    assert sending.step(0.2).blocks == list(range(8))
