"""The method's half of a round, off the network thread: references to blobs in, references to blobs out.

Everything here is a function of what the store holds, so a round that a crash interrupted is computed again to the bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from replayfleet.aggregator.admission import decode_upload
from replayfleet.aggregator.candidates import settle
from replayfleet.aggregator.precision.rounding import Rounder
from replayfleet.aggregator.precision.wishes import Wish
from replayfleet.aggregator.publisher import Publisher
from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.federation.errors import ArtefactRejected, UploadRejected, told
from replayfleet.federation.methods.kit.beginning import first_download
from replayfleet.federation.methods.kit.each import Map, spread_by
from replayfleet.federation.methods.kit.late import drawn_back
from replayfleet.federation.methods.kit.packing import weights_among
from replayfleet.federation.methods.kit.placement import CPU, placed
from replayfleet.federation.methods.kit.promises import aggregated, faults_named, remembered_layout
from replayfleet.federation.methods.kit.records import Artefacts, Method, Parameters, Sampler
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.kit.travel import Rounded, published
from replayfleet.federation.methods.steps.screening import TaskAnswers, candidate_of, screen
from replayfleet.federation.service.artefact_codec import BlobFiles, Blobs, BlobWriter, EncodedOnce, StoredParameters
from replayfleet.federation.service.fleet.presets import MAX_CHANGE
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.limits import MAX_TEXT
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest

_log = EventLogger("replayfleet.aggregator.aggregation")

LONGEST_REST = 32
"""Rounds: what another process left no memory for goes again, and a driver that is lost for good costs a try."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """An aggregated round, its blobs on disk, nothing committed.

    Attributes:
        round: which.
        state: the method's state after it.
        drafts: a download for each client, for the next round.
        quarantined: clients whose uploads this round was aggregated without, and why.
        kept: clients that go on with their former model, for the new one failed its gate, and why.
        exact: clients that get float32 though they want a rounded model, and why.
        weights: client -> client -> share in its personalised model, where the method says so.
        aggregate_s: seconds in ``method.aggregate``.
        publish_s: seconds for encoding, probing and rounding.
        lost: those of ``quarantined`` whose upload was damaged on our own disk, which is no fault of theirs.
        in_vain: whether none of the uploads could be used, so that everybody goes on with what there was.
    """

    round: int
    state: StoredArtefacts
    drafts: Mapping[str, Manifest]
    quarantined: Mapping[str, str]
    kept: dict[str, str]
    exact: Mapping[str, str]
    weights: Mapping[str, Mapping[str, float]]
    aggregate_s: float
    publish_s: float
    lost: frozenset[str] = frozenset()
    in_vain: bool = False


@dataclass(slots=True)
class GpuRest:
    """Rounds for which a GPU that failed isn't asked: one, then twice as many each time until it works again.

    Attributes:
        until: the round in which it is asked again.
    """

    until: int = 0
    _rounds: int = 0

    def failed(self, round_index: int) -> None:
        """It failed in this round."""
        self._rounds = min(2 * self._rounds or 1, LONGEST_REST)
        self.until = round_index + self._rounds


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What an aggregation of some uploads made."""

    state: StoredArtefacts
    new_state: Any
    drafts: Mapping[str, Manifest]
    kept: dict[str, str]
    weights: Mapping[str, Mapping[str, float]]
    aggregate_s: float
    publish_s: float


@dataclass(frozen=True, slots=True)
class Terms:
    """How an operator wants rounds aggregated.

    Attributes:
        max_change: how far a task model may move in one round (``screening``).
        device: where the method computes. A GPU that fails once isn't asked again.
        initial: the task model that everybody begins with; None: the method's random ones.
        spread: does the same work for many clients, on the CPU.
        rounder: rounds models for clients that want it; None: all serve float32.
    """

    max_change: float = MAX_CHANGE
    device: torch.device = CPU
    initial: Parameters | None = None
    spread: Map | None = None
    rounder: Rounder | None = None


