"""One bundle on its way in, block by block, with ``now`` as a number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.receiving import MAX_BAD_BLOCKS, Receiving
from tests.support.offers import blob, blocks_of, digest_of, offer_of

FIRST, SECOND = blob(1, 2500), blob(2, 1600)  # 4100 bytes: five blocks, the third of which holds both
BLOCKS = blocks_of(FIRST, SECOND)
OFFER = offer_of(FIRST, SECOND)


def receiving(folder: Path, held: tuple[bytes, ...] = (), credit: int = 8) -> Receiving:
    return Receiving(OFFER, folder / "part", {digest_of(data) for data in held}, credit=credit, now=0.0)


def give(one: Receiving, *indices: int, now: float = 0.0) -> list[bool]:
    return [one.on_block(index, BLOCKS[index], now) for index in indices]


def test_blocks_in_any_order_become_the_blobs_and_the_part_file_goes(tmp_path: Path) -> None:
    one, store = receiving(tmp_path), DiskBlobStore(tmp_path / "store")
    assert give(one, 4, 0, 2, 0, 1) == [True, True, True, False, True]
    assert not one.complete
    assert give(one, 3) == [True]
    assert one.complete
    assert one.bytes_received == len(FIRST) + len(SECOND)
    one.unpack(store)
    assert [store.read(digest_of(data)) for data in (FIRST, SECOND)] == [FIRST, SECOND]
    assert not one.part.exists()


def test_a_report_tells_the_first_missing_block_and_the_gaps_behind_it(tmp_path: Path) -> None:
    one = receiving(tmp_path)
    give(one, 0, 3)
    report = one.progress("aggregator", 0.0)
    assert (report.next_missing, report.missing, report.credit) == (1, ((1, 2),), 8)
    give(one, 1)
    assert one.progress("aggregator", 0.0).missing == ((2, 2),)


def test_a_block_that_does_not_verify_counts_as_missing_and_too_many_end_the_transfer(tmp_path: Path) -> None:
    one = receiving(tmp_path)
    assert not one.on_block(0, BLOCKS[1], 0.0)
    assert not one.on_block(0, BLOCKS[0][:-1], 0.0)
    assert one.progress("aggregator", 0.0).next_missing == 0
    for _ in range(MAX_BAD_BLOCKS - 2):
        one.on_block(0, BLOCKS[1], 0.0)
    with pytest.raises(ArtefactRejected) as rejected:
        one.on_block(0, BLOCKS[1], 0.0)
    assert rejected.value.reason is Reason.WRONG_DIGEST
    assert not one.on_block(99, BLOCKS[0], 0.0)  # of no block, so it isn't even looked at


def test_a_block_of_which_the_disk_takes_but_a_part_has_not_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a bundle of one blob is computed as its blocks come, and wouldn't see it."""
    write, one = os.pwrite, receiving(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda file, data, place: write(file, data[:100], place))
        with pytest.raises(OSError, match="took 100 of 1024 bytes of block 0"):
            give(one, 0)
    assert give(one, 0) == [True]


def test_blocks_that_hold_nothing_but_held_blobs_are_not_asked_for(tmp_path: Path) -> None:
    one, store = receiving(tmp_path, held=(FIRST,)), DiskBlobStore(tmp_path / "store")
    assert one.progress("aggregator", 0.0).next_missing == 2
    assert give(one, 2, 3, 4) == [True] * 3
    assert one.complete
    one.unpack(store)
    assert store.read(digest_of(SECOND)) == SECOND
    assert not store.has(digest_of(FIRST))
    assert receiving(tmp_path, held=(FIRST, SECOND)).complete


def test_what_an_earlier_attempt_left_is_kept_as_far_as_it_verifies(tmp_path: Path) -> None:
    before = receiving(tmp_path)
    give(before, 0, 1, 4)
    before.close()
    damaged = bytearray(before.part.read_bytes())
    damaged[1030] ^= 1
    before.part.write_bytes(damaged)
    again = receiving(tmp_path)
    assert again.progress("aggregator", 0.0).next_missing == 1
    assert again.progress("aggregator", 0.0).missing == ((1, 3),)
    assert give(again, 1, 2, 3) == [True] * 3
    assert again.complete


def test_reports_are_due_by_blocks_and_by_time_and_ever_rarer_in_silence(tmp_path: Path) -> None:
    one = receiving(tmp_path, credit=4)
    assert not one.report_due(0.9)
    assert one.report_due(1.0)
    give(one, 0)
    assert not one.report_due(0.0)
    give(one, 1)
    assert one.report_due(0.0)  # half of the credit
    one.progress("aggregator", 1.0)
    assert not one.report_due(1.9)
    one.progress("aggregator", 2.0)
    assert not one.report_due(3.9)
    assert one.report_due(4.0)
    give(one, 2, now=5.0)
    assert one.heard_at == 5.0
