from __future__ import annotations

from replayfleet.federation.simulator.measures.accounts import DigestAccounts
from replayfleet.federation.wire.protocol.messages import BlobEntry


def blobs(**sizes: int):
    return [BlobEntry(name, f"digest of {name} {size}", size) for name, size in sizes.items()]


def test_what_the_other_end_holds_does_not_travel_again():
    ledger = DigestAccounts()
    assert ledger.count("a", "up", blobs(task=10, extra=5)).num_bytes == 15
    second = ledger.count("a", "up", blobs(task=11, extra=5))
    assert second.sent == ("task",)
    assert (second.num_bytes, second.everything_bytes) == (11, 16)


def test_what_went_up_need_not_come_down():
    ledger = DigestAccounts()
    ledger.count("a", "up", blobs(task=10))
    same = [BlobEntry("personalised", "digest of task 10", 10)]
    assert ledger.count("a", "down", same).num_bytes == 0


def test_one_client_s_sets_are_not_another_s():
    ledger = DigestAccounts()
    ledger.count("a", "up", blobs(task=10))
    assert ledger.count("b", "up", blobs(task=10)).num_bytes == 10


def test_only_the_latest_version_of_a_set_is_held():
    ledger = DigestAccounts()
    for size in (1, 2):
        ledger.count("a", "up", blobs(task=size))
    assert ledger.count("a", "up", blobs(task=1)).num_bytes == 1


def test_one_blob_under_two_names_travels_once():
    twice = [BlobEntry("personalised", "same", 7), BlobEntry("average", "same", 7)]
    traffic = DigestAccounts().count("a", "down", twice)
    assert (traffic.num_bytes, traffic.everything_bytes) == (7, 14)


def test_a_ledger_goes_on_from_plain_values():
    ledger = DigestAccounts()
    ledger.count("a", "up", blobs(task=10))
    assert DigestAccounts(ledger.held).count("a", "up", blobs(task=10)).num_bytes == 0
