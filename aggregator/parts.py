"""What the aggregator's desks share; built once by the service, or by a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from replayfleet.aggregator.admission import Gate
from replayfleet.aggregator.aggregation import Aggregation, Blobs
from replayfleet.aggregator.leading import Leadership
from replayfleet.aggregator.operator.journal import Journal
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.aggregator.precision.wishes import Wishes
from replayfleet.aggregator.presence import PresenceTable
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.steps import Checkpoint, no_checkpoint
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.aggregator.trust.key_ring import KeyRing
from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.methods.kit.records import Method
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.wire.protocol.messages import Announcement, FleetSpec, Manifest
from replayfleet.federation.wire.transport.courier import FleetCourier


class BlobStore(Blobs, Protocol):
    """A blob store that can forget."""

    def collect(self, keep: set[str]) -> int:
        """Delete every blob not in ``keep``; returns how many."""


@dataclass(frozen=True)
class Parts:
    """The collaborators of one running aggregator.

    Attributes:
        leadership: whether this aggregator leads; its instance names this process.
        wall_clock: seconds since 1970, for what people read; decisions use the loop's own clock.
        receiving: what each client is sending; its blobs must not be collected.
    """

    spec: FleetSpec
    rules: RoundRules
    method: Method
    gate: Gate
    store: AggregatorStore
    blobs: BlobStore
    disk: Disk
    courier: FleetCourier
    aggregation: Aggregation
    jobs: Jobs
    journal: Journal
    metrics: Metrics
    presence: PresenceTable
    wishes: Wishes
    announce: Callable[[Announcement], None]
    leadership: Leadership
    releases: Releases
    ring: KeyRing
    wall_clock: Callable[[], float]
    checkpoint: Checkpoint = no_checkpoint
    receiving: dict[str, Manifest] = field(default_factory=dict)
