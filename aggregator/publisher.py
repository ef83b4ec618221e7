"""Downloads as manifests: every blob that a client should hold, which one it serves, and how to prove it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from replayfleet.federation.errors import ArtefactRejected, ReplayfleetError, is_out_of_memory
from replayfleet.federation.methods.kit.packing import served_name
from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.methods.kit.travel import Rounded
from replayfleet.federation.service.artefact_codec import BlobWriter, EncodedOnce, decode_parameters
from replayfleet.federation.wire.protocol.facts import encode_facts
from replayfleet.federation.wire.protocol.messages import TASK_GRAPH, BlobEntry, Manifest, Probe, Serving
from replayfleet.federation.wire.protocol.tensors import digest

SUB_GENERATOR_GRAPH = "graph/sub-generator"


class Blobs(BlobWriter, Protocol):
    """What publishing needs of a blob store."""

    def read(self, digest: str) -> bytes:
        """Return the verified bytes."""

    def pack(self, digest: str, base: str, steps: Mapping[str, float]) -> None:
        """Keep a blob as its difference from another, in whole steps."""


class Exporter(Protocol):
    """What publishing needs to know about serving; ``aggregator.serving`` has the one for ONNX."""

    def graphs(self) -> Mapping[str, bytes]:
        """Blob name -> graph without parameters; the same bytes for the same task."""

    def use(self, graphs: Mapping[str, bytes]) -> None:
        """Take graphs that were exported before: probe with these."""

    def probe(self, parameters: Parameters) -> Probe:
        """The golden vector of a task model.

        Raises:
            ArtefactRejected: The exported model differs from the trained one, so nobody may serve it.
        """


class Publisher:
    """Turns a method's downloads into manifests; blobs go to the store, versions are the database's.

    Args:
        fleet: fleet name.
        blobs: where blobs go.
        exporter: graphs and probes.
        graphs: the graphs' entries, already in ``blobs``.
    """

    def __init__(self, fleet: str, blobs: Blobs, exporter: Exporter, graphs: tuple[BlobEntry, ...]) -> None:
        self._fleet = fleet
        self._blobs = blobs
        self._exporter = exporter
        self._graphs = graphs

    def rehearsing(self) -> Publisher:
        """Return one that refuses what this one does, and stores nothing."""
        return Publisher(self._fleet, _Nowhere(self._blobs), self._exporter, self._graphs)

    def drafts(
        self,
        downloads: Mapping[str, Any],
        round_index: int,
        former: Mapping[str, Manifest] | None = None,
        kept: dict[str, str] | None = None,
        rounded: Sequence[Rounded] = (),
        once: EncodedOnce | None = None,
    ) -> dict[str, Manifest]:
        """Return a manifest for each client, still without a version; blobs that all of several get are shared.

        Args:
            downloads: client -> download.
            round_index: the round that they are for.
            former: what clients serve now; one whose own new model can't be served goes on with that.
            kept: is told who does, and why.
            rounded: what of the downloads was rounded, so that it may travel as a difference.
            once: knows which sets are on disk already; None for none.

        Raises:
            ArtefactRejected: A task model can't be served, and isn't one client's alone or there is no former one.
        """
        written = _Written(once or EncodedOnce(self._blobs), self._exporter)
        drafts = {}
        for client in sorted(downloads):
            draft = functools.partial(self._draft, client, downloads[client], round_index, written)
            try:
                drafts[client] = draft()
            except ArtefactRejected as error:
                instead = self._former(former, client)
                if instead is None or _is_shared(downloads, client) or is_out_of_memory(error):
                    raise
                drafts[client] = draft(instead)
                if kept is not None:
                    kept[client] = f"its new model can't be served, the former one stays: {error}"
        for one in rounded:
            if one.base is not None:
                entry, base = (written.entry("", parameters) for parameters in (one.parameters, one.base))
                self._blobs.pack(entry.digest, base.digest, one.steps)
        return _with_shared_marked(drafts)

    def _draft(
        self,
        client_id: str,
        download: Any,
        round_index: int,
        written: _Written,
        instead: _Former | None = None,
    ) -> Manifest:
        packed = download.pack()
        entries = {name: written.entry(name, packed.parameter_sets[name]) for name in sorted(packed.parameter_sets)}
        served = served_name(type(download))
        if instead is not None and served is not None:
            entries[served] = instead.entry
        if served is None or served not in entries:
            raise ReplayfleetError(f"the download serves {served}, which isn't one of its sets ({', '.join(entries)})")
        blobs = (*self._graphs, *entries.values())
        names = [entry.name for entry in blobs]
        if len(set(names)) != len(names):
            raise ReplayfleetError(f"a parameter set of the download is named like a graph: {names}")
        serving = None
        if any(entry.name == TASK_GRAPH for entry in self._graphs):
            probe = instead.probe if instead is not None else written.probe(packed.parameter_sets[served])
            serving = Serving(TASK_GRAPH, served, probe)
        return Manifest(
            direction="down",
            fleet=self._fleet,
            client_id=client_id,
            round=round_index,
            version=0,
            blobs=blobs,
            facts=encode_facts(packed.facts),
            serving=serving,
        )

    def _former(self, former: Mapping[str, Manifest] | None, client: str) -> _Former | None:
        """Return the model that a client has, which it may serve rounded; None if there is none to go on with."""
        manifest = former.get(client) if former else None
        if manifest is None or manifest.serving is None:
            return None
        serving = manifest.serving
        entry = next(entry for entry in manifest.blobs if entry.name == serving.model)
        if serving.parameters == serving.model:
            return _Former(entry, serving.probe)
        try:
            return _Former(entry, self._exporter.probe(decode_parameters(entry.name, self._blobs.read(entry.digest))))
        except (KeyError, ArtefactRejected):
            return None


class _Nowhere:
    """Names what would be stored, and reads what is."""

    def __init__(self, blobs: Blobs) -> None:
        self.read = blobs.read

    def put(self, data: bytes) -> str:
        return digest(data)

    def pack(self, digest: str, base: str, steps: Mapping[str, float]) -> None:
        """Nothing travels."""


class _Former(NamedTuple):
    """Parameters, and their golden vector."""

    entry: BlobEntry
    probe: Probe


def _is_shared(downloads: Mapping[str, Any], client: str) -> bool:
    """Whether others would serve the same model as this client."""

    def served(download: Any) -> Parameters | None:
        sets: Mapping[str, Parameters] = download.pack().parameter_sets
        return sets.get(served_name(type(download)) or "")

    own = served(downloads[client])
    return any(served(other) is own for c, other in downloads.items() if c != client)


def export_graphs(blobs: BlobWriter, exporter: Exporter) -> tuple[BlobEntry, ...]:
    """Put the graphs into the store; returns their entries."""
    graphs = exporter.graphs()
    return tuple(BlobEntry(name, blobs.put(graphs[name]), len(graphs[name])) for name in sorted(graphs))


class _Written:
    """Encodes and probes each parameter set once, however many clients get it."""

    def __init__(self, once: EncodedOnce, exporter: Exporter) -> None:
        self.entry = once.entry
        self._exporter = exporter
        self._probes: dict[str, Probe] = {}

    def probe(self, parameters: Parameters) -> Probe:
        digest = self.entry("", parameters).digest
        if digest not in self._probes:
            self._probes[digest] = self._exporter.probe(parameters)
        return self._probes[digest]


def _with_shared_marked(drafts: Mapping[str, Manifest]) -> dict[str, Manifest]:
    owners = Counter(digest for draft in drafts.values() for digest in {entry.digest for entry in draft.blobs})
    marked = {}
    for client, draft in drafts.items():
        blobs = tuple(
            BlobEntry(
                entry.name, entry.digest, entry.size_bytes, len(drafts) > 1 and owners[entry.digest] == len(drafts)
            )
            for entry in draft.blobs
        )
        marked[client] = msgspec.structs.replace(draft, blobs=blobs)
    return marked
