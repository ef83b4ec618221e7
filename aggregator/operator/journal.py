"""``events.jsonl``: what happened in the fleet, one JSON object a line; the live table and the report read it.

A statistic, not a store: losing its last line in a crash loses no upload. Kinds and fields: ``docs/architecture.md``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from replayfleet.federation.errors import UNREADABLE
from replayfleet.federation.service.logs import EventLogger

JOURNAL = "events.jsonl"

_log = EventLogger("aggregator")
_WARNINGS = frozenset(
    {
        "upload rejected",
        "upload quarantined",
        "former model kept",
        "round extended",
        "transfer failed",
        "download failed",
        "download refused",
        "client ahead",
    }
)


class Journal:
    """Appends events to ``<folder>/events.jsonl`` and tells the log about them.

    Args:
        folder: a claimed data dir.
        refused: told what the disk says to an event that it doesn't take; the event is in the log only then.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        refused: Callable[[OSError], object] = lambda error: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        path = folder / JOURNAL
        self._torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        # Unbuffered: what a full disk doesn't take is gone, and doesn't come up again later.
        self._file = path.open("ab", buffering=0)
        self._folder = folder
        self._refused = refused
        self._wall_clock = wall_clock

    def add(self, event: str, *, details: dict[str, Any] | None = None, **fields: Any) -> None:
        """Append one event.

        Args:
            event: its kind, for example ``round opened``.
            details: fields too long for the log line; they go to the file only.
            fields: JSON values.
        """
        entry = {"time": round(self._wall_clock(), 3), "event": event, **fields, **(details or {})}
        line = b"\n" * self._torn + json.dumps(entry, default=str).encode() + b"\n"
        try:
            self._torn = self._file.write(line) != len(line)
        except OSError as error:
            self._refused(error)
        (_log.warning if event in _WARNINGS else _log.info)(event, **fields)

    def has(self, event: str, round_index: int) -> bool:
        """Whether an event of this kind and round was ever noted."""
        return any(e.get("event") == event and e.get("round") == round_index for e in read_journal(self._folder))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def read_journal(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of ``folder``, oldest first; lines torn by a crash are skipped."""
    path = folder / JOURNAL
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except UNREADABLE:
                continue
            if isinstance(entry, dict):
                yield entry
