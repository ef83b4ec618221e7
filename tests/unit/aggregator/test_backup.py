from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.client_world import TASK
from support.tiny_fleet import TinyFleet

from replayfleet.aggregator import cli
from replayfleet.aggregator.control.growing import add_classes
from replayfleet.aggregator.members.enrolment import Terms, opened
from replayfleet.aggregator.members.table import Issued, Members
from replayfleet.aggregator.operator import backup
from replayfleet.aggregator.operator.backup import back_up, restore
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.aggregator.trust.release import Releases, rotate_key
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.fleet.spec import make_spec


@pytest.fixture
def fleet(tmp_path: Path) -> TinyFleet:
    fleet = TinyFleet(tmp_path / "fleet", num_rounds=None)
    claim_data_dir(tmp_path / "fleet/aggregator", fleet="tiny-fleet", role="aggregator").close()
    (tmp_path / "fleet/aggregator/keys").unlink()
    Releases(tmp_path / "fleet/aggregator/keys")
    fleet.run(until=lambda: fleet.rounds.index == 2)
    return fleet


def test_a_backup_beside_a_running_aggregator_is_whole_and_private(fleet: TinyFleet, tmp_path: Path) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    made = back_up(data_dir, tmp_path / "backup")
    assert (made.fleet, made.round, made.epoch) == ("tiny-fleet", 2, 0)
    assert made.num_blobs == len(fleet.store.referenced()) > 0
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "backup/keys/signing.key").stat().st_mode) == 0o600
    assert not (tmp_path / "backup/lock").exists()
    with pytest.raises(SettingsError, match="not empty"):
        back_up(data_dir, tmp_path / "backup")
    fleet.close()


