from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from replayfleet.edge_client.doctor import disk
from replayfleet.edge_client.doctor.disk import look_at_disk
from replayfleet.edge_client.doctor.findings import Finding, Status
from replayfleet.federation.service.data_dir import MARKER, claim_data_dir

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /run rw,nosuid - tmpfs tmpfs rw
31 22 8:2 / /data ro,relatime - ext4 /dev/sda2 rw
32 22 0:40 / /data/my\\040films rw - nfs4 server:/films rw
damaged line
"""


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_room_speed_and_kind_of_a_real_folder_and_nothing_stays_behind(tmp_path: Path) -> None:
    found = by_check(look_at_disk(tmp_path / "not" / "made" / "yet"))
    assert set(found) == {"disk.space", "disk.filesystem", "disk.speed"}
    assert found["disk.speed"].facts["bytes_per_s"] > 0
    assert found["disk.speed"].facts["sync_s"] > 0
    assert found["disk.space"].facts["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "status"), [(1 << 20, Status.FAILURE), (500 << 20, Status.WARNING), (50 << 30, Status.OK)]
)
def test_little_room_is_told(free: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(disk.shutil.disk_usage(tmp_path))(100 << 30, (100 << 30) - free, free)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    assert by_check(look_at_disk(tmp_path))["disk.space"].status == status


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/srv/client", ("ext4", "/dev/root", False)),
        ("/run/client", ("tmpfs", "tmpfs", False)),
        ("/data/client", ("ext4", "/dev/sda2", True)),
        ("/data/my films/client", ("nfs4", "server:/films", False)),
        ("/running", ("ext4", "/dev/root", False)),
    ],
)
def test_the_innermost_mount_counts(folder: str, expected: tuple[str, str, bool], tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    kind, device, options = disk._mount(Path(folder), tmp_path / "mountinfo")
    assert (kind, device, "ro" in options) == expected


@pytest.mark.parametrize(
    ("mount", "status"),
    [
        (("ext4", "/dev/root", ("rw",)), Status.OK),
        (("ext4", "/dev/root", ("ro",)), Status.FAILURE),
        (("overlay", "overlay", ("rw",)), Status.WARNING),
        (("nfs4", "server:/films", ("rw",)), Status.WARNING),
    ],
)
def test_a_file_system_that_keeps_nothing_or_is_elsewhere_is_told(
    mount: tuple[str, str, tuple[str, ...]], status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_mount", lambda folder, mounts: mount)
    assert by_check(look_at_disk(tmp_path))["disk.filesystem"].status == status


def test_what_is_no_folder_or_not_writable_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert look_at_disk(file)[0].status == Status.FAILURE
    speed = by_check(look_at_disk(Path("/proc/client")))["disk.speed"]
    assert speed.status == Status.FAILURE
    assert "can't be written" in speed.found


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, "give it to the user of the service"),
    ],
)
def test_what_to_do_depends_on_why_nothing_can_be_written(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the kernel's stands in for a full disk."""

    monkeypatch.setattr(disk, "_written", Mock(side_effect=OSError(number, os.strerror(number))))
    speed = by_check(look_at_disk(tmp_path))["disk.speed"]
    assert (speed.status, speed.advice) == (Status.FAILURE, advice)
    assert os.strerror(number) in speed.found


@pytest.mark.parametrize(("marker", "said"), [("\0" * 80, "damaged"), ('{"format": 1, "role": "aggregator"}', "role")])
def test_a_data_dir_that_no_client_may_claim_is_a_failure(marker: str, said: str, tmp_path: Path) -> None:
    with claim_data_dir(tmp_path, fleet="fleet", role="client", owner="cam-1"):
        assert "disk.data-dir" not in by_check(look_at_disk(tmp_path))
    (tmp_path / MARKER).write_text(marker)
    found = by_check(look_at_disk(tmp_path))["disk.data-dir"]
    assert found.status == Status.FAILURE
    assert said in found.found


def test_without_a_data_dir_there_is_nothing_to_look_at() -> None:
    assert look_at_disk(None)[0].status == Status.SKIPPED
