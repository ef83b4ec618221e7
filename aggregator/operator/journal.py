"""``events.jsonl``: what happened in the fleet, one JSON object a line; the live table and the report read it.

A statistic, not a store: losing its last line in a crash loses no upload. Kinds and fields: ``docs/architecture.md``.
A full file becomes ``events.jsonl.1``, in place of the one before. What a client can bring about as often as it likes
is written a few times; ``more of these`` says how often it happened besides.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.paths import open_regular
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.quotas import Limiter

JOURNAL = "events.jsonl"
MAX_BYTES = 64 << 20
"""Of one file. A round with 10 clients takes about 10 kB."""

Listener = Callable[[str, Mapping[str, Any]], object]
"""Told an event's kind and its fields."""

_log = EventLogger("aggregator")
_WARNINGS = frozenset(
    {
        "client muted",
        "upload rejected",
        "upload quarantined",
        "upload lost",
        "former model kept",
        "model not rounded",
        "round extended",
        "transfer failed",
        "download failed",
        "download refused",
        "client ahead",
        "client refused",
        "other device",
        "other aggregator",
        "broker refuses",
        "standing by",
    }
)

_AT_WILL = frozenset(
    {
        "client online",
        "client gone",
        "client ahead",
        "client refused",
        "other device",
        "other aggregator",
        "upload rejected",
        "transfer failed",
        "download failed",
        "download refused",
        "model rolled back",
    }
)
_LINES_PER_S = 1 / 60
"""Less often than the heartbeats with which a wrongly set up device repeats itself."""
_LINES_AT_ONCE = 10
_TOLD_EVERY_S = 60.0
_PIECE_BYTES = 1 << 16


class Journal:
    """Appends events to ``<folder>/events.jsonl`` and tells the log about them.

    Args:
        folder: a claimed data dir.
        refused: told what the disk says to an event that it doesn't take; the event is in the log only then.
        wall_clock: seconds since 1970.
        max_bytes: of one file.
        listeners: told every event, also those that are left out.

    Raises:
        SettingsError: Something else is in its place, or another user's file.
    """

    def __init__(
        self,
        folder: Path,
        refused: Callable[[OSError], object] = lambda error: None,
        wall_clock: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._folder = folder
        self._refused = refused
        self._wall_clock = wall_clock
        self._max_bytes = max_bytes
        self._listeners = listeners
        self._limiter = Limiter(_LINES_PER_S, _LINES_AT_ONCE, told_every_s=_TOLD_EVERY_S)
        self._size, self._torn = 0, False
        try:
            if (folder / JOURNAL).is_fifo():
                raise OSError(errno.ESPIPE, "it is no file")
            self._open()
        except OSError as error:
            if error.errno not in {errno.EISDIR, errno.EACCES, errno.ENOENT, errno.ELOOP, errno.ESPIPE}:
                raise
            path = folder / JOURNAL
            raise SettingsError(f"{path}: {error.strerror}; move it away, and the journal begins anew") from error

    def add(self, event: str, *, details: dict[str, Any] | None = None, **fields: Any) -> None:
        """Append one event.

        Args:
            event: its kind, for example ``round opened``.
            details: fields too long for the log line; they go to the file only.
            fields: JSON values.
        """
        for listener in self._listeners:
            listener(event, {**fields, **(details or {})})
        now = self._wall_clock()
        for key, count in self._limiter.left_out(now):
            kind, client = cast(tuple[str, str], key)
            self._write(now, "more of these", {"of": kind, "client": client, "count": count})
        if event in _AT_WILL and not self._limiter.admit((event, str(fields.get("client", ""))), now):
            return
        self._write(now, event, fields, details or {})

    def _write(
        self, now: float, event: str, fields: Mapping[str, Any], details: Mapping[str, Any] | None = None
    ) -> None:
        entry = {"time": round(now, 3), "event": event, **fields, **(details or {})}
        line = b"\n" * self._torn + json.dumps(entry, default=str).encode() + b"\n"
        try:
            if self._size + len(line) > self._max_bytes and self._size:
                before, path = self._file, self._folder / JOURNAL
                with contextlib.suppress(FileNotFoundError):  # somebody took it away
                    path.replace(rotated(path))
                self._open()  # where that fails the one before takes what still fits, and the next line tries again
                before.close()
            written = self._file.write(line) or 0
            self._torn, self._size = written != len(line), self._size + written
        except OSError as error:
            self._refused(error)
        (_log.warning if event in _WARNINGS else _log.info)(event, **fields)

    def _open(self) -> None:
        # Unbuffered: what a full disk doesn't take is gone, and doesn't come up again later.
        self._file = (self._folder / JOURNAL).open("a+b", buffering=0)
        self._size = self._file.seek(0, 2)
        self._file.seek(max(0, self._size - 1))
        self._torn = self._file.read(1) not in {b"\n", b""}

    def numbers(self, event: str, field: str) -> set[int]:
        """Return what a field of events of this kind was, where it is a number; reads all of it."""
        found = (entry.get(field) for entry in read_journal(self._folder, event) if entry.get("event") == event)
        return {number for number in found if isinstance(number, int)}

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(folder: Path, word: str = "") -> Iterator[dict[str, Any]]:
    """Yield the events of ``folder`` whose lines hold a word, oldest first; lines torn by a crash are skipped.

    Raises:
        SettingsError: It can't be read.
    """
    for path in (rotated(folder / JOURNAL), folder / JOURNAL):
        if not path.exists():
            continue
        try:
            with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
                for line in file:
                    if word not in line:  # a full journal takes a second to read, and ten to decode
                        continue
                    try:
                        entry = json.loads(line)
                    except UNREADABLE:
                        continue
                    if isinstance(entry, dict):
                        yield entry
        except OSError as error:
            raise SettingsError(f"{path} can't be read ({error.strerror or error})") from error


def last_event(folder: Path) -> dict[str, Any]:
    """Return the newest event of ``folder``, empty if there is none; a full journal takes no longer than a new one.

    Raises:
        SettingsError: It can't be read.
    """
    for path in (folder / JOURNAL, rotated(folder / JOURNAL)):
        if not path.exists():
            continue
        try:
            with open_regular(path) as file:
                for line in _backwards(file):
                    with contextlib.suppress(*UNREADABLE):
                        entry = json.loads(line.decode(errors="replace"))
                        if isinstance(entry, dict):
                            return entry
        except OSError as error:
            raise SettingsError(f"{path} can't be read ({error.strerror or error})") from error
    return {}


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    begun, at = b"", file.seek(0, 2)
    while at:
        size = min(at, _PIECE_BYTES)
        at = file.seek(at - size)
        begun, *lines = (file.read(size) + begun).split(b"\n")
        yield from reversed(lines)
    yield begun


def rotated(path: Path) -> Path:
    """Return where the lines before those of a journal are."""
    return path.with_name(f"{path.name}.1")
