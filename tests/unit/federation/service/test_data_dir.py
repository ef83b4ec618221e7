from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.data_dir import FORMAT_VERSION, check_data_dir, claim_data_dir, in_use


def test_a_data_dir_can_be_claimed_again_by_its_owner(tmp_path: Path):
    path = tmp_path / "new" / "dir"
    with claim_data_dir(path, fleet="f", role="client", owner="cam-1") as claimed:
        assert claimed.path == path
    claim_data_dir(path, fleet="f", role="client", owner="cam-1").close()


@pytest.mark.parametrize("change", [{"fleet": "g"}, {"role": "aggregator"}, {"owner": "cam-2"}])
def test_a_data_dir_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, change: dict[str, str]):
    mine = {"fleet": "f", "role": "client", "owner": "cam-1"}
    claim_data_dir(tmp_path, **mine).close()
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    with pytest.raises(SettingsError, match="belongs to"):
        claim_data_dir(tmp_path, **{**mine, **change})
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_a_data_dir_of_another_format_is_refused_and_left_alone(tmp_path: Path):
    marker = tmp_path / "fleet.json"
    marker.write_text(json.dumps({"format": FORMAT_VERSION + 1, "fleet": "f", "role": "client", "owner": ""}))
    before = marker.read_bytes()
    with pytest.raises(SettingsError, match=f"belongs to format {FORMAT_VERSION + 1}, .*; use the version"):
        claim_data_dir(tmp_path, fleet="f", role="client")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("fleet.json", before)]


def test_a_full_disk_keeps_nobody_from_its_own_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claim_data_dir(tmp_path, fleet="f", role="client").close()
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with claim_data_dir(tmp_path, fleet="f", role="client"), pytest.raises(SettingsError, match="in use"):
        claim_data_dir(tmp_path, fleet="f", role="client")


def test_a_disk_that_is_read_only_keeps_nobody_from_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Errors of the kernel's stand in for a mount that root alone could make."""

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, mode)

    opened, mine = os.open, {"fleet": "f", "role": "client"}
    claim_data_dir(tmp_path / "mine", **mine).close()
    (tmp_path / "new").mkdir()
    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    check_data_dir(tmp_path / "mine")
    with claim_data_dir(tmp_path / "mine", **mine), pytest.raises(SettingsError, match="in use"):
        claim_data_dir(tmp_path / "mine", **mine)
    with pytest.raises(SettingsError, match="can't be written to"):
        check_data_dir(tmp_path / "new")
    with pytest.raises(SettingsError, match=r"not writable \(Read-only"):
        claim_data_dir(tmp_path / "new", **mine)


def test_a_second_process_is_told_who_holds_the_data_dir(tmp_path: Path):
    with (
        claim_data_dir(tmp_path, fleet="f", role="aggregator"),
        pytest.raises(SettingsError, match=f"in use by process {os.getpid()}"),
    ):
        claim_data_dir(tmp_path, fleet="f", role="aggregator")


def test_whoever_looks_whether_it_is_in_use_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not in_use(tmp_path / "none")
    with claim_data_dir(tmp_path, fleet="f", role="client"):
        assert in_use(tmp_path)
    assert not in_use(tmp_path)
    with (tmp_path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        claim_data_dir(tmp_path, fleet="f", role="client").close()


def test_a_file_in_place_of_the_data_dir_is_refused(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(SettingsError, match="not a folder"):
        claim_data_dir(path, fleet="f", role="client")
    with pytest.raises(SettingsError, match="not writable"):
        claim_data_dir(path / "below", fleet="f", role="client")
    assert path.read_text() == "mine"


@pytest.mark.timeout(20)
def test_nobody_waits_for_who_writes_into_a_pipe_that_a_damaged_disk_left(tmp_path: Path):
    os.mkfifo(tmp_path / "lock")
    assert not in_use(tmp_path)
    with claim_data_dir(tmp_path, fleet="f", role="client"):
        assert in_use(tmp_path)
    os.mkfifo(tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "fleet.json")
    with pytest.raises(SettingsError, match="not readable"):
        claim_data_dir(tmp_path, fleet="f", role="client")


def test_a_damaged_marker_is_refused(tmp_path: Path):
    (tmp_path / "fleet.json").write_text("[]")
    with pytest.raises(SettingsError, match="damaged"):
        claim_data_dir(tmp_path, fleet="f", role="client")


def test_a_run_of_the_simulator_is_no_data_dir(tmp_path: Path):
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(SettingsError, match="holds a run of fleet-sim"):
        claim_data_dir(tmp_path, fleet="fleet", role="aggregator")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_that_was_nobodys_and_has_a_file_of_our_name_is_left_alone(tmp_path: Path):
    (tmp_path / "status.json").write_text("precious")
    with pytest.raises(SettingsError, match=r"holds status\.json and no fleet\.json, so it is nobody's"):
        claim_data_dir(tmp_path, fleet="f", role="client", owner="cam-1")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
