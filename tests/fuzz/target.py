"""What is fuzzed: one decoder each."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.fuzz.mutation import Form


@dataclass(frozen=True)
class Target:
    """One decoder of what strangers, operators or disks bring.

    Attributes:
        seeds: inputs that are accepted, made by our own encoders.
        feed: decodes an input; returns what kind it was, if there are several.
        refusals: the documented errors. Any other is a finding.
        form: how inputs are taken apart; None: they are changed as bytes.
    """

    seeds: Callable[[], Sequence[bytes]]
    feed: Callable[[bytes], str | None]
    refusals: tuple[type[Exception], ...]
    form: Form | None = None


def seeds(make: Callable[[], Sequence[bytes]]) -> Callable[[], Sequence[bytes]]:
    """Make seeds once, when they are needed."""
    return cache(make)


@cache
def scratch() -> Path:
    """Return a folder of this process, in memory where there is one; it is gone with the process."""
    folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(folder.cleanup)
    return Path(folder.name)
