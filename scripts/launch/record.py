"""What happened in a fleet, from the aggregator's journal: the live table and the report show the same record.

The report that a client sends for the download of round r measures what rounds 0 to r - 1 taught it, so its numbers
belong to round r - 1 here; those for round 0 come before any training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.words import visible

JOURNAL = "events.jsonl"
_STREAM = "stream_accuracy"


@dataclass(slots=True)
class ClientRound:
    """One client in one round; None is "not known yet". Bytes are those on the wire."""

    classes: tuple[int, ...] = ()  # class ids of its round data
    known_before: bool = False  # it had met all of these classes in earlier rounds
    sent: int | None = None  # sub-generators that went up
    held: int | None = None  # sub-generators that it has
    bytes_up: int | None = None
    bytes_down: int | None = None  # of the download that answers it, its copy of what all clients share included
    accuracy: float | None = None  # of what it serves afterwards, on its test data so far; a detector's: boxes found
    num_test: int | None = None  # size of these data
    stream_accuracy: float | None = None  # the same measure on what came meanwhile, before it was learned
    num_stream: int = 0  # objects that this share is of
    place_accuracy: dict[str, float] = field(default_factory=dict)  # the same by place, for example by town
    swap_s: float | None = None  # loading, probing and swapping the model that came back
    served: str = ""  # which of its models it chose to serve; empty where it serves what it downloads
    frames: int | None = None  # answered so far


@dataclass(slots=True)
class Round:
    """One round of the fleet."""

    index: int
    expected: int  # uploads that close it at once
    is_committed: bool = False  # its result is durable
    round_s: float | None = None  # from opening to commit
    weights: dict[str, dict[str, float]] = field(default_factory=dict)  # client -> client -> share in its model
    clients: dict[str, ClientRound] = field(default_factory=dict)

    @property
    def num_uploads(self) -> int:
        """Uploads accepted so far."""
        return sum(client.bytes_up is not None for client in self.clients.values())

    @property
    def mean_accuracy(self) -> float | None:
        """Mean over the clients of what they serve; None until every expected client has told."""
        found = [client.accuracy for client in self.clients.values() if client.accuracy is not None]
        return sum(found) / len(found) if found and len(found) >= self.expected else None

    def total(self, name: str) -> int:
        """Sum of a count over the clients that have it."""
        return sum(getattr(client, name) or 0 for client in self.clients.values())


@dataclass(slots=True)
class Client:
    """One client now."""

    state: str = "starting"  # a few words for the live table
    round: int | None = None  # that it works on; None before the first and after the last
    version: int = 0  # of the model that it serves; 0 before the first
    first_bytes: int = 0  # what it received before round 0: graphs and the first model
    seen: dict[int, int] = field(default_factory=dict)  # class id -> samples met so far


class FleetRecord:
    """Takes journal events one by one; unknown kinds are passed over.

    Attributes:
        spec: the fleet's: method, settings, task, run seed.
        stores_data: its method keeps real samples on the clients.
        num_rounds: how many were asked for; 0 before the aggregator has begun.
        rounds: round index -> round.
        clients: client id -> client, in the order in which they came.
        started_at: seconds since the epoch, of the first event.
        ended_at: of the newest event.
        finished: all rounds are done.
        troubles: uploads and downloads that were refused or failed, as sentences.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.spec: dict[str, Any] = {}
        self.stores_data = False
        self.num_rounds = 0
        self.rounds: dict[int, Round] = {}
        self.clients: dict[str, Client] = {}
        self.started_at = 0.0
        self.ended_at = 0.0
        self.finished = False
        self.troubles: list[str] = []
        self._expected = 0
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event: ``round opened`` is for ``_round_opened``."""
        at = float(event.get("time", 0.0))
        self.started_at = self.started_at or at
        self.ended_at = max(self.ended_at, at)
        take = getattr(self, f"_{str(event.get('event')).replace(' ', '_')}", None)
        if take is not None:
            take(event)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the fleet's task."""
        return tuple(self.spec.get("task", {}).get("class_names", ()))

    @property
    def measure(self) -> str:
        """What ``accuracy`` is of this fleet, in words."""
        return "boxes found" if self.spec.get("task", {}).get("kind") == "detection" else "accuracy"

    @property
    def current(self) -> Round | None:
        """The newest round."""
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def names(self) -> list[str]:
        """Client ids, sorted."""
        return sorted(self.clients)

    def committed_rounds(self) -> list[Round]:
        """Rounds with a result, in order."""
        return [self.rounds[index] for index in sorted(self.rounds) if self.rounds[index].is_committed]

    def _client(self, event: Mapping[str, Any]) -> Client:
        return self.clients.setdefault(str(event["client"]), Client())

    def _round(self, index: int) -> Round:
        return self.rounds.setdefault(index, Round(index, self._expected))

    def _client_round(self, event: Mapping[str, Any], index: int) -> ClientRound:
        return self._round(index).clients.setdefault(str(event["client"]), ClientRound())

    def _aggregator_started(self, event: Mapping[str, Any]) -> None:
        self.spec = dict(event.get("spec") or {})
        self.stores_data = bool(event.get("stores_data"))
        self.num_rounds = int(event.get("num_rounds") or 0)
        self._expected = int(event.get("clients", 0))

    def _round_opened(self, event: Mapping[str, Any]) -> None:
        opened = self._round(int(event["round"]))
        opened.expected = int(event.get("expected", opened.expected))

    def _client_online(self, event: Mapping[str, Any]) -> None:
        self._client(event).state = "online"

    def _client_gone(self, event: Mapping[str, Any]) -> None:
        self._client(event).state = "done" if self.finished else f"gone ({event.get('reason', '')})"

    def _upload_accepted(self, event: Mapping[str, Any]) -> None:
        client, found = self._client(event), self._client_round(event, int(event["round"]))
        client.state, client.round = "uploaded", int(event["round"])
        found.bytes_up = int(event.get("bytes", 0))
        found.sent = int(event.get("sub_generators", 0))
        facts = event.get("facts") or {}
        seen = {int(class_id): int(count) for class_id, count in (facts.get("seen") or {}).items()}
        found.classes = tuple(c for c in sorted(seen) if seen[c] > client.seen.get(c, 0))
        found.known_before = bool(found.classes) and all(c in client.seen for c in found.classes)
        found.held = len(seen)
        client.seen = seen

    def _upload_rejected(self, event: Mapping[str, Any]) -> None:
        reason = event.get("detail") or event.get("reason") or "no reason given"
        self.troubles.append(
            visible(f"round {event.get('round')}, {event.get('client')}: {event.get('event')} ({reason})")
        )
        self._client(event).state = str(event["event"])

    _download_refused = _download_failed = _upload_rejected

    def _round_closed(self, event: Mapping[str, Any]) -> None:
        for client in self.clients.values():
            if client.state == "uploaded":
                client.state = "waiting"

    def _round_committed(self, event: Mapping[str, Any]) -> None:
        found = self._round(int(event["round"]))
        found.is_committed = True
        found.weights = {who: dict(shares) for who, shares in (event.get("weights") or {}).items()}
        found.round_s = event.get("round_s")

    def _client_report(self, event: Mapping[str, Any]) -> None:
        client, metrics = self._client(event), event.get("metrics") or {}
        client.version = int(event.get("version", 0))
        received = int(metrics.get("bytes_down", 0))
        index = int(event["round"]) - 1
        is_last = bool(self.num_rounds) and index + 1 >= self.num_rounds
        client.state, client.round = ("done", None) if is_last else ("training", index + 1)
        if index < 0:
            client.first_bytes += received
            return
        found = self._client_round(event, index)
        found.bytes_down = received
        found.accuracy = metrics.get("accuracy", metrics.get("boxes_found"))
        found.stream_accuracy = metrics.get(_STREAM)
        found.num_stream = int(metrics.get("num_stream", 0))
        begin = f"{_STREAM}/"
        found.place_accuracy = {name[len(begin) :]: share for name, share in metrics.items() if name.startswith(begin)}
        found.num_test = int(metrics.get("num_test", 0))
        found.swap_s = metrics.get("swap_s")
        found.served = next((name.partition("/")[2] for name in metrics if name.startswith("served/")), "")
        found.frames = int(metrics.get("frames", 0))
        found.held = int(metrics.get("sub_generators_held", found.held or 0))

    def _run_finished(self, event: Mapping[str, Any]) -> None:
        self.finished = True


def read_record(data_dir: Path) -> FleetRecord:
    """Return what happened in the fleet of an aggregator's data dir.

    Raises:
        ReplayfleetError: No round of it was finished.
    """
    record = FleetRecord(JournalTail(data_dir / JOURNAL).new_events())
    if not record.committed_rounds():
        raise ReplayfleetError(f"{data_dir} holds no finished round of a fleet; run the demo first")
    return record


class JournalTail:
    """Reads what was appended to a journal since the last look; a line still being written waits.

    A journal that is full is put aside as ``<name>.1`` and begun again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1  # inode of what was read
        self._offset = 0

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events of all lines completed since the last call."""
        data = b""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._file:
                    data = self._put_aside()
                    self._file, self._offset = inode, 0
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        complete = data + complete
        events = []
        for line in complete.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                events.append(event)
        return events

    def _put_aside(self) -> bytes:
        """What stood in the file before after the place that was read, or all of it."""
        try:
            with self._path.with_name(f"{self._path.name}.1").open("rb") as file:
                file.seek(self._offset if os.fstat(file.fileno()).st_ino == self._file else 0)
                return file.read()
        except FileNotFoundError:
            return b""