class Aggregation:
    """Runs the method on what the store refers to; one thread calls it.

    Args:
        spec: the fleet.
        method: the fleet's method.
        sampler: draws from sub-generators.
        blobs: tensors, in and out.
        publisher: makes manifests of downloads.
        terms: the operator's.

    Attributes:
        failure: why the newest round has no aggregation; empty if it has one.
    """

    def __init__(
        self,
        spec: FleetSpec,
        method: Method,
        sampler: Sampler,
        blobs: Blobs,
        publisher: Publisher,
        terms: Terms = Terms(),
    ) -> None:
        self._initial_parameters = terms.initial
        self._device = terms.device
        self._gpu_rest = GpuRest()
        self.failure = ""
        self._spread, self._rounder = terms.spread, terms.rounder
        self._spec = spec
        self._method = method
        self._sampler = sampler
        self._blobs = blobs
        self._publisher = publisher
        self._max_change = terms.max_change
        self._answers = TaskAnswers(task_of(spec))
        self._layout = remembered_layout(method)
        self._latest: tuple[StoredArtefacts | None, Any] = (None, method.initial_states()[1])

    def run(
        self,
        round_index: int,
        uploads: Mapping[str, Manifest],
        state: StoredArtefacts | None,
        former: Mapping[str, Manifest] | None = None,
        wishes: Mapping[str, Wish] | None = None,
        left_out: Collection[str] = (),
    ) -> RoundResult:
        """Aggregate one closed round, without those uploads that can't be.

        Uploads that are implausible, or without which it succeeds, are quarantined. If nothing is left, the round ends
        with the models that it began with.

        Args:
            round_index: the round.
            uploads: accepted uploads by client.
            state: the method's state after the round before; None before the first.
            former: the download that each client has; it keeps that model if its new one fails the gate.
            wishes: of clients that want a rounded model.
            left_out: clients that take no part: what the state holds of them stays there and reaches nobody, but
                for those whose upload counts.

        Raises:
            OSError: The disk fails.
        """
        former, absent = former or {}, frozenset(left_out) - uploads.keys()
        before, aside = _parted(self._state(state), absent)
        candidates, damaged = self._decoded(uploads)
        for client_id in candidates:
            late = round_index - uploads[client_id].round
            if late:
                newest = self._method.download_for(before, client_id, self._initial)
                candidates[client_id] = drawn_back(self._method, candidates[client_id], newest, late)
        quarantined = damaged | self._screened(candidates, before)
        left = {client_id: upload for client_id, upload in candidates.items() if client_id not in quarantined}
        errors: list[Exception] = []

        def attempt(some: Mapping[str, Any]) -> _Attempt:
            try:
                return self._attempt(round_index, some, before, former, aside)
            except Exception as error:
                errors.append(error)
                raise

        result, culprits = settle(
            left,
            attempt,
            lambda some: self._rehearsed(round_index, some, before, _without(former, some)),
            lambda some: self._rehearsed(round_index, some, before, former),
        )
        quarantined |= culprits
        self.failure, in_vain = "", result is None
        if result is None:
            if errors:  # not even alone: it may be the method's mistake, and no client's
                self.failure = f"round {round_index} has no aggregation, its uploads were in vain: {told(errors[-1])}"
                again = "each client goes on with the model that it had"
                _log.exception("aggregation fails with every upload", errors[-1], method=self._method.name, next=again)
            result = self._unchanged(round_index, uploads, before, former, aside)
        missing = {
            client_id: self._method.download_for(result.new_state, client_id, self._initial)
            for client_id in quarantined
            if client_id not in result.drafts
        }
        drafts = {**result.drafts, **self._as_before(missing, round_index, former, result.kept)}
        self._latest = (result.state, _joined(result.new_state, aside))
        if any(manifest.round != round_index for manifest in uploads.values()):
            # What a late upload was mixed into lies in the state's own blobs; those that it was mixed of go.
            self._latest = (result.state, self._restored(result.state))
        drafts = {c: _with_notice(draft, quarantined.get(c) or result.kept.get(c)) for c, draft in drafts.items()}
        published_at = time.perf_counter()
        drafts, exact = self._rounded(drafts, wishes or {}, result.state, absent)
        return RoundResult(
            round=round_index,
            state=result.state,
            drafts=drafts,
            quarantined=dict(sorted(quarantined.items())),
            kept=result.kept,
            exact=exact,
            weights=result.weights,
            aggregate_s=result.aggregate_s,
            publish_s=result.publish_s + time.perf_counter() - published_at,
            lost=frozenset(damaged),
            in_vain=in_vain,
        )

    def _rounded(
        self,
        drafts: dict[str, Manifest],
        wishes: Mapping[str, Wish],
        state: StoredArtefacts | None,
        left_out: Collection[str],
    ) -> tuple[dict[str, Manifest], dict[str, str]]:
        if self._rounder is None:
            return drafts, {}
        if state is not None:  # nothing is judged by what those draw
            theirs = tuple(f"clients/{client}/" for client in left_out)
            blobs = tuple(entry for entry in state.blobs if not entry.name.startswith(theirs))
            state = msgspec.structs.replace(state, blobs=blobs)
        return self._rounder.rounded(drafts, wishes, state)

    def _decoded(self, uploads: Mapping[str, Manifest]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the uploads, and those of which a blob was damaged on our disk since admission read it."""

        def decoded(client_id: str) -> Any:
            try:
                return decode_upload(self._method, uploads[client_id], self._blobs, self._layout, must_be_finite=False)
            except (UploadRejected, KeyError) as error:
                return error

        # After a restart all are verified again, which takes hashing, and that releases the interpreter.
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as threads:
            found = dict(zip(sorted(uploads), threads.map(decoded, sorted(uploads)), strict=True))
        damaged = {
            c: f"the aggregator's own copy is damaged: {e}" for c, e in found.items() if isinstance(e, Exception)
        }
        return {client_id: one for client_id, one in found.items() if client_id not in damaged}, damaged

    def _screened(self, uploads: Mapping[str, Any], before: Any) -> dict[str, str]:
        initial = self._initial
        candidates = {
            client_id: candidate_of(upload, self._method.download_for(before, client_id, initial))
            for client_id, upload in uploads.items()
        }
        return screen(candidates, self._answers, self._max_change)

    def _rehearsed(
        self, round_index: int, uploads: Mapping[str, Any], before: Any, former: Mapping[str, Manifest]
    ) -> Mapping[str, Manifest]:
        """Do what ``_attempt`` does, without a trace on the disk: many groups may be tried until one goes."""
        _, downloads, rounded = self._as_they_travel(round_index, uploads, before)
        return self._publisher.rehearsing().drafts(downloads, round_index + 1, former, {}, rounded)

    def _as_they_travel(
        self, round_index: int, uploads: Mapping[str, Any], before: Any
    ) -> tuple[Any, Mapping[str, Any], Sequence[Rounded]]:
        new_state, downloads = self._aggregated(round_index, before, uploads)
        return published(
            self._method,
            self._answers,
            new_state,
            downloads,
            lambda c: self._method.download_for(before, c, self._initial),
        )

    def _attempt(
        self,
        round_index: int,
        uploads: Mapping[str, Any],
        before: Any,
        former: Mapping[str, Manifest],
        aside: Mapping[str, Any],
    ) -> _Attempt:
        began = time.perf_counter()
        new_state, downloads, rounded = self._as_they_travel(round_index, uploads, before)
        aggregated_at = time.perf_counter()
        kept: dict[str, str] = {}
        once = EncodedOnce(self._blobs)
        drafts = self._publisher.drafts(downloads, round_index + 1, former, kept, rounded, once)
        stored = store_artefacts(_joined(new_state, aside).pack(), self._blobs, once)
        published_at = time.perf_counter()
        weights = _weights(downloads)
        return _Attempt(stored, new_state, drafts, kept, weights, aggregated_at - began, published_at - aggregated_at)

    def _aggregated(self, round_index: int, before: Any, uploads: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the method's new state and downloads, on the CPU wherever they were computed."""

        def on(device: torch.device) -> tuple[Any, Mapping[str, Any]]:
            rng = seeded_generator(self._spec.run_seed, round_index, "aggregator")
            there = {client_id: placed(upload, device) for client_id, upload in uploads.items()}
            spread = self._spread if device.type == "cpu" else None
            within = contextlib.nullcontext() if spread is None else spread_by(spread)
            with within, faults_named(self._method, "aggregate"):
                made = self._method.aggregate(placed(before, device), there, rng, sampler=self._sampler)
            state, downloads = aggregated(self._method, made, lambda: placed(self._initial, device))
            back: dict[int, Any] = {}
            return placed(state, CPU, back), {name: placed(one, CPU, back) for name, one in downloads.items()}

        if self._device.type == "cpu" or round_index < self._gpu_rest.until:
            return on(CPU)
        try:
            result = on(self._device)
        except RuntimeError as error:  # its driver, its memory, or an upload, of which the CPU will tell
            result = on(CPU)
            self._gpu_rest.failed(round_index)
            again = f"aggregating on the CPU until round {self._gpu_rest.until}"
            _log.warning("GPU failed", device=self._device, reason=error, next=again)
        else:
            self._gpu_rest = GpuRest()
        return result

    def _unchanged(
        self,
        round_index: int,
        uploads: Mapping[str, Manifest],
        before: Any,
        former: Mapping[str, Manifest],
        aside: Mapping[str, Any],
    ) -> _Attempt:
        """Return a round that nobody took part in: everybody goes on with what there was."""
        initial = self._initial
        downloads = {client_id: self._method.download_for(before, client_id, initial) for client_id in sorted(uploads)}
        stored = store_artefacts(_joined(before, aside).pack(), self._blobs)
        kept: dict[str, str] = {}
        drafts = self._as_before(downloads, round_index, former, kept)
        return _Attempt(stored, before, drafts, kept, {}, 0.0, 0.0)

    def _as_before(
        self, downloads: Mapping[str, Any], round_index: int, former: Mapping[str, Manifest], kept: dict[str, str]
    ) -> dict[str, Manifest]:
        """Return drafts of what the state holds for clients.

        A model that nobody can serve may have come into the state, for its client got the former one.
        """
        with contextlib.suppress(ArtefactRejected):
            return self._publisher.drafts(downloads, round_index + 1, former, kept)
        drafts: dict[str, Manifest] = {}
        for client_id in sorted(downloads):
            try:
                drafts |= self._publisher.drafts({client_id: downloads[client_id]}, round_index + 1, former, kept)
            except ArtefactRejected as error:  # noqa: PERF203 -- of one client alone
                if client_id in former:
                    drafts[client_id] = msgspec.structs.replace(former[client_id], round=round_index + 1, version=0)
                    kept[client_id] = f"its model can't be served, the former one stays: {error}"
        return drafts

    @functools.cached_property
    def _initial(self) -> Any:
        """What a newcomer gets: drawn once, as drawing it takes longer than averaging."""
        return first_download(self._method, self._spec.run_seed, self._initial_parameters)

    def download_for(
        self,
        client_id: str,
        round_index: int,
        state: StoredArtefacts | None,
        wishes: Mapping[str, Wish] | None = None,
        left_out: Collection[str] = (),
    ) -> Manifest:
        """Return the draft of one client's download: a late joiner's, or one who was not there for long."""
        known, _ = _parted(self._state(state), left_out)
        download = self._method.download_for(known, client_id, self._initial)
        drafts = self._publisher.drafts({client_id: download}, round_index)
        return self._rounded(drafts, wishes or {}, state, left_out)[0][client_id]

    def _state(self, stored: StoredArtefacts | None) -> Any:
        if self._latest[0] != stored:
            self._latest = (stored, self._restored(stored))
        return self._latest[1]

    def _restored(self, stored: StoredArtefacts | None) -> Any:
        if stored is None:
            return self._method.initial_states()[1]
        return self._method.AggregatorState.unpack(restore_artefacts(stored, self._blobs))


def _parted(state: Any, left_out: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return a method's state without what it holds of these clients, and that."""
    held = getattr(state, "clients", None)
    if not isinstance(held, Mapping) or not held.keys() & set(left_out):  # methods that mix what they cached have one
        return state, {}
    aside = {client_id: one for client_id, one in held.items() if client_id in left_out}
    return dataclasses.replace(state, clients={c: one for c, one in held.items() if c not in aside}), aside


def _joined(state: Any, aside: Mapping[str, Any]) -> Any:
    """Return a state with what was held aside, so that a client which is readmitted finds its own again."""
    return dataclasses.replace(state, clients=dict(sorted({**state.clients, **aside}.items()))) if aside else state


def store_artefacts(artefacts: Artefacts, blobs: BlobWriter, once: EncodedOnce | None = None) -> StoredArtefacts:
    """Put artefacts that stay in this process into the store; unlike a manifest's, their facts have no size limit.

    Args:
        artefacts: what to store.
        blobs: where.
        once: knows what of it is there already; None for nothing.
    """
    once, sets = once or EncodedOnce(blobs), artefacts.parameter_sets
    entries = tuple(once.entry(name, sets[name]) for name in sorted(sets))
    return StoredArtefacts(entries, blobs.put(msgspec.msgpack.encode(dict(artefacts.facts))))


def restore_artefacts(stored: StoredArtefacts, blobs: BlobFiles) -> Artefacts:
    """Return what ``store_artefacts`` stored; its sets stay on disk, and names of one blob share one set.

    Raises:
        ArtefactRejected: A blob is damaged.
        KeyError: A blob is gone.
    """
    shared = {entry.digest: StoredParameters(entry, blobs) for entry in stored.blobs}
    sets = {entry.name: shared[entry.digest] for entry in stored.blobs}
    return Artefacts(sets, msgspec.msgpack.decode(blobs.read(stored.facts), type=dict[str, Any]))


def _without(former: Mapping[str, Manifest], some: Collection[str]) -> dict[str, Manifest]:
    """Return the downloads of the others: theirs may stay, while who is tried has to do without one."""
    return {client_id: one for client_id, one in former.items() if client_id not in some}


def _with_notice(draft: Manifest, notice: str | None) -> Manifest:
    return msgspec.structs.replace(draft, notice=notice[:MAX_TEXT]) if notice else draft


def _weights(downloads: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found = {}
    for client_id, download in sorted(downloads.items()):
        weights = weights_among(type(download), download.pack().facts)
        if weights:
            found[client_id] = dict(weights)
    return found
