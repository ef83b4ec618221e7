"""What a service serves, and how a run begins in a data dir or is taken up again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from replayfleet.aggregator.admission import Caps
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.publisher import Exporter, export_graphs
from replayfleet.aggregator.rounds import RoundRules
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.errors import ArtefactRejected, SettingsError
from replayfleet.federation.methods.kit.records import Method, Sampler
from replayfleet.federation.service.fleet.presets import MAX_CHANGE
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

_log = EventLogger("aggregator")


@dataclass(frozen=True)
class Fleet:
    """What a service serves.

    Attributes:
        spec: what all members agree on.
        method: built from it.
        sampler: draws from sub-generators.
        exporter: graphs and probes.
        rules: when rounds close.
        caps: what one upload may cost.
        max_change: how far a model may move in one round.
        claim: how this aggregator comes to lead it.
        torch_device: where the method computes.
    """

    spec: FleetSpec
    method: Method
    sampler: Sampler
    exporter: Exporter
    rules: RoundRules
    caps: Caps = field(default_factory=Caps)
    max_change: float = MAX_CHANGE
    claim: Claim = Claim.SOLE
    torch_device: str = "cpu"


def take_up(store: AggregatorStore, spec: FleetSpec) -> bool:
    """Begin a run in a new store (True), or check that it is the one that the store holds.

    Raises:
        SettingsError: The store's run has another spec.
    """
    before = store.spec()
    if before is None:
        store.found(spec, time.time())
        return True
    for name in spec.__struct_fields__:
        if _plain(getattr(before, name)) != _plain(getattr(spec, name)):
            store.close()
            raise SettingsError(
                f"data dir: its run has {name} {getattr(before, name)!r}, now {getattr(spec, name)!r} is asked for; "
                "use the same, or another --data-dir"
            )
    return False


def graphs_of(store: AggregatorStore, blobs: DiskBlobStore, exporter: Exporter) -> tuple[BlobEntry, ...]:
    """Return the entries of the fleet's graphs, exported at the first start.

    Raises:
        ArtefactRejected: The fleet's models can't be exported.
    """
    graphs = store.graphs()
    try:
        kept = {entry.name: blobs.read(entry.digest) for entry in graphs}
    except (KeyError, ArtefactRejected):
        kept = {}
    if kept:
        exporter.use(kept)
        return graphs
    _log.info("exporting graphs")
    graphs = export_graphs(blobs, exporter)
    store.set_graphs(graphs)
    return graphs


def _plain(value: object) -> bytes:
    """The same for what differs only in tuples and lists."""
    return msgspec.msgpack.encode(value, order="deterministic")
