"""The method's half of a round, off the network thread: references to blobs in, references to blobs out.

Everything here is a function of what the store holds, so a round that a crash interrupted is computed again to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from replayfleet.aggregator.admission import decode_upload
from replayfleet.aggregator.publisher import Publisher
from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.federation.methods.kit.packing import weights_among
from replayfleet.federation.methods.kit.records import Artefacts, Method, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.artefact_codec import (
    BlobReader,
    BlobWriter,
    Layout,
    decode_parameters,
    encode_parameters,
)
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest


class Blobs(BlobReader, BlobWriter, Protocol):
    """What aggregation needs of a blob store."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """An aggregated round, its blobs on disk, nothing committed.

    Attributes:
        round: which.
        state: the method's state after it.
        drafts: a download for each client, for the next round.
        weights: client -> client -> share in its personalised model, where the method says so.
        aggregate_s: seconds in ``method.aggregate``.
        publish_s: seconds for encoding and probing.
    """

    round: int
    state: StoredArtefacts
    drafts: Mapping[str, Manifest]
    weights: Mapping[str, Mapping[str, float]]
    aggregate_s: float
    publish_s: float


class Aggregation:
    """Runs the method on what the store refers to; one thread calls it.

    Args:
        spec: the fleet.
        method: the fleet's method.
        sampler: draws from sub-generators.
        blobs: tensors, in and out.
        publisher: makes manifests of downloads.
    """

    def __init__(self, spec: FleetSpec, method: Method, sampler: Sampler, blobs: Blobs, publisher: Publisher) -> None:
        self._spec = spec
        self._method = method
        self._sampler = sampler
        self._blobs = blobs
        self._publisher = publisher
        self._layout = upload_layout(method)
        self._latest: tuple[StoredArtefacts | None, Any] = (None, method.initial_states()[1])

    def run(self, round_index: int, uploads: Mapping[str, Manifest], state: StoredArtefacts | None) -> RoundResult:
        """Aggregate one closed round.

        Args:
            round_index: the round.
            uploads: accepted uploads by client.
            state: the method's state after the round before; None before the first.

        Raises:
            ValueError: The method can't aggregate these uploads.
            ArtefactRejected: A stored blob is damaged, or a resulting model can't be served.
        """
        decoded = {c: decode_upload(self._method, uploads[c], self._blobs, self._layout) for c in sorted(uploads)}
        began = time.perf_counter()
        rng = seeded_generator(self._spec.run_seed, round_index, "aggregator")
        new_state, downloads = self._method.aggregate(self._state(state), decoded, rng, sampler=self._sampler)
        aggregated = time.perf_counter()
        drafts = self._publisher.drafts(downloads, round_index + 1)
        stored = store_artefacts(new_state.pack(), self._blobs)
        self._latest = (stored, new_state)
        return RoundResult(
            round=round_index,
            state=stored,
            drafts=drafts,
            weights=_weights(downloads),
            aggregate_s=aggregated - began,
            publish_s=time.perf_counter() - aggregated,
        )

    def download_for(self, client_id: str, round_index: int, state: StoredArtefacts | None) -> Manifest:
        """Return the draft of one client's download: a late joiner's, or one who was not there for long."""
        initial = self._method.initial_download(seeded_generator(self._spec.run_seed, 0, "initial"))
        download = self._method.download_for(self._state(state), client_id, initial)
        return self._publisher.drafts({client_id: download}, round_index)[client_id]

    def _state(self, stored: StoredArtefacts | None) -> Any:
        if self._latest[0] != stored:
            self._latest = (stored, self._restored(stored))
        return self._latest[1]

    def _restored(self, stored: StoredArtefacts | None) -> Any:
        if stored is None:
            return self._method.initial_states()[1]
        return self._method.AggregatorState.unpack(restore_artefacts(stored, self._blobs))


def upload_layout(method: Method) -> Layout:
    """Return ``method.upload_layout`` with a memory: it builds a module for each call."""
    known: dict[str, Any] = {}

    def layout(name: str) -> Any:
        if name not in known:
            found = method.upload_layout(name)
            if found is None:
                return None
            known[name] = found
        return known[name]

    return layout


def store_artefacts(artefacts: Artefacts, blobs: BlobWriter) -> StoredArtefacts:
    """Put artefacts that stay in this process into the store; unlike a manifest's, their facts have no size limit."""
    entries = []
    for name in sorted(artefacts.parameter_sets):
        data = encode_parameters(artefacts.parameter_sets[name])
        entries.append(BlobEntry(name, blobs.put(data), len(data)))
    return StoredArtefacts(tuple(entries), blobs.put(msgspec.msgpack.encode(dict(artefacts.facts))))


def restore_artefacts(stored: StoredArtefacts, blobs: BlobReader) -> Artefacts:
    """Return what ``store_artefacts`` stored.

    Raises:
        ArtefactRejected: A blob is damaged.
        KeyError: A blob is gone.
    """
    sets = {entry.name: decode_parameters(entry.name, blobs.read(entry.digest)) for entry in stored.blobs}
    return Artefacts(sets, msgspec.msgpack.decode(blobs.read(stored.facts), type=dict[str, Any]))


def _weights(downloads: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found = {}
    for client_id, download in sorted(downloads.items()):
        weights = weights_among(type(download), download.pack().facts)
        if weights:
            found[client_id] = dict(weights)
    return found
