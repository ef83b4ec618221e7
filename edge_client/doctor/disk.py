"""The disk below the data dir: room, how fast it is written durably, and whether it keeps anything at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from replayfleet.edge_client.doctor.findings import Finding, failure, ok, skipped, warning
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.data_dir import CLIENTS, read_owner

LEAST_FREE_BYTES = 200 << 20
LITTLE_FREE_BYTES = 1 << 30
"""A client keeps two models, its sub-generators and the graphs: tens of megabytes, and as much again on the way."""

WRITTEN_BYTES = 8 << 20
NUM_SMALL = 5
SLOW_BYTES_PER_S = 2e6
SLOW_SYNC_S = 0.5

_ADVICE = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EROFS: "mount it writable"}
"""What to do about an error of writing; of any other the folder's owner is the cause."""

_VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})


def look_at_disk(data_dir: Path | None) -> list[Finding]:
    """Return room, speed and kind of the file system below ``data_dir``; what is written there is removed again."""
    if data_dir is None:
        return [skipped("disk", "not looked at", "name the client's --data-dir")]
    wanted = data_dir.absolute()  # made when a client first starts: the nearest folder that is there
    folder = next((place for place in (wanted, *wanted.parents) if place.exists()), Path("/"))
    if not folder.is_dir():
        return [failure("disk", f"{folder} is not a folder", "choose another --data-dir")]
    return [*_marker(wanted), _space(folder), _file_system(folder), _speed(folder)]


def _marker(data_dir: Path) -> list[Finding]:
    try:
        if data_dir.exists():
            read_owner(data_dir, CLIENTS)
    except SettingsError as error:
        return [failure("disk.data-dir", str(error), "no client starts here until then")]
    return []


def _space(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    facts = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total, "free_files": files.f_favail}
    found = f"{_gb(usage.free)} of {_gb(usage.total)} free in {folder}"
    if usage.free < LEAST_FREE_BYTES or (files.f_files and files.f_favail < 1000):
        return failure("disk.space", found, "make room: a client can't keep its models", **facts)
    if usage.free < LITTLE_FREE_BYTES:
        return warning("disk.space", found, "make room: logs and recordings fill it", **facts)
    return ok("disk.space", found, **facts)


def _file_system(folder: Path) -> Finding:
    kind, device, options = _mount(folder.resolve(), Path("/proc/self/mountinfo"))
    facts = {"type": kind, "device": device, "read_only": "ro" in options}
    found = f"{kind} on {device}"
    if "ro" in options:
        return failure("disk.filesystem", f"{found}, mounted read-only", "mount it writable", **facts)
    if kind in _VOLATILE:
        advice = "keep the data dir on a disk; in a container, on a volume"
        return warning("disk.filesystem", f"{found} loses everything at the next start", advice, **facts)
    if kind in _NETWORK:
        return warning("disk.filesystem", f"{found} is across a network", "keep the data dir on a local disk", **facts)
    return ok("disk.filesystem", found, **facts)


def _speed(folder: Path) -> Finding:
    data = os.urandom(WRITTEN_BYTES)  # zeros would be compressed by some file systems
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
            large_s = _written(Path(place) / "large", data)
            small_s = statistics.median(_written(Path(place) / f"small-{n}", data[:4096]) for n in range(NUM_SMALL))
    except OSError as error:
        reason = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "give it to the user of the service")
        return failure("disk.speed", f"{folder} can't be written: {reason}", advice)
    per_s = WRITTEN_BYTES / large_s
    facts = {"bytes_per_s": round(per_s), "sync_s": round(small_s, 6)}
    found = f"{per_s / 1e6:.0f} MB/s with fsync ({WRITTEN_BYTES >> 20} MiB), {1000 * small_s:.1f} ms for a small file"
    if per_s < SLOW_BYTES_PER_S or small_s > SLOW_SYNC_S:
        return warning("disk.speed", found, "models are swapped slowly: use an SSD or a better card", **facts)
    return ok("disk.speed", found, **facts)


def _written(path: Path, data: bytes) -> float:
    began = time.monotonic()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return max(1e-9, time.monotonic() - began)


def _mount(folder: Path, mounts: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return (type, device, options) of the file system that ``folder`` lies on (proc(5), mountinfo)."""
    best = -1
    found: tuple[str, str, tuple[str, ...]] = ("unknown", "unknown", ())
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        words, tail = left.split(" "), right.split(" ")
        if len(words) < 6 or len(tail) < 3:
            continue
        place = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[4]))
        if (place == folder or place in folder.parents) and len(place.parts) >= best:
            best, found = len(place.parts), (tail[0], tail[1], tuple(words[5].split(",")))
    return found


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
