"""Folders of one process at a time, whether it runs a simulation or a demo."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replayfleet.federation.errors import SettingsError

LOCK = "lock"
"""What a claimed folder has, and keeps."""


@contextmanager
def claimed(folder: Path, option: str = "--out") -> Iterator[None]:
    """Keep other processes out of a folder as long as the block lasts, or until this process is killed.

    Two that ran there would remove each other's files.

    Args:
        folder: made if it isn't there.
        option: what names another.

    Raises:
        SettingsError: Another process runs there, or it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK).open("a")
    except OSError as error:
        raise SettingsError(f"{folder} can't be written ({error.strerror}); choose another {option}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{folder} is in use: another process runs there; wait for it, stop it, or choose another {option}"
            ) from None
        yield