def test_a_backup_is_on_the_disk_before_it_has_its_name(
    fleet: TinyFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, flushed = os.fsync, list[Path]()

    def noted(handle: int) -> None:
        flush(handle)
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", noted)
    back_up(tmp_path / "fleet/aggregator", made := tmp_path / "backup")
    assert flushed[-1] == tmp_path, "and then its name"
    under_another = {path.relative_to(tmp_path).parts[1:] for path in flushed[:-1]}
    assert {path.relative_to(made).parts for path in made.rglob("*")} <= under_another
    assert not any(path.is_relative_to(made) for path in flushed)
    fleet.close()


def test_what_a_killed_backup_left_goes_with_the_next_one_and_what_a_running_one_makes_stays(
    fleet: TinyFleet, tmp_path: Path
) -> None:
    place = tmp_path / "backups"
    others = [place / f".monday.{'0' * 31}.tmp", place / ".monday.tmp", place / "monday"]
    for folder in (left := place / f".monday.{'0' * 32}.tmp", *others):
        folder.mkdir(parents=True)
        (folder / "signing.key").write_text("as a kill -9 leaves it")
    with backup._in_place_of(place / "tuesday") as running:
        (running / "file").touch()
        back_up(tmp_path / "fleet/aggregator", place / "wednesday")
        assert (running / "file").exists()
    assert not left.exists()
    assert sorted(place.iterdir()) == sorted([*others, place / "tuesday", place / "wednesday"])
    fleet.close()


def test_a_backup_that_another_one_takes_for_a_leftover_as_it_begins_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two fleets go into one folder, at the same time of night."""

    def after_another_one(lock: int, how: int) -> None:
        monkeypatch.undo()
        backup._remove_unfinished(tmp_path)
        fcntl.flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", after_another_one)
    with backup._in_place_of(tmp_path / "monday") as running:
        (running / "file").touch()
    assert (tmp_path / "monday" / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["monday"]


def test_a_fleet_that_has_not_begun_is_no_backup_yet(tmp_path: Path) -> None:
    (tmp_path / "agg").mkdir()
    AggregatorStore(tmp_path / "agg").close()  # as after `aggregator enroll`
    with pytest.raises(SettingsError, match="has not begun yet"):
        back_up(tmp_path / "agg", tmp_path / "backup")


def test_a_fleet_that_lost_its_keys_is_told_before_it_counts_on_a_backup(fleet: TinyFleet, tmp_path: Path) -> None:
    fleet.close()
    keys = tmp_path / "fleet/aggregator/keys"
    for lost in ("1.root.json", "signing.key"):
        (keys / lost).rename(tmp_path / lost)
        with pytest.raises(SettingsError, match="no device would follow"):
            back_up(tmp_path / "fleet/aggregator", tmp_path / "backup")
        (tmp_path / lost).rename(keys / lost)
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"], "nothing is left"


def test_who_was_revoked_since_the_backup_is_named(fleet: TinyFleet, tmp_path: Path) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    table = Members(data_dir)
    for number in (1, 2):
        table.enrol(f"cam-{number}", Issued(number, 0.0, 9e9, 9e9), 1.0)
    table.revoke("cam-2", 2.0)
    back_up(data_dir, tmp_path / "backup")
    table.revoke("cam-1", 3.0)
    table.enrol("cam-9", Issued(9, 0.0, 9e9, 9e9), 3.0)
    table.revoke("cam-9", 4.0)
    table.close()
    fleet.close()
    assert restore(tmp_path / "backup", data_dir, replace=True).revoked_since == ("cam-1",)
    assert restore(tmp_path / "backup", tmp_path / "new").revoked_since == ()


def test_a_data_dir_whose_database_is_damaged_is_replaced(fleet: TinyFleet, tmp_path: Path) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    back_up(data_dir, tmp_path / "backup")
    fleet.close()
    for left in data_dir.glob("aggregator.sqlite*"):
        left.write_bytes(b"what a broken disk left of it " * 500)
    made = restore(tmp_path / "backup", data_dir, replace=True)
    assert (made.round, made.revoked_since) == (2, ())


def test_a_copy_within_what_is_copied_is_refused(fleet: TinyFleet, tmp_path: Path) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    (tmp_path / "by-another-way").symlink_to(data_dir)
    for place in (data_dir / "backup", tmp_path / "by-another-way" / "old" / "backup"):
        with pytest.raises(SettingsError, match=r"lies in .* itself"):
            back_up(data_dir, place)
    back_up(data_dir, tmp_path / "backup")
    with pytest.raises(SettingsError, match=r"lies in .* itself"):
        restore(tmp_path / "backup", tmp_path / "backup" / "new")
    fleet.close()


def test_what_is_restored_is_another_store_in_another_epoch_each_time(fleet: TinyFleet, tmp_path: Path) -> None:
    before = fleet.store.download("cam-1")
    back_up(tmp_path / "fleet/aggregator", tmp_path / "backup")
    home = fleet.store.home()
    fleet.close()
    made = restore(tmp_path / "backup", tmp_path / "new")
    assert (made.round, made.epoch) == (2, 1)
    store = AggregatorStore(tmp_path / "new")
    download = store.download("cam-1")
    assert download.blobs == before.blobs
    assert (download.epoch, download.version > before.version) == (1, True)
    assert store.home() not in {"", home}
    store.close()
    assert restore(tmp_path / "backup", tmp_path / "again").epoch == 1, "the backup itself stays as it was"


def test_what_lies_elsewhere_is_copied_and_the_current_folder_has_a_name(
    fleet: TinyFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    key = (data_dir / "keys/signing.key").read_bytes()
    (data_dir / "keys").rename(tmp_path / "secret")
    (data_dir / "keys").symlink_to(tmp_path / "secret")
    (tmp_path / "backup").mkdir()
    monkeypatch.chdir(tmp_path / "backup")
    back_up(data_dir, Path())
    assert (tmp_path / "backup/keys/signing.key").read_bytes() == key
    fleet.close()
    monkeypatch.chdir(data_dir)
    restore(tmp_path / "backup", Path(), replace=True)
    assert (data_dir / "keys/signing.key").read_bytes() == key
    assert (tmp_path / "fleet/aggregator.before-restore-1/keys").is_symlink()


def test_a_data_dir_with_something_in_it_is_replaced_only_when_told_and_kept_aside(
    fleet: TinyFleet, tmp_path: Path
) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    back_up(data_dir, tmp_path / "backup")
    with pytest.raises(SettingsError, match="--replace"):
        restore(tmp_path / "backup", data_dir)
    with (
        claim_data_dir(data_dir, fleet="tiny-fleet", role="aggregator"),
        pytest.raises(SettingsError, match="in use by process"),
    ):
        restore(tmp_path / "backup", data_dir, replace=True)
    fleet.close()
    epochs = [restore(tmp_path / "backup", data_dir, replace=True).epoch for _ in range(2)]
    assert epochs == [1, 2], "clients have followed what is replaced"
    aside = sorted(path.name for path in data_dir.parent.glob("aggregator.*"))
    assert aside == ["aggregator.before-restore-1", "aggregator.before-restore-2"]
    assert not list(data_dir.parent.glob(".*.tmp"))


def test_keys_that_were_rotated_since_the_backup_stay_and_all_else_is_the_backups(
    fleet: TinyFleet, tmp_path: Path
) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    shutil.rmtree(data_dir / "keys")
    Releases(data_dir / "keys")
    back_up(data_dir, tmp_path / "backup")
    fleet.close()
    former = (data_dir / "keys/signing.key").read_bytes()
    rotate_key(data_dir / "keys")
    made = restore(tmp_path / "backup", data_dir, replace=True)
    assert (made.keeps_keys, made.round, made.epoch) == (True, 2, 1)
    assert (data_dir / "keys/signing.key").read_bytes() != former
    assert len(Releases(data_dir / "keys").roots) == 2
    (data_dir / "keys/signing.key").unlink()
    assert not restore(tmp_path / "backup", data_dir, replace=True).keeps_keys, "nobody could sign with those"
    assert (data_dir / "keys/signing.key").read_bytes() == former


def test_what_is_no_backup_or_a_damaged_one_is_refused_and_nothing_is_made(fleet: TinyFleet, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no backup"):
        restore(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(SettingsError, match="no aggregator has run"):
        back_up(tmp_path / "nothing", tmp_path / "new")
    back_up(tmp_path / "fleet/aggregator", tmp_path / "backup")
    fleet.close()
    blob = next(path for path in (tmp_path / "backup/blobs").rglob("*") if path.is_file())
    blob.write_bytes(b"something else")
    with pytest.raises(SettingsError, match="missing or damaged"):
        restore(tmp_path / "backup", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_another_version_wrote_in_another_format_is_left_as_it_is(fleet: TinyFleet, tmp_path: Path) -> None:
    later = tmp_path / "later"
    back_up(tmp_path / "fleet/aggregator", later)
    fleet.close()
    (later / "fleet.json").write_text('{"format": 2, "fleet": "tiny-fleet", "role": "aggregator", "owner": ""}')
    shutil.rmtree(later / "keys")
    Releases(later / "keys")
    before = sorted(later.rglob("*"))
    with pytest.raises(SettingsError, match="format 2, this process is of format 1; use the version"):
        restore(later, tmp_path / "new")
    with pytest.raises(SettingsError, match="format 2, this process is of format 1; use the version"):
        back_up(later, tmp_path / "new")
    for verb in ("rotate-key", "status", "clients", "history"):
        found = CliRunner().invoke(cli.cli, [verb, "--data-dir", str(later)])
        assert "format 2, this process is of format 1; use the version" in str(found.exception), verb
    assert (sorted(later.rglob("*")), (tmp_path / "new").exists()) == (before, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_does_leaves_nothing_that_the_services_own_user_cannot_read(tmp_path: Path) -> None:
    home, nobody = tmp_path / "lib", 65534
    home.mkdir()
    os.chown(home, nobody, nobody)
    data_dir = home / "aggregator"
    with opened(data_dir, new=True) as registry:
        registry.enrol("cam-1", Terms())
    Releases(data_dir / "keys")
    rotate_key(data_dir / "keys")
    claim_data_dir(data_dir, fleet="fleet", role="aggregator").close()
    store = AggregatorStore(data_dir)
    store.found(make_spec("fleet", "fedavg", TASK, preset="tiny", overrides={}, run_seed=0), at=1.0)
    store.close()
    add_classes(data_dir, ["tram"], "root", 2.0)
    made = [home, *home.rglob("*")]
    assert len(made) > 30
    assert [str(path) for path in made if path.lstat().st_uid != nobody] == []


@pytest.mark.parametrize("epoch", ["x'c1'", "'abc'", "7", "x''"])
def test_a_damaged_epoch_of_what_is_replaced_hinders_no_restore(fleet: TinyFleet, tmp_path: Path, epoch: str) -> None:
    data_dir = tmp_path / "fleet/aggregator"
    back_up(data_dir, tmp_path / "backup")
    fleet.close()
    with contextlib.closing(sqlite3.connect(data_dir / "aggregator.sqlite")) as database:
        database.execute(f"INSERT OR REPLACE INTO facts (name, value) VALUES ('epoch', {epoch})")
        database.commit()
    assert restore(tmp_path / "backup", data_dir, replace=True).epoch == 1
