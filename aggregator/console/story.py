"""What the journal tells of a fleet so far: rounds, what clients reported, the newest events. Bounded in memory."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from replayfleet.aggregator.operator.journal import JOURNAL, rotated
from replayfleet.federation.errors import UNREADABLE

MAX_EVENTS = 20_000
"""The newest ones, which the journal's page searches; older ones stay in the file."""
MAX_REPORTS = 120
"""Of one client, and rounds of the fleet: what charts show."""
MAX_CLIENTS = 2000
"""Clients that a history is kept of; ids that somebody made up after that leave none."""
TROUBLES = frozenset({
    "upload rejected", "upload quarantined", "former model kept", "download refused", "download failed",
    "transfer failed", "model rolled back", "client ahead", "client muted", "other device",
})  # fmt: skip
"""Events that say that something went wrong with one client."""
_MAX_LINE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_BEGINS_BYTES = 64
"""Of a journal's first line, which says when it was written, to the millisecond."""

Event = Mapping[str, Any]


@dataclass(slots=True)
class ClientStory:
    """What one client did and said.

    Attributes:
        reports: (round, metrics) of the newest ones, oldest first.
        troubles: how often which went wrong, by (event, reason).
        last_trouble: the newest of them.
        replay: (round, counts) of its newest upload's facts.
        online: whether the journal saw it come, and not go since.
        seen_at: Unix time of the newest event about it that no operator made; None without one.
    """

    reports: deque[tuple[int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    troubles: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_trouble: Event | None = None
    replay: tuple[int, Mapping[str, int]] | None = None
    device: str = ""
    provider: str = ""
    online: bool = False
    seen_at: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0

    def newest(self, name: str) -> float | None:
        """The newest value of one metric."""
        return next((metrics[name] for _, metrics in reversed(self.reports) if name in metrics), None)

    @property
    def measure(self) -> str:
        """What it reports of its held-out samples: ``accuracy``, or of a detector ``boxes_found``."""
        return "accuracy" if self.newest("boxes_found") is None else "boxes_found"


@dataclass(slots=True)
class RoundStory:
    """What is known of one round; None where the journal doesn't say."""

    index: int
    num_extended: int = 0
    closed_at: float | None = None
    closed_by: str | None = None
    uploads: int | None = None
    expected: int | None = None
    open_s: float | None = None
    aggregate_s: float | None = None
    publish_s: float | None = None
    round_s: float | None = None
    accepted: dict[str, float] = field(default_factory=dict)
    """Client -> Unix time of its upload."""


class Story:
    """Follows ``events.jsonl`` of a data dir, also over its rotation; one thread at a time.

    Args:
        folder: of a running or finished aggregator.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._read_as = self._aside = (0, b"")
        self._offset = 0
        self._begun = b""
        self.clients: defaultdict[str, ClientStory] = defaultdict(ClientStory)
        self.rounds: dict[int, RoundStory] = {}
        self.weights: Mapping[str, Mapping[str, float]] = {}
        self.weights_round: int | None = None
        self.started: Event = {}
        self.kinds: set[str] = set()
        self.num_read = 0
        self._lines: deque[bytes] = deque(maxlen=MAX_EVENTS)

    def follow(self) -> bool:
        """Take what was written since the last call; True if there was anything."""
        before = self.num_read
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if not self._goes_on(file):
                self._read_aside()
            self._read(file)
        return self.num_read != before

    def _read_aside(self) -> None:
        """Take the rest of what was put aside meanwhile, or if that was twice all of it."""
        with contextlib.suppress(FileNotFoundError), rotated(self._path).open("rb") as file:
            known = _known_by(file)
            if known != self._aside:  # else somebody took away what came after it
                self._read(file)
                self._aside = known

    def search(
        self, text: str = "", *, client: str = "", kind: str = "", only: Callable[[Event], bool] | None = None,
        limit: int = 200, before: int | None = None,
    ) -> tuple[list[tuple[int, Event]], bool]:  # fmt: skip
        """Return the newest events that hold all of the words, newest first, and whether there are more.

        Args:
            text: words, in any order; upper and lower case are equal.
            client: only events about it.
            kind: only events of this kind.
            only: what else an event has to be.
            limit: at most so many.
            before: only events with lower numbers.

        Returns:
            (number, event); numbers count from the first event that was read.
        """
        words = [json.dumps(word, ensure_ascii=False)[1:-1].encode() for word in text.lower().split()]
        found: list[tuple[int, Event]] = []
        quoted = json.dumps(client).encode()
        for back, line in enumerate(reversed(self._lines), 1):
            number = self.num_read - back
            if (before is not None and number >= before) or (client and quoted not in line):
                continue
            if words:
                lower = line.lower()
                if b"\\u" in lower and not text.isascii():  # two escapes that are one letter in either case
                    lower = json.dumps(json.loads(line), ensure_ascii=False).lower().encode(errors="replace")
                if any(word not in lower for word in words):
                    continue
            event = json.loads(line)
            if client not in ("", event.get("client")) or kind not in ("", event.get("event")):
                continue
            if only is not None and not only(event):
                continue
            if len(found) == limit:
                return found, True
            found.append((number, event))
        return found, False

    @property
    def oldest(self) -> int:
        """The number of the oldest event that can be searched."""
        return self.num_read - len(self._lines)

    def _read(self, file: BinaryIO) -> None:
        if not self._goes_on(file):
            self._offset, self._begun = 0, b""
        self._read_as = _known_by(file)
        file.seek(self._offset)
        while piece := file.read(_PIECE_BYTES):  # a full journal at once would take three times its size
            self._take(piece)
            self._offset = file.tell()

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether this is the file that was read last."""
        number, begins = _known_by(file)
        return number == self._read_as[0] and begins.startswith(self._read_as[1])

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._begun + data).split(b"\n")
        self._begun = rest if len(rest) <= _MAX_LINE_BYTES else b""
        for line in lines:
            try:
                event = json.loads(line)
            except UNREADABLE:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                self.num_read += 1
                self.kinds.add(event["event"])
                with contextlib.suppress(OverflowError):  # a whole number of 400 digits, which none of ours writes
                    self._tell(event)
                heavy = event.keys() & {"weights", "facts", "metrics", "spec", "counters"}
                slim = {key: value for key, value in event.items() if key not in heavy}
                self._lines.append(json.dumps(slim, default=str).encode() if heavy else line)

    def _tell(self, event: Event) -> None:
        client, index = event.get("client"), event.get("round")
        if isinstance(client, str) and client and (client in self.clients or len(self.clients) < MAX_CLIENTS):
            story = self.clients[client]
            if event["event"] != "operator":  # it isn't the client that was heard
                story.seen_at = event.get("time")
            self._tell_of_client(story, event)
        if isinstance(index, int) and index >= 0:  # a journal of before may say -1
            self._tell_of_round(self._round(index), event)
        if event["event"] == "aggregator started":
            self.started = event
            for known in self.clients.values():
                known.online = False

    def _tell_of_client(self, story: ClientStory, event: Event) -> None:
        match event["event"]:
            case "client online":
                story.online = True
                story.device, story.provider = str(event.get("device", "")), str(event.get("provider", ""))
            case "client gone":
                story.online = False
            case "client report":
                told, index = event.get("metrics"), event.get("round")
                if isinstance(told, dict) and isinstance(index, int) and index >= 0:
                    metrics = {name: float(value) for name, value in told.items() if isinstance(value, (int, float))}
                    story.reports.append((index, metrics))
            case "upload accepted":
                story.bytes_up += _whole(event.get("bytes"))
                story.replay = _counts(event) or story.replay
            case "download confirmed":
                story.bytes_down += _whole(event.get("bytes"))
        if event["event"] in TROUBLES:
            story.troubles[event["event"], str(event.get("reason", ""))] += 1
            story.last_trouble = event

    def _round(self, index: int) -> RoundStory:
        if index not in self.rounds:
            self.rounds[index] = RoundStory(index)
            if len(self.rounds) > MAX_REPORTS:
                del self.rounds[min(self.rounds)]
        return self.rounds.get(index) or RoundStory(index)

    def _tell_of_round(self, story: RoundStory, event: Event) -> None:
        match event["event"]:
            case "round opened":
                story.expected = event.get("expected")
            case "round extended":
                story.num_extended += 1
            case "upload accepted":
                story.accepted[str(event.get("client"))] = event.get("time", 0.0)
            case "round closed":
                story.closed_by, story.open_s = event.get("by"), event.get("open_s")
                story.closed_at = event.get("time")
                story.uploads, story.expected = event.get("uploads"), event.get("expected")
            case "round committed":
                story.aggregate_s, story.publish_s = event.get("aggregate_s"), event.get("publish_s")
                story.round_s = event.get("round_s")
                if isinstance(event.get("weights"), dict):
                    self.weights, self.weights_round = event["weights"], story.index


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _counts(event: Event) -> tuple[int, Mapping[str, int]] | None:
    """Return the counts among an upload's facts; None if it has none."""
    facts, index = event.get("facts"), event.get("round")
    if not isinstance(facts, dict) or not isinstance(index, int):
        return None
    counts = {name: facts[name] for name in ("num_samples", "num_updates", "num_filled") if _whole(facts.get(name, ""))}
    counts |= {name: 0 for name in ("num_updates", "num_filled") if facts.get(name) == 0}
    if isinstance(facts.get("seen"), dict):
        counts["num_classes"] = len(facts["seen"])
    return (index, counts) if counts else None


def _known_by(file: BinaryIO) -> tuple[int, bytes]:
    """Return a file's inode and how it begins: once it is gone, its inode is another one's."""
    return os.fstat(file.fileno()).st_ino, os.pread(file.fileno(), _BEGINS_BYTES, 0)
