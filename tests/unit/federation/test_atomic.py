"""Files are whole or absent, and readable by whom the umask says."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from replayfleet.federation.atomic import clear_place, give_to_owner_of, open_file, private_folder, write_atomic
from tests.support.flushes import noted


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state"
    write_atomic(path, b"old")

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_are_flushed_before_the_rename_and_the_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = noted(monkeypatch)
    write_atomic(tmp_path / "state", b"new")
    assert steps == ["data", "rename", "directory"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_results_follow_the_umask_and_private_files_are_the_users_alone(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        for name, private in (("result.json", False), ("state", True)):
            write_atomic(tmp_path / name, b"old", private=private)
            write_atomic(tmp_path / name, b"new", private=private)
    finally:
        os.umask(before)
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


def test_what_root_makes_belongs_to_whom_the_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    owners: dict[int, tuple[int, int]] = {}

    def fchown(handle: int, user: int, group: int) -> None:
        owners[os.fstat(handle).st_ino] = (user, group)

    place = tmp_path.stat().st_uid, tmp_path.stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", fchown)
    private_folder(tmp_path / "keys" / "old")
    write_atomic(tmp_path / "keys" / "key", b"secret", private=True)
    os.close(open_file(tmp_path / "keys" / "lock"))
    made = [tmp_path / "keys", tmp_path / "keys/old", tmp_path / "keys/key", tmp_path / "keys/lock"]
    if place[0] == 0:  # else it isn't root's, and stays as it is
        assert [owners.pop(path.stat().st_ino) for path in made] == [place] * 4
    os.close(open_file(tmp_path / "keys" / "lock"))
    private_folder(tmp_path / "keys")
    assert owners == {}, "what was there stays its owner's"
    monkeypatch.setattr(os, "fchown", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no owners here")))
    write_atomic(tmp_path / "keys" / "key", b"other", private=True)
    assert (tmp_path / "keys" / "key").read_bytes() == b"other", "a file system without owners takes it all the same"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_lies_where_another_user_may_write_gives_root_nothing_away(tmp_path: Path):
    mine = tmp_path / "mine"
    write_atomic(mine, b"root's")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "theirs" / "hard").hardlink_to(mine)
    (tmp_path / "theirs" / "soft").symlink_to(mine)
    for name in ("hard", "soft"):
        os.close(open_file(tmp_path / "theirs" / name))
    handle = os.open(tmp_path / "theirs" / "hard", os.O_RDONLY)
    give_to_owner_of(tmp_path / "theirs", handle)
    os.close(handle)
    assert mine.stat().st_uid == 0
    write_atomic(tmp_path / "theirs" / "soft", b"new", private=True)
    assert (mine.stat().st_uid, mine.read_bytes()) == (0, b"root's")


def test_what_a_damaged_disk_left_in_a_files_place_is_removed_and_nothing_else(tmp_path: Path):
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"kept")
    (tmp_path / "link to a folder").symlink_to("elsewhere")
    for name in ("folder", "pipe", "circle", "nowhere", "link to a folder"):
        assert clear_place(tmp_path / name)
    for name in ("file", "link", "none"):
        assert not clear_place(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file", "link"]
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"kept"


def test_a_file_that_is_put_there_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    look = Path.is_file

    def written_after(path: Path) -> bool:
        was_there = look(path)
        path.write_bytes(b"whole")
        return was_there

    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_file", written_after)
        assert not clear_place(tmp_path / "blob")
