"""What a report says in numbers: everything is read from a finished demo's folder, nothing is made up.

"Everything" is what a fleet without a memory of what the other end holds would send: in every round each client's task
model and all its sub-generators up; its personalised model, the average model and all its sub-generators down. What was
not sent is counted at the size that the same kind of blob has on the wire.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replayfleet.aggregator.store import AggregatorStore, StoredArtefacts
from replayfleet.federation.errors import ArtefactRejected, ReplayfleetError
from replayfleet.federation.simulator.result import Result
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.scripts.demo.plan import BASELINE, MARKER
from replayfleet.scripts.demo.rivals import rivals
from replayfleet.scripts.launch.record import ClientRound, FleetRecord, Round, read_record


@dataclass(frozen=True, slots=True)
class BlobSizes:
    """Mean bytes of a task model and of a sub-generator as they travel."""

    task: float
    sub_generator: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the wire, beside what sending everything would have cost."""

    sent: float
    everything: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.everything + other.everything)

    @property
    def saved_share(self) -> float:
        """Share of everything that didn't travel."""
        return 1 - self.sent / self.everything if self.everything else 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """A finished demo."""

    record: FleetRecord  # the fleet, from the aggregator's journal
    baseline: Result  # FedAvg on the same stream, as the simulator wrote it
    sizes: BlobSizes
    demo: Mapping[str, Any]  # what the demo noted about itself: preset, seed, broker, command, duration

    @property
    def rivals(self) -> Mapping[str, Result]:
        """Other methods' runs on the same stream, at the same settings and seed; empty where there are none."""
        return rivals(self.baseline, str(self.record.spec["method"]))

    @property
    def gated(self) -> bool:
        """Whether only sub-generators that drifted are learned anew."""
        return bool(self.record.spec.get("settings", {}).get("gate", True))

    @property
    def rounds(self) -> list[Round]:
        """Committed rounds, in order."""
        return self.record.committed_rounds()

    @property
    def accuracy(self) -> list[float | None]:
        """Mean of what the clients serve after each round."""
        return [found.mean_accuracy for found in self.rounds]

    @property
    def baseline_accuracy(self) -> list[float]:
        """The same mean for FedAvg: all clients' test sets are equally large."""
        return [record.accuracy for record in self.baseline.rounds]

    @property
    def final(self) -> tuple[float, float]:
        """(fleet, FedAvg) after the last round.

        Raises:
            ReplayfleetError: The last round has no accuracy.
        """
        last = self.accuracy[-1] if self.accuracy else None
        if last is None:
            raise ReplayfleetError("the run has no accuracy for its last round, so there is nothing to report")
        return last, self.baseline_accuracy[-1]

    def up(self, found: Round) -> Traffic:
        """All uploads of a round."""
        total = Traffic(0, 0)
        for client in _uploaded(found):
            sent, unsent = client.bytes_up or 0, max(0, (client.held or 0) - (client.sent or 0))
            total += Traffic(sent, sent + unsent * self.sizes.sub_generator)
        return total

    def down(self, found: Round) -> Traffic:
        """What all clients received after a round."""
        total = Traffic(0, 0)
        for client in _uploaded(found):
            everything = 2 * self.sizes.task + (client.held or 0) * self.sizes.sub_generator
            total += Traffic(client.bytes_down or 0, everything)
        return total

    def traffic(self) -> Traffic:
        """Both directions, all rounds."""
        total = Traffic(0, 0)
        for found in self.rounds:
            total += self.up(found) + self.down(found)
        return total

    def sub_generators(self) -> tuple[int, int]:
        """(sent, held), summed over clients and rounds."""
        return sum(found.total("sent") for found in self.rounds), sum(found.total("held") for found in self.rounds)

    def revisits(self) -> dict[int, list[ClientRound]]:
        """Rounds in which clients met only classes that they knew, and what those clients did."""
        found = {r.index: [c for c in r.clients.values() if c.known_before] for r in self.rounds}
        return {index: clients for index, clients in found.items() if clients}

    @property
    def num_frames(self) -> int:
        """Frames answered while the fleet learned."""
        newest: dict[str, int] = {}
        for found in self.rounds:
            newest |= {name: client.frames for name, client in found.clients.items() if client.frames is not None}
        return sum(newest.values())

    def slowest(self, name: str) -> float | None:
        """The largest of a duration over all clients and rounds."""
        values = [getattr(client, name) for found in self.rounds for client in found.clients.values()]
        return max((value for value in values if value is not None), default=None)


def _uploaded(found: Round) -> list[ClientRound]:
    return [client for client in found.clients.values() if client.bytes_up is not None]


def read_facts(out: Path) -> Facts:
    """Read a finished demo.

    Raises:
        ReplayfleetError: A part of it is missing or damaged; says which.
    """
    record = read_record(out / "aggregator")
    path = out / BASELINE / "result.json"
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Result)
        demo = json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayfleetError(f"{out} is no finished demo: {error}") from error
    state, blobs = stored_state(out / "aggregator")
    return Facts(record, baseline, _sizes(state, blobs), demo)


def stored_state(aggregator_dir: Path) -> tuple[StoredArtefacts, DiskBlobStore]:
    """Return what the aggregator knew at the end, by reference, and the store that holds it.

    Raises:
        ReplayfleetError: There is no such state.
    """
    try:
        with contextlib.closing(AggregatorStore(aggregator_dir, read_only=True)) as store:
            state = store.state()
    except sqlite3.Error as error:
        raise ReplayfleetError(f"{aggregator_dir}: its database can't be read ({error})") from error
    if state is None:
        raise ReplayfleetError(f"{aggregator_dir} holds no finished round of a fleet; run the demo first")
    return state, DiskBlobStore(aggregator_dir / "blobs")


def _sizes(state: StoredArtefacts, blobs: DiskBlobStore) -> BlobSizes:
    sizes: dict[bool, list[int]] = {False: [], True: []}
    try:
        for entry in state.blobs:
            sizes["/sub-generator/" in entry.name].append(blobs.encoded(entry.digest).size_bytes)
    except (KeyError, ArtefactRejected) as error:
        raise ReplayfleetError(f"the aggregator's store lacks blob {entry.digest[:12]} ({error})") from error
    task, sub_generator = (sum(found) / len(found) if found else 0.0 for found in sizes.values())
    return BlobSizes(task, sub_generator)
