from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.state_store import HeldDownload, StateStore, TrainingCommit, spec_digest
from federation.protocol.messages import BlobEntry, FleetSpec, Manifest

SPEC = FleetSpec("fleet", "fedavg", {"local_epochs": 1, "batch_size": 8}, {"image_size": 28}, 7)


def blob(name: str, digit: str) -> BlobEntry:
    return BlobEntry(name, digit * 64, 10)


def commit(round_index: int = 3, version: int = 5) -> TrainingCommit:
    return TrainingCommit(
        round_index, version, spec_digest(SPEC), (blob("s", "a"),), b"", (blob("task", "b"),), b"", 1.5, 40, 2
    )


def held(version: int, digit: str) -> HeldDownload:
    return HeldDownload(Manifest("down", "fleet", "c1", version, version, (blob("task", digit),)), SPEC)


def test_an_upload_is_pending_until_its_own_version_is_settled(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.pending() is None
    store.commit_training(commit(version=5))
    assert store.pending() == commit(version=5)
    store.settle(4, "accepted")
    assert store.pending() == commit(version=5)
    store.settle(5, "accepted")
    assert store.pending() is None
    assert store.training() == commit(version=5)
    store.commit_training(commit(4, 6))
    assert store.pending() == commit(4, 6)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    StateStore(tmp_path).commit_training(commit())
    StateStore(tmp_path).hold(held(1, "c"))
    again = StateStore(tmp_path)
    assert (again.training(), again.held(), again.previous()) == (commit(), held(1, "c"), None)


def test_the_download_before_is_kept_and_holding_the_same_again_does_not_lose_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for version, digit in ((1, "c"), (2, "d"), (2, "d")):
        store.hold(held(version, digit))
    assert (store.held(), store.previous()) == (held(2, "d"), held(1, "c"))


DIGEST_OF_SPEC = spec_digest(SPEC).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data.replace(DIGEST_OF_SPEC, DIGEST_OF_SPEC[::-1]),  # still a well-formed record
    ],
)
def test_a_damaged_record_is_detected_and_counts_as_lost(tmp_path: Path, damage: object) -> None:
    store = StateStore(tmp_path)
    store.commit_training(commit())
    path = tmp_path / "state" / "training"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert store.training() is None
    assert not path.exists()
    store.commit_training(commit())
    assert store.training() == commit()


def test_blobs_of_every_record_stay_and_no_others(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.blobs_in_use() == set()
    store.commit_training(commit())
    store.hold(held(1, "c"))
    store.hold(held(2, "d"))
    assert store.blobs_in_use() == {digit * 64 for digit in "abcd"}
    store.hold(held(3, "e"))
    assert store.blobs_in_use() == {digit * 64 for digit in "abde"}


def test_an_agreement_is_named_by_its_content_not_by_the_order_of_its_keys() -> None:
    turned = FleetSpec("fleet", "fedavg", {"batch_size": 8, "local_epochs": 1}, {"image_size": 28}, 7)
    other = FleetSpec("fleet", "fedavg", {"batch_size": 9, "local_epochs": 1}, {"image_size": 28}, 7)
    assert spec_digest(SPEC) == spec_digest(turned)
    assert spec_digest(SPEC) != spec_digest(other)
