"""What the aggregator's desks share; built once by the service, or by a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from aggregator.admission import Gate
from aggregator.aggregation import Aggregation, Blobs
from aggregator.journal import Journal
from aggregator.metrics import Metrics
from aggregator.presence import PresenceTable
from aggregator.rounds import RoundRules
from aggregator.steps import Checkpoint, no_checkpoint
from aggregator.store import AggregatorStore
from federation.methods.records import Method
from federation.protocol.messages import Announcement, FleetSpec, Manifest
from federation.transport.interfaces import Courier


class BlobStore(Blobs, Protocol):
    """A blob store that can forget."""

    def collect(self, keep: set[str]) -> int:
        """Delete every blob not in ``keep``; returns how many."""


class Jobs(Protocol):
    """Runs work one by one off the loop's thread, and hands the outcome to ``Coordinator.on_outcome``."""

    def submit(self, name: str, work: Callable[[], object]) -> None:
        """Run ``work`` after everything submitted before."""

    @property
    def idle(self) -> bool:
        """Whether nothing is running, waiting, or done but not handed over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        name: as submitted.
        result: what it returned; None if it failed.
        error: what it raised.
    """

    name: str
    result: object = None
    error: Exception | None = None


@dataclass(frozen=True)
class Parts:
    """The collaborators of one running aggregator.

    Attributes:
        wall_clock: seconds since 1970, for what people read; decisions use the loop's own clock.
        receiving: what each client is sending; its blobs must not be collected.
    """

    spec: FleetSpec
    rules: RoundRules
    method: Method
    gate: Gate
    store: AggregatorStore
    blobs: BlobStore
    courier: Courier
    aggregation: Aggregation
    jobs: Jobs
    journal: Journal
    metrics: Metrics
    presence: PresenceTable
    announce: Callable[[Announcement], None]
    epoch: str
    wall_clock: Callable[[], float]
    checkpoint: Checkpoint = no_checkpoint
    receiving: dict[str, Manifest] = field(default_factory=dict)
