from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.tiny_fleet import tiny_spec

from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.operator.status import read_status
from replayfleet.aggregator.rounds.machine import Phase
from replayfleet.aggregator.store import DATABASE, KEEP_ROUNDS, AggregatorStore, StoredArtefacts, added_classes
from replayfleet.federation.errors import ReplayfleetError, SettingsError
from replayfleet.federation.wire.protocol.limits import MAX_COUNTER, MAX_EPOCH
from replayfleet.federation.wire.protocol.messages import KEPT_DOWNLOADS, BlobEntry, Manifest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AggregatorStore]:
    made = AggregatorStore(tmp_path)
    made.found(tiny_spec(), at=1.0)
    yield made
    made.close()


def blob(name: str, letter: str) -> BlobEntry:
    return BlobEntry(name, letter * 64, 8)


def up(client: str, index: int = 0, letter: str = "a", version: int = 1) -> Manifest:
    return Manifest("up", "tiny-fleet", client, index, version, (blob("task", letter),))


def down(client: str, index: int = 1, letter: str = "d") -> Manifest:
    return Manifest("down", "tiny-fleet", client, index, 0, (blob("average", letter),))


def committed(store: AggregatorStore, index: int, **downloads: Manifest) -> bool:
    store.close_round(index, at=2.0)
    return store.commit_round(index, StoredArtefacts((blob("s", "e"),), "f" * 64), downloads, at=3.0)


def test_a_new_store_has_an_open_round_zero_and_its_spec(store: AggregatorStore):
    record = store.round()
    assert (record.index, record.phase, record.accepted) == (0, Phase.OPEN, ())
    assert store.spec().run_seed == 7
    assert store.state() is None


def test_an_upload_counts_once_and_the_first_stays(store: AggregatorStore):
    assert store.accept_upload(up("a", letter="1"), 10, 0)
    assert not store.accept_upload(up("a", letter="2", version=2), 10, 0)
    assert store.uploads(0)["a"] == up("a", letter="1")


def test_a_closed_or_future_round_takes_no_upload(store: AggregatorStore):
    assert not store.accept_upload(up("a", index=1), 10, 1)
    store.close_round(0, at=2.0)
    assert not store.accept_upload(up("a"), 10, 0)
    assert store.clients() == ()


def test_uploads_come_back_sorted_by_client_whatever_their_arrival(store: AggregatorStore):
    for client in ("c", "a", "b"):
        store.accept_upload(up(client), 1, 0)
    assert list(store.uploads(0)) == ["a", "b", "c"]
    assert store.round().accepted == ("a", "b", "c")


def test_a_commit_changes_everything_at_once_and_only_once(store: AggregatorStore):
    store.accept_upload(up("a"), 1, 0)
    assert committed(store, 0, a=down("a"))
    assert store.round().index == 1
    assert store.state().facts == "f" * 64
    assert store.download("a").version == 1
    assert not store.commit_round(0, StoredArtefacts((), "0" * 64), {"a": down("a")}, at=4.0)
    assert store.download("a").version == 1
    assert store.state().facts == "f" * 64


def test_an_open_round_can_not_be_committed(store: AggregatorStore):
    assert not store.commit_round(0, StoredArtefacts((), "0" * 64), {}, at=1.0)
    assert store.round().phase is Phase.OPEN


def test_a_commit_that_fails_in_the_middle_changes_nothing(store: AggregatorStore):
    store.close_round(0, at=2.0)
    broken = {"a": down("a"), "b": None}
    with pytest.raises(AttributeError):
        store.commit_round(0, StoredArtefacts((), "0" * 64), broken, at=3.0)
    assert store.round().phase is Phase.AGGREGATING
    assert (store.state(), store.download("a"), store.clients()) == (None, None, ())


def test_what_was_written_is_there_after_an_abrupt_end(store: AggregatorStore, tmp_path: Path):
    store.accept_upload(up("a"), 1, 0)
    second = AggregatorStore(tmp_path)  # as a new process would open it, the first one still holding its files
    try:
        assert second.round().accepted == ("a",)
    finally:
        second.close()


def test_versions_rise_also_after_a_download_was_dropped(store: AggregatorStore):
    assert store.put_download(down("a")).version == 1
    store.drop_download("a")
    assert store.download("a") is None
    assert store.put_download(down("a")).version == 2


def test_holdings_are_what_was_sent_and_what_was_confirmed(store: AggregatorStore):
    store.accept_upload(up("a", letter="1"), 1, 0)
    store.hold("a", {"2" * 64})
    assert store.holdings("a") == {"1" * 64, "2" * 64}
    manifest = store.put_download(down("a", letter="3"))
    store.confirm(manifest)
    assert store.holdings("a") == {"3" * 64}
    assert store.confirmed_version("a") == 1
    store.confirm(msgspec.structs.replace(manifest, version=0))
    assert store.confirmed_version("a") == 1


