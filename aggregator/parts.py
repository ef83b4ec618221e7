"""What the aggregator's desks share; built once by the service, or by a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from replayfleet.aggregator.admission import Gate
from replayfleet.aggregator.aggregation import Aggregation
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
from replayfleet.federation.service.artefact_codec import Blobs
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.wire.protocol.messages import Announcement, FleetSpec, Manifest
from replayfleet.federation.wire.transport.courier import FleetCourier


class BlobStore(Blobs, Protocol):
    """A blob store that can forget."""

    def has(self, digest: str) -> bool:
        """Whether a blob is there."""

    def collect(self, keep: set[str]) -> int:
        """Delete every blob not in ``keep``; returns how many."""


class Arriving:
    """What clients are sending: its blobs must not be collected; those of what came to nothing are litter.

    Attributes:
        litter_bytes: of the blobs of uploads that were refused, replaced or broke off, since the last collection.
    """

    def __init__(self) -> None:
        self._sent: dict[str, Manifest] = {}
        self.litter_bytes = 0

    def begin(self, peer: str, manifest: Manifest) -> None:
        """A client sends this, and nothing else any more."""
        if self._sent.get(peer) != manifest:
            self.let_go(peer)
            self._sent[peer] = manifest

    def keep(self, peer: str) -> None:
        """What a client sent is stored: a round has it."""
        self._sent.pop(peer, None)

    def let_go(self, peer: str) -> None:
        """What a client sent, or a part of it, comes to nothing."""
        manifest = self._sent.pop(peer, None)
        self.litter_bytes += 0 if manifest is None else sum(entry.size_bytes for entry in manifest.blobs)

    def clear(self) -> None:
        """Whatever comes is for somebody else."""
        self._sent.clear()

    def digests(self) -> set[str]:
        """Of all blobs that are on their way."""
        return {entry.digest for manifest in self._sent.values() for entry in manifest.blobs}


@dataclass(frozen=True)
class Parts:
    """The collaborators of one running aggregator.

    Attributes:
        leadership: whether this aggregator leads; its instance names this process.
        wall_clock: seconds since 1970, for what people read; decisions use the loop's own clock.
        arriving: what each client is sending.
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
    arriving: Arriving = field(default_factory=Arriving)
