"""A disk that takes nothing: what it is, what waits, and when it is tried again."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path

import pytest

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.disk import LEAST_ROOM_BYTES, LOOK_EVERY_S, Disk, Room, disk_errno, room_of

PLENTY = Room(10 << 30, 20 << 30)
FULL = OSError(errno.ENOSPC, "No space left on device")


class Watched:
    """A disk whose room the test sets."""

    def __init__(self, folder: Path) -> None:
        self.room = PLENTY
        self.disk = Disk(folder, "training waits", 0.0, lambda: self.room)

    def settle(self, start: float, until: float) -> float | None:
        """Turn like a loop does; returns when the disk took everything again."""
        turns = int((until - start) * 10)
        return next((start + n / 10 for n in range(turns) if self.disk.tick(start + n / 10)), None)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (FULL, errno.ENOSPC),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (OSError("disk took 3 of 4 bytes"), errno.EIO),
        (sqlite3.OperationalError("database or disk is full"), errno.ENOSPC),
        (sqlite3.OperationalError("disk I/O error"), errno.EIO),
        (sqlite3.OperationalError("attempt to write a readonly database"), errno.EROFS),
        (sqlite3.OperationalError("database is locked"), errno.EBUSY),
        (sqlite3.OperationalError("no such table: rounds"), None),
        (sqlite3.DatabaseError("database disk image is malformed"), None),
        (ConnectionResetError(errno.ECONNRESET, "reset"), None),
        (TimeoutError("nothing heard for 600 s"), None),
        (ValueError("bug"), None),
    ],
    ids=repr,
)
def test_errors_of_a_disk_are_told_from_all_others(error: Exception, number: int | None):
    assert disk_errno(error) == number
    behind = ReplayfleetError("a blob can't be kept")
    behind.__cause__ = error
    assert disk_errno(behind) == number


def test_a_number_that_sqlite_gives_counts_more_than_its_words(tmp_path: Path):
    database = sqlite3.connect(tmp_path / "x.sqlite", isolation_level=None)
    database.execute("CREATE TABLE t (a)")
    database.execute("PRAGMA query_only = ON")
    with pytest.raises(sqlite3.OperationalError) as raised:
        database.execute("INSERT INTO t VALUES (1)")
    assert disk_errno(raised.value) == errno.EROFS
    database.close()


def test_it_says_what_is_wrong_and_what_waits(watched: Watched):
    watched.room = Room(12 << 20, 8000 << 20)
    assert watched.disk.takes(FULL)
    assert watched.disk.problem == "disk full: 12 MB free of 8000 MB; training waits"
    watched.room = Room(4000 << 20, 8000 << 20)
    assert watched.disk.takes(FULL)
    assert "4000 MB free of 8000 MB, so a quota or all inodes (`df -i`) are used up; training" in watched.disk.problem
    assert watched.disk.takes(OSError(errno.EROFS, "Read-only"))
    assert "read-only; training waits" in watched.disk.problem
    assert watched.disk.takes(OSError(errno.EIO, "Input/output error"))
    assert "fails (EIO); training waits" in watched.disk.problem


def test_it_is_tried_again_by_itself_and_within_three_seconds_of_the_end_of_the_fault(watched: Watched):
    watched.room = Room(0, 100 << 20)
    watched.disk.takes(FULL)
    assert watched.settle(0.0, 600.0) is None
    watched.room = PLENTY
    back = watched.settle(600.0, 610.0)
    assert back is not None
    assert back <= 603.1
    assert watched.disk.problem == ""
    assert watched.settle(back, back + 60) is None, "it is told once"


def test_a_disk_that_takes_what_is_tried_and_fails_of_more_is_tried_ever_less_often(watched: Watched):
    failed, now, waited = OSError(errno.EIO, "Input/output error"), 0.0, []
    for _ in range(5):
        assert watched.disk.takes(failed)
        well = watched.settle(now, now + 10)
        assert well is not None
        waited.append(round(well - now, 1))
        now = well
    assert waited == [0.5, 2.0, 3.0, 3.0, 3.0]
    assert watched.settle(now, now + 20) is None, "nothing failed for a while"
    watched.disk.takes(failed)
    assert watched.settle(now + 20, now + 21) == now + 20.4


def test_what_must_be_written_waits_and_is_done_in_its_order(watched: Watched):
    done: list[int] = []
    fails = True

    def first(now: float) -> None:
        if fails:
            raise FULL
        done.append(1)

    watched.disk.do(first)
    watched.disk.do(lambda now: done.append(2))
    assert (done, watched.disk.settled) == ([], False)
    watched.settle(0.0, 30.0)
    assert done == [], "the disk takes some bytes, but not these"
    fails = False
    assert watched.settle(30.0, 40.0) is not None
    assert (done, watched.disk.settled, watched.disk.problem) == ([1, 2], True, "")


def test_work_that_brings_more_work_is_done_before_it(watched: Watched):
    done: list[str] = []

    def commit(now: float) -> None:
        watched.disk.do(lambda now: done.append("publish"))
        done.append("commit")

    watched.disk.do(commit)
    assert done == ["commit", "publish"]


def test_an_error_that_is_not_the_disks_is_raised_and_not_tried_again(watched: Watched):
    with pytest.raises(ZeroDivisionError):
        watched.disk.do(lambda now: 1 // 0)  # type: ignore[arg-type]
    assert watched.disk.settled
    assert watched.disk.problem == ""


def test_work_that_fails_of_something_else_after_a_full_disk_keeps_nothing_behind_it_waiting(watched: Watched):
    done: list[int] = []

    def first(now: float) -> None:
        raise FULL if watched.room != PLENTY else ZeroDivisionError

    watched.room = Room(0, 20 << 30)
    watched.disk.do(first)
    watched.disk.do(lambda now: done.append(2))
    watched.room = PLENTY
    with pytest.raises(ZeroDivisionError):
        watched.settle(0.0, 10.0)
    assert watched.settle(10.0, 20.0) is not None, "it is said once that the disk takes everything again"
    watched.disk.do(lambda now: done.append(3))
    assert (done, watched.disk.settled, watched.disk.problem) == ([2, 3], True, "")


def test_what_was_not_enough_once_is_not_enough_the_second_time(watched: Watched):
    """Else a round would be trained again and again on a disk that is always a little too small."""
    watched.room = Room(30 << 20, 1 << 30)
    watched.disk.takes(FULL)
    assert watched.settle(0.0, 100.0) is None
    watched.room = Room(61 << 20, 1 << 30)
    assert watched.settle(100.0, 110.0) is not None


def test_a_nearly_full_disk_and_a_folder_that_is_gone_are_seen_before_anything_is_written(tmp_path: Path):
    watched = Watched(tmp_path)
    watched.room = Room(LEAST_ROOM_BYTES - 1, 1 << 30)
    watched.disk.tick(0.0)
    assert "disk full: 7 MB free" in watched.disk.problem
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "fleet.json").touch()
    disk = Disk(folder, "training waits", 0.0)
    disk.tick(0.0)
    assert disk.problem == ""
    (folder / "fleet.json").unlink()  # an empty folder of that name may be where a disk was mounted
    disk.tick(LOOK_EVERY_S)
    assert disk.problem == f"data dir {folder} is gone; put it back, or start anew; training waits"
    (folder / "fleet.json").touch()
    assert any(disk.tick(LOOK_EVERY_S + n) for n in range(10))


def test_nothing_is_written_to_a_copy_in_the_place_of_the_data_dir_until_the_right_one_is_back(tmp_path: Path):
    folder, away, copy, done = tmp_path / "data", tmp_path / "away", tmp_path / "copy", []
    with claim_data_dir(folder, fleet="f", role="aggregator") as claimed:
        disk = Disk(folder, "uploads wait", 0.0, lock=claimed.lock)
        shutil.copytree(folder, copy)
        folder.rename(away)
        copy.rename(folder)
        disk.do(done.append)
        assert disk.problem == (
            f"data dir {folder} was replaced, or its lock removed, while this runs; put the old one back, or restart; "
            "uploads wait"
        )
        assert not any(disk.tick(float(n)) for n in range(10))
        assert done == []
        folder.rename(copy)
        away.rename(folder)
        assert any(disk.tick(float(n)) for n in range(10, 20))
        assert len(done) == 1
        assert sorted(path.name for path in copy.iterdir()) == ["fleet.json", "lock"]


def test_a_data_dir_without_its_lock_may_get_a_second_owner(tmp_path: Path):
    with claim_data_dir(tmp_path, fleet="f", role="client") as claimed:
        disk = Disk(tmp_path, "training waits", 0.0, lock=claimed.lock)
        assert disk.is_there()
        (tmp_path / "lock").unlink()
        disk.tick(0.0)
        assert "its lock removed" in disk.problem
        with claim_data_dir(tmp_path, fleet="f", role="client"):
            assert not any(disk.tick(float(n)) for n in range(10))


def test_a_file_that_is_missing_is_no_problem_of_the_disk(watched: Watched):
    assert not watched.disk.takes(FileNotFoundError(errno.ENOENT, "no such file"))


def test_it_looks_at_a_real_disk(tmp_path: Path):
    room = room_of(tmp_path, tmp_path)
    assert 0 < room.free_bytes < room.total_bytes
    assert room_of(tmp_path, tmp_path / "absent").gone
    disk = Disk(tmp_path, "training waits", 0.0)
    disk.takes(OSError(errno.EIO, "Input/output error"))
    assert any(disk.tick(float(n)) for n in range(10))
    assert list(tmp_path.iterdir()) == [], "the file that it tried with is gone"