def test_of_a_client_that_uploads_and_never_confirms_no_more_is_noted_with_every_round(store: AggregatorStore):
    for index in range(20):
        letter = "0123456789abcdef"[index % 16]
        store.put_download(down("a", index, letter=letter))
        store.hold("a", {letter * 64})
        store.accept_upload(up("a", index, letter="9"), 1, index)
        assert {letter * 64, "9" * 64} <= store.holdings("a")
        assert len(store.holdings("a")) <= 2 + KEPT_DOWNLOADS
        committed(store, index)


def test_referenced_blobs_are_state_downloads_graphs_and_the_current_uploads(store: AggregatorStore):
    store.set_graphs((blob("graph/task", "9"),))
    store.accept_upload(up("a", letter="1"), 1, 0)
    assert store.referenced() == {"9" * 64, "1" * 64}
    committed(store, 0, a=down("a", letter="3"))
    assert store.referenced() == {"9" * 64, "3" * 64, "e" * 64, "f" * 64}
    committed(store, 1, a=down("a", 2, letter="4"))
    assert store.referenced() == {"9" * 64, "3" * 64, "4" * 64, "e" * 64, "f" * 64}, "an operator may go back to one"


def test_the_model_that_a_fleet_began_with_stays(tmp_path: Path):
    with contextlib.closing(AggregatorStore(tmp_path)) as store:
        store.found(tiny_spec(), at=1.0, initial=blob("initial", "7"))
        committed(store, 0, a=down("a"))
        assert "7" * 64 in store.referenced()


def test_what_has_ended_is_closed_no_more_and_loses_no_upload(store: AggregatorStore):
    """A round that is aggregated is what its restart aggregates too."""
    store.accept_upload(up("a"), 1, 0)
    store.close_round(0, at=2.0)
    assert not store.withdraw("a")
    assert set(store.uploads(0)) == {"a"}
    assert committed(store, 0, a=down("a"))
    assert not committed(store, 0, a=down("a"))
    assert (store.round().index, store.round().phase) == (1, Phase.OPEN)


def test_of_models_with_fewer_classes_nothing_is_left_that_a_client_could_go_back_to(store: AggregatorStore):
    store.set_graphs((blob("graph/task", "9"),))
    committed(store, 0, a=down("a", letter="3"))
    store.accept_upload(up("a", 1), 1, 1)
    store.close_round(1, at=4.0)
    store.grow(tiny_spec(), ("d",), blob("initial", "7"), None)
    assert (store.versions.of("a"), store.download("a"), store.graphs(), store.uploads(1)) == ((), None, (), {})
    assert store.referenced() == {"7" * 64}
    assert (store.round().index, store.round().phase) == (1, Phase.OPEN), "the round begins anew"
    assert (store.epoch(), store.added_classes()) == (1, ("d",))


def test_an_extension_and_a_beginning_are_of_one_round(store: AggregatorStore):
    store.begin(0)
    assert (store.begun(0), store.begun(1)) == (True, False)
    store.extend(0, 60.0)
    store.extend(0, 5.0)
    assert (store.extension_s(0), store.extension_s(1)) == (65.0, 0.0)
    store.extend(1, 7.0)
    assert (store.extension_s(0), store.extension_s(1)) == (0.0, 7.0)


def test_manifests_of_long_past_rounds_are_forgotten(store: AggregatorStore):
    for index in range(KEEP_ROUNDS + 2):
        store.accept_upload(up("a", index=index), 1, index)
        committed(store, index, a=down("a", index + 1))
    assert store.uploads(1) == {}
    assert set(store.uploads(2)) == {"a"}


def test_an_upload_counts_in_the_open_round_which_may_be_later_than_that_it_was_trained_for(
    store: AggregatorStore,
):
    late, other = up("a", letter="1"), up("a", letter="2", version=2)
    committed(store, 0)
    assert not store.accept_upload(late, 10, 0)
    assert store.accept_upload(late, 10, 1)
    assert (store.uploads(0), store.uploads(1)) == ({}, {"a": late})
    committed(store, 1)
    assert store.counts_in("a", late, 2) == 1
    assert (store.counts_in("a", other, 2), store.counts_in("b", late, 2)) == (None, None)
    in_time = up("a", 2)
    assert store.accept_upload(in_time, 10, 2)
    assert store.counts_in("a", in_time, 2) == 2


def test_a_file_that_is_no_database_is_one_clear_line(tmp_path: Path):
    (tmp_path / "aggregator.sqlite").write_bytes(b"something else entirely, long enough to be read" * 10)
    with pytest.raises(SettingsError, match="is damaged; restore a backup"):
        AggregatorStore(tmp_path)


@pytest.mark.parametrize("what", ["folder", "circle"])
def test_what_is_no_file_in_its_place_is_no_full_disk(what: str, tmp_path: Path):
    """As such it ended an aggregator with the code at which systemd tries for ever."""
    path = tmp_path / "aggregator.sqlite"
    path.mkdir() if what == "folder" else path.symlink_to(path)
    with pytest.raises(SettingsError, match=r"aggregator\.sqlite: can't be opened \("):
        AggregatorStore(tmp_path)


