"""A file that a server of files has lent to another machine, until somebody asks for it."""

from __future__ import annotations

import contextlib
import fcntl
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def lent(path: Path) -> Iterator[None]:
    """Hold a lease on a file, and give it back when the kernel says that somebody wants to open it."""
    with path.open("r+b") as theirs:
        try:
            fcntl.fcntl(theirs, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("no leases on this file system")
        before = signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(theirs, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        try:
            yield
        finally:
            signal.signal(signal.SIGIO, before)
