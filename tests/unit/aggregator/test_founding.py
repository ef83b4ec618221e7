from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.tiny_fleet import TinyExporter, tiny_spec

from replayfleet.aggregator.founding import graphs_of
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore


class CountingExporter(TinyExporter):
    """Exporting takes seconds of CPU; using what is there takes none."""

    def __init__(self) -> None:
        self.num_exports = 0
        self.used: Mapping[str, bytes] = {}

    def graphs(self) -> dict[str, bytes]:
        self.num_exports += 1
        return {"graph/task": b"a graph"}

    def use(self, graphs: Mapping[str, bytes]) -> None:
        self.used = graphs


def test_a_restart_exports_no_graph_but_a_damaged_one(tmp_path: Path) -> None:
    store, blobs = AggregatorStore(tmp_path), DiskBlobStore(tmp_path / "blobs")
    store.found(tiny_spec(), 0.0)
    first, again, damaged = CountingExporter(), CountingExporter(), CountingExporter()
    entries = graphs_of(store, blobs, first)
    assert graphs_of(store, DiskBlobStore(tmp_path / "blobs"), again) == entries
    assert (first.num_exports, again.num_exports, again.used) == (1, 0, {"graph/task": b"a graph"})
    blobs.path(entries[0].digest).write_bytes(b"else")
    assert graphs_of(store, DiskBlobStore(tmp_path / "blobs"), damaged) == entries
    assert damaged.num_exports == 1
    store.close()
