"""Files that are either the old one or the new one, whatever happens in between.

What root makes belongs to whom the place belongs to: a service that runs as another user reads what an operator's
command wrote for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` with ``data``, durably: temporary file, fsync, rename, fsync of the folder.

    After a crash the file holds the old or the new bytes, never a mixture. The folder must exist. As root, the new file
    belongs to whom the folder does.

    Args:
        path: the file.
        data: its content.
        private: only the user may read it; else who may is the umask's to say, as for any file that a program writes.
    """
    try:
        _write(path, data, private=private)
    except OSError as error:
        error.filename = str(path)  # what an operator knows, whatever it was that failed
        raise


def _write(path: Path, data: bytes, *, private: bool) -> None:
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            give_to_owner_of(path.parent, handle)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def clear_place(path: Path) -> bool:
    """Remove what stands where only a file of ours does, and is none; says whether it did. Raises OSError.

    A damaged disk leaves folders, pipes and links that lead nowhere: nothing could be read or written there.
    """
    if not os.path.lexists(path) or path.is_file():  # in this order: another process may put one there meanwhile
        return False
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return True


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left half written; only for who alone writes there. Raises OSError."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Make a folder that only its user may enter, and those above it, unless they are there; raises OSError."""
    shared_folder(folder, 0o700)


def shared_folder(folder: Path, mode: int = 0o777) -> None:
    """As ``private_folder``, but who may enter is ``mode``'s to say, and the umask's."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    for made in reversed(missing):
        handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        give_to_owner_of(made.parent, handle)
        os.close(handle)


def open_file(path: Path, mode: int = 0o600) -> int:
    """Return a descriptor of a file, for a lock say, that is made with ``mode`` if it isn't there; raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, flags | os.O_EXCL, mode)
        give_to_owner_of(path.parent, handle)
        return handle
    return os.open(path, flags, mode)


def give_to_owner_of(folder: Path, handle: int) -> None:
    """Let what root made anew in a folder belong to whom the folder belongs to; what isn't root's alone stays as it is.

    A descriptor, for a name may stand for something else by now. Where the file system can't (one that knows no owners,
    or not this one), it stays root's.
    """
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        owner, made = folder.stat(), os.fstat(handle)
        if made.st_uid == 0 and (stat.S_ISDIR(made.st_mode) or made.st_nlink == 1):
            os.fchown(handle, owner.st_uid, owner.st_gid)
