from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from replayfleet.edge_client.state_store import (
    Aside,
    HeldDownload,
    SentAway,
    StateStore,
    TrainingCommit,
    Trial,
    spec_digest,
)
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest
from tests.support.no_file import KINDS, leave

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
    assert store.pending() == (None, None)
    store.commit_training(commit(version=5), SPEC)
    assert store.pending() == (commit(version=5), None)
    store.settle(4, "accepted")
    assert store.pending() == (commit(version=5), None)
    store.settle(5, "accepted", counts_in=3)
    assert StateStore(tmp_path).pending() == (commit(version=5), 3)
    store.settle(5, "accepted")
    assert store.pending() == (None, None)
    assert store.training() == commit(version=5)
    store.commit_training(commit(4, 6), SPEC)
    assert store.pending() == (commit(4, 6), None)


def under(seed: int) -> tuple[FleetSpec, TrainingCommit]:
    spec = msgspec.structs.replace(SPEC, run_seed=seed)
    own = msgspec.structs.replace(commit(seed), spec_digest=spec_digest(spec), state=(blob("s", str(seed % 10)),))
    return spec, own


def test_whoever_changes_the_agreement_takes_no_memory_away(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    for seed in (7, 8, 7, 9, 10, 11):
        store.commit_training(under(seed)[1], under(seed)[0])
    for seed in (7, 8, 11):
        assert store.remembered(under(seed)[0]) == under(seed)[1], "the earliest stay, and the newest"
        assert {"7" * 64, "8" * 64, "1" * 64} <= StateStore(tmp_path).blobs_in_use()
    assert store.remembered(under(10)[0]) is None, "who makes up more of them pushes none out"
    store.commit_training(under(7)[1], under(7)[0])
    assert store.training() == under(7)[1]
    assert [one.round for one in store._aside()] == [8, 11]
    store._write("aside", Aside((under(8)[1],)))  # a kill before the round itself was written ...
    store._write("training", under(8)[1])
    store.commit_training(under(7)[1], under(7)[0])
    assert [one.round for one in store._aside()] == [8], "... leaves nothing twice"


def test_records_survive_a_restart(tmp_path: Path) -> None:
    StateStore(tmp_path).commit_training(commit(), SPEC)
    StateStore(tmp_path).hold(held(1, "c"))
    again = StateStore(tmp_path)
    assert (again.training(), again.held(), again.previous()) == (commit(), held(1, "c"), None)
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "state").iterdir()} == {0}, "nobody else's to read"


def test_what_a_killed_process_left_half_written_is_removed_by_the_client_alone(tmp_path: Path) -> None:
    StateStore(tmp_path).commit_training(commit(), SPEC)
    left = tmp_path / "state" / ".training.0123.tmp"
    left.write_bytes(b"half")
    StateStore(tmp_path)  # the training process, beside a client that may be writing
    assert left.exists()
    assert StateStore(tmp_path, disk=Disk(tmp_path, "training waits", 0.0)).training() == commit()
    assert not left.exists()


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
    store.commit_training(commit(), SPEC)
    path = tmp_path / "state" / "training"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(SettingsError, match="training is damaged"):
        StateStore(tmp_path, read_only=True).training()
    assert path.exists(), "who looks in beside a client takes nothing away"
    assert store.training() is None
    assert not path.exists()
    store.commit_training(commit(), SPEC)
    assert store.training() == commit()


