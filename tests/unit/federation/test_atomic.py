"""Files are whole or absent, and readable by whom the umask says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replayfleet.federation.atomic import write_atomic


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


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