def test_the_database_is_written_through(store: AggregatorStore):
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert isinstance(store._db, sqlite3.Connection)


def test_another_epoch_makes_every_download_newer_than_all_before_and_survives_a_restart(
    store: AggregatorStore, tmp_path: Path
) -> None:
    committed(store, 0, a=down("a"), b=down("b"))
    for _ in range(3):
        newest = store.put_download(down("a"))
    store.raise_epoch(1)
    again = AggregatorStore(tmp_path)
    assert again.epoch() == 1
    for client in ("a", "b"):
        download = again.download(client)
        assert download.version > newest.version
        assert (download.epoch, download.round, download.blobs) == (1, 1, down(client).blobs)
    assert again.put_download(down("new")).epoch == 1
    again.close()
    for epoch in (1, MAX_EPOCH + 1):
        with pytest.raises(SettingsError, match="more than 1"):
            store.raise_epoch(epoch)


def test_a_client_that_is_ahead_of_the_store_gets_something_newer_and_nobody_else_does(store: AggregatorStore) -> None:
    committed(store, 0, a=down("a"), b=down("b"))
    assert not store.outpace("a", 1), "that version is ours"
    assert store.outpace("a", 50)
    ahead, other = store.download("a"), store.download("b")
    assert other is not None
    assert ahead.version > 50
    assert (ahead.epoch, other.version) == (1, 1)
    assert not store.outpace("stranger", 50)
    assert not store.outpace("a", MAX_COUNTER), "nothing could be newer"


def test_members_are_those_who_confirmed_or_uploaded(store: AggregatorStore):
    for client in "abc":
        store.put_download(down(client, 0))
    store.confirm(store.download("a"))
    store.accept_upload(up("b"), 10, 0)
    store.hold("d", {"e" * 64})
    assert store.members() == {"a", "b", "d"}


def test_only_who_never_was_a_member_is_forgotten_and_its_versions_go_on_rising(store: AggregatorStore):
    for client in "ab":
        for _ in range(5):
            store.put_download(down(client, 0))
    store.confirm(store.download("a"))
    store.put_download(down("c", 0))
    for client in ("a", "b", "c", "nobody"):
        store.forget(client)
    assert store.clients() == ("a",)
    assert store.put_download(down("b", 0)).version == 6, "it may hold an earlier one without having said so"


def test_who_has_a_place_is_told_of_one_as_of_all(store: AggregatorStore, tmp_path: Path):
    table = Members(tmp_path)
    issued = Issued(1, 1.0, 9e9, 9e9)

    def of_each() -> set[str]:
        store.roll.refresh()
        found = {name for name in ("a", "b", "c") if store.has_place(name)}
        assert found == store.places()
        return found

    assert of_each() == set()
    store.hold("a", set())
    store.hold("b", set())
    assert of_each() == {"a", "b"}
    table.enrol("c", issued, 1.0)
    assert of_each() == {"c"}, "a fleet that enrols has places for those alone"
    store.hold("c", set())
    table.revoke("c", 2.0)
    assert of_each() == {"a", "b"}
    table.close()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_database_that_a_full_disk_keeps_closed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, read_only: bool
) -> None:
    """A service is started again after exit code 1, which this error leads to, and after 2 never."""
    AggregatorStore(tmp_path).close()

    def full(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = 10 | 19 << 8  # SQLITE_IOERR_SHMSIZE, which has a name from Python 3.11 on
        raise error

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(ReplayfleetError, match="can't be opened now; is the disk full") as caught:
        AggregatorStore(tmp_path, read_only=read_only)
    assert not isinstance(caught.value, SettingsError)


@pytest.mark.parametrize("max_bytes", [0, 4096, 16384, 40960])
def test_a_database_that_a_full_disk_lets_nobody_make_is_made_at_the_next_start(tmp_path: Path, max_bytes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        with pytest.raises(ReplayfleetError, match="can't be opened now; is the disk full"):
            AggregatorStore(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert added_classes(tmp_path) == ()
    AggregatorStore(tmp_path).close()


def test_a_database_that_was_cut_off_to_nothing_is_no_fleet(tmp_path: Path):
    (tmp_path / DATABASE).touch()
    for look in (lambda: AggregatorStore(tmp_path, read_only=True), lambda: added_classes(tmp_path)):
        with pytest.raises(SettingsError, match="is damaged; restore a backup: it holds nothing of a fleet"):
            look()


def test_a_store_of_an_earlier_version_is_looked_at_as_it_is(store: AggregatorStore, tmp_path: Path):
    committed(store, 0, a=down("a"))
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as db:  # as before anything was signed
        for name in ("signing_keys", "quarantine", "versions", "deeds", "members"):
            db.execute(f"DROP TABLE {name}")
        before = list(db.iterdump())
    status = read_status(tmp_path)
    assert (status.round, [client.client for client in status.clients]) == (1, ["a"])
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        assert list(db.iterdump()) == before
