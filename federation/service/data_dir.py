"""A data dir belongs to one fleet, one role and one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path

from replayfleet.federation.atomic import open_file, shared_folder, write_atomic
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.paths import RESULT, check_folder, read_regular

FORMAT_VERSION = 1
"""Of everything below a data dir; a newer one is refused instead of misread."""

CLIENTS: dict[str, object] = {"format": FORMAT_VERSION, "role": "client"}
"""What ``read_owner`` expects of a client's data dir, of any fleet."""

MARKER = "fleet.json"
STATUS_FILE = "status.json"
"""Of a client."""
LOCK = "lock"

_OTHER_FORMAT = (
    "use the version of Replayfleet that wrote it, or move it away and put back what was saved before that version"
)
_GLANCE_S = 0.05
"""Longer than ``in_use`` holds a lock to see whether it is held, on a machine with time for it."""


class DataDir:
    """A claimed data dir; ``close`` (or ``with``) gives it back. A killed process gives it back by itself.

    Attributes:
        path: the folder.
        lock: the lock file that is held; another one at the path means that the folder was replaced.
    """

    def __init__(self, path: Path, lock_handle: int) -> None:
        self.path = path
        self.lock = os.fstat(lock_handle)
        self._lock_handle: int | None = lock_handle

    def close(self) -> None:
        """Let another process claim the folder. Idempotent."""
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def __enter__(self) -> DataDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_data_dir(path: Path) -> None:
    """Check that ``path`` can be claimed: one that was before also while its disk is read-only, as after a power cut.

    Raises:
        SettingsError: As ``check_folder``.
    """
    with contextlib.suppress(OSError):  # somebody else's, say
        if (path / MARKER).is_file() and os.statvfs(path).f_flag & os.ST_RDONLY:
            return
    check_folder(path)


def claim_data_dir(path: Path, *, fleet: str, role: str, owner: str = "") -> DataDir:
    """Create or take over ``path`` for one process of one fleet.

    Args:
        path: the folder.
        fleet: fleet name.
        role: ``client`` or ``aggregator``.
        owner: which client; empty for the aggregator.

    Raises:
        SettingsError: It is no folder, not writable, used by another process, of another fleet, role or client, or
            written by a newer version. Nothing was written.
    """
    claimed = {"format": FORMAT_VERSION, "fleet": fleet, "role": role, "owner": owner}
    if path.exists():
        read_owner(path, claimed)
    try:
        shared_folder(path)
        handle = _opened(path / LOCK)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(f"data dir {path}: not writable ({reason}); choose another with --data-dir") from error
    try:
        _lock(handle, path)
        if not read_owner(path, claimed):
            write_atomic(path / MARKER, json.dumps(claimed, indent=1).encode() + b"\n", private=True)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError):
            raise SettingsError(f"data dir {path}: not writable ({error.strerror or error})") from error
        raise
    return DataDir(path, handle)


def in_use(path: Path) -> bool:
    """Whether a process has claimed ``path``, in another container or under a number used anew too.

    Raises:
        PermissionError: Only its owner may know.
    """
    try:
        handle = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def fleet_of(path: Path, fleet: str | None) -> str:
    """Return which fleet an aggregator's data dir belongs to; one that is nobody's becomes that of ``fleet``.

    Beside a running aggregator, too: nothing is claimed.

    Args:
        path: an existing folder.
        fleet: fleet name; None: whatever it is, else ``fleet``.

    Raises:
        SettingsError: It belongs to another fleet, or not to an aggregator, or isn't writable.
    """
    owned = aggregators(fleet)
    if read_owner(path, owned):
        return str(json.loads((path / MARKER).read_bytes()).get("fleet"))
    found = fleet or "fleet"
    write_atomic(path / MARKER, json.dumps({**owned, "fleet": found}, indent=1).encode() + b"\n", private=True)
    return found


def aggregators(fleet: str | None) -> dict[str, object]:
    """Return what ``read_owner`` expects of an aggregator's data dir; of any fleet if None."""
    owned = {"format": FORMAT_VERSION, "role": "aggregator", "owner": ""}
    return owned if fleet is None else {**owned, "fleet": fleet}


def read_owner(path: Path, expected: dict[str, object]) -> bool:
    """Whether ``path`` carries the marker of exactly this owner; False if it carries none.

    Raises:
        SettingsError: It belongs to somebody else, is of another format, or isn't a readable folder.
    """
    if not path.is_dir():
        raise SettingsError(f"data dir {path}: not a folder; choose another with --data-dir")
    marker = path / MARKER
    try:
        found = json.loads(read_regular(marker))
    except FileNotFoundError:
        if (path / RESULT).exists():
            raise SettingsError(
                f"data dir {path}: holds a run of fleet-sim, and no fleet; choose another with --data-dir"
            ) from None
        if (path / STATUS_FILE).exists():
            raise SettingsError(
                f"data dir {path}: holds {STATUS_FILE} and no {MARKER}, so it is nobody's; choose another with "
                f"--data-dir, or put the {MARKER} back"
            ) from None
        return False
    except OSError as error:
        raise SettingsError(f"data dir {path}: not readable ({error.strerror or error})") from error
    except UNREADABLE as error:
        raise SettingsError(f"data dir {path}: {MARKER} is damaged; restore it or choose another folder") from error
    if not isinstance(found, dict):
        raise SettingsError(f"data dir {path}: {MARKER} is damaged; restore it or choose another folder")
    for key, wanted in expected.items():
        if found.get(key) != wanted:
            raise SettingsError(
                f"data dir {path}: belongs to {key} {found.get(key)!r}, this process is of {key} {wanted!r}; "
                f"{_OTHER_FORMAT if key == 'format' else 'choose another with --data-dir'}"
            )
    return True


def read_client(path: Path) -> None:
    """Check that ``path``, where a client ran, isn't of another format or role, as far as others may know.

    Raises:
        SettingsError: As ``read_owner``.
    """
    if os.access(path / MARKER, os.R_OK):  # a client that a program starts by itself has none
        read_owner(path, CLIENTS)


def _opened(lock: Path) -> int:
    try:
        return open_file(lock)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        with contextlib.suppress(OSError):
            return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)  # of a read-only disk, which is a lock all the same
        raise


def _lock(handle: int, path: Path) -> None:
    for waits_s in (_GLANCE_S, 20 * _GLANCE_S, 0.0):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(waits_s)
    else:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        raise SettingsError(f"data dir {path}: in use by process {holder}; stop it or choose another folder")
    with contextlib.suppress(OSError):  # a full disk has no room for whose it is; the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