def test_a_record_that_cant_be_read_counts_as_lost_and_stays(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    (tmp_path / "state" / "training").mkdir(parents=True)
    assert store.training() is None
    assert (tmp_path / "state" / "training").is_dir()


def test_blobs_of_every_record_stay_and_no_others(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.blobs_in_use() == set()
    store.commit_training(commit(), SPEC)
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


def on_probation(folder: Path) -> StateStore:
    store = StateStore(folder)
    store.hold(held(1, "c"))
    store.hold(held(2, "d"), on_probation=True)
    return store


def test_an_agreement_has_the_name_that_earlier_versions_gave_it() -> None:
    """With another one a device sets aside what it remembers."""
    spec = FleetSpec("yard", "fedavg", {"local_epochs": 1}, {"image_size": 28}, 3)
    assert spec_digest(spec) == "8c569bd4ef5ad14f7136da9679b679b44396d9f0f3e83f93fd3d643017be6d45"


def test_two_deaths_of_a_client_on_probation_lead_back_for_good(tmp_path: Path) -> None:
    on_probation(tmp_path)
    assert StateStore(tmp_path).begin() is None, "one death may have been the board's"
    assert StateStore(tmp_path).held() == held(2, "d")
    gone = StateStore(tmp_path).begin()
    assert (gone.version, gone.reason) == (2, "crashed")
    again = StateStore(tmp_path)
    assert (again.held(), again.previous(), again.sent_away(), again.on_probation) == (held(1, "c"), None, gone, False)
    assert again.begin() is None


def test_stops_that_were_meant_are_no_deaths(tmp_path: Path) -> None:
    on_probation(tmp_path).goodbye()
    for _ in range(5):
        store = StateStore(tmp_path)
        store.begin()
        store.goodbye()
    assert (store.held(), store.on_probation) == (held(2, "d"), True)
    store.begin()  # this client dies
    assert StateStore(tmp_path).begin() is None
    assert StateStore(tmp_path).held() == held(2, "d")
    StateStore(tmp_path).goodbye()
    StateStore(tmp_path).begin()  # and this one
    gone = StateStore(tmp_path).begin()
    assert gone is not None, "the stop between two deaths makes neither undone"


def test_a_trial_is_of_the_download_that_is_held(tmp_path: Path) -> None:
    store = on_probation(tmp_path)
    assert store.send_away(SentAway(1, 1, "hung", "")) is None, "that one isn't served"
    assert (store.held(), store.sent_away()) == (held(2, "d"), None)
    StateStore(tmp_path).begin()  # a death
    store.hold(held(2, "d"), on_probation=True)
    gone = StateStore(tmp_path).begin()
    assert gone is not None, "what is held again begins no other trial"
    store.hold(held(3, "e"), on_probation=True)
    store.hold(held(3, "e"))
    assert not store.on_probation, "it was confirmed meanwhile"
    store._write("probation", Trial(4))  # a kill before version 4 itself was written
    assert not store.on_probation
    for _ in range(3):
        assert StateStore(tmp_path).begin() is None
    assert StateStore(tmp_path).held() == held(3, "e")


def test_a_confirmed_download_survives_any_number_of_deaths(tmp_path: Path) -> None:
    store = on_probation(tmp_path)
    store.confirm(1)
    assert store.on_probation, "it is version 2 that has to pass"
    store.confirm(2)
    for _ in range(3):
        assert StateStore(tmp_path).begin() is None
    assert StateStore(tmp_path).held() == held(2, "d")


def test_a_download_that_nobody_confirmed_is_never_the_one_to_return_to(tmp_path: Path) -> None:
    store = on_probation(tmp_path)
    store.hold(held(3, "e"), on_probation=True)
    assert (store.held(), store.previous()) == (held(3, "e"), held(1, "c"))
    store.confirm(3)
    store.hold(held(4, "f"), on_probation=True)
    assert store.previous() == held(3, "e")


def test_a_kill_while_the_next_one_is_held_confirms_none_that_was_on_probation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = on_probation(tmp_path), StateStore._write

    def killed(self: StateStore, name: str, record: msgspec.Struct) -> None:
        if name == "held":
            raise KeyboardInterrupt
        write(self, name, record)

    with monkeypatch.context() as during:
        during.setattr(StateStore, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            store.hold(held(3, "e"), on_probation=True)
    again = StateStore(tmp_path)
    assert again.begin() is None
    assert (again.held(), again.on_probation) == (held(2, "d"), True)
    again.hold(held(3, "e"), on_probation=True)
    assert again.previous() == held(1, "c")
    again.confirm(3)
    assert not again.on_probation


def test_the_first_download_has_nothing_to_return_to_and_is_on_no_probation(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.hold(held(1, "c"), on_probation=True)
    assert not store.on_probation
    assert store.send_away(SentAway(1, 1, "hung", "")) is None
    assert store.held() == held(1, "c")


def test_a_roll_back_is_for_good_before_anything_else_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gone = on_probation(tmp_path), SentAway(2, 2, "hung", "no answer")
    written = store._write

    def killed_after_one(name: str, record: msgspec.Struct) -> None:
        written(name, record)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_write", killed_after_one)
    with pytest.raises(KeyboardInterrupt):
        store.send_away(gone)
    assert StateStore(tmp_path).begin() == gone
    assert (StateStore(tmp_path).held(), StateStore(tmp_path).sent_away()) == (held(1, "c"), gone)


def test_a_roll_back_that_a_crash_interrupted_is_completed_at_the_next_start(tmp_path: Path) -> None:
    store = on_probation(tmp_path)
    record = (tmp_path / "state" / "held").read_bytes(), (tmp_path / "state" / "previous").read_bytes()
    gone = SentAway(2, 2, "hung", "no answer")
    assert store.send_away(gone) == held(1, "c")
    (tmp_path / "state" / "held").write_bytes(record[0])
    (tmp_path / "state" / "previous").write_bytes(record[1])
    again = StateStore(tmp_path)
    assert again.begin() == gone
    assert again.held() == held(1, "c")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", KINDS)
def test_what_is_no_file_in_a_records_place_makes_way_when_the_client_starts(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    StateStore(tmp_path).hold(held(1, "a"))
    path = tmp_path / "state" / "held"
    path.unlink()
    leave(path, what)
    assert StateStore(tmp_path, read_only=True).held() is None
    store = StateStore(tmp_path, disk=Disk(tmp_path, "training waits", 0.0))
    assert [record.message for record in caplog.records][-1:] == ["record unreadable"]
    assert store.held() is None
    store.hold(held(2, "b"))
    assert StateStore(tmp_path).held() == held(2, "b")
