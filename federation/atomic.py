"""Files that are either the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace ``path`` with ``data``, durably: temporary file, fsync, rename, fsync of the folder.

    After a crash the file holds the old or the new bytes, never a mixture. The folder must exist.

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
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
