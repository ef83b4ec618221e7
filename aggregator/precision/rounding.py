"""Downloads whose model is rounded for the client that wants it so; those whose gate fails stay as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec
import torch

from replayfleet.aggregator.precision.replay import NoSamples, Replay
from replayfleet.aggregator.precision.rules import PrecisionRules
from replayfleet.aggregator.precision.wishes import Wish
from replayfleet.aggregator.store import StoredArtefacts
from replayfleet.devices.profiles import FP32
from replayfleet.export.formats import format_of
from replayfleet.export.gate import GateError
from replayfleet.export.served import RoundedModel, rounded_model
from replayfleet.federation.methods.kit.records import Sampler
from replayfleet.federation.service.artefact_codec import Blobs
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.limits import MAX_TEXT
from replayfleet.federation.wire.protocol.messages import (
    ROUNDED_FROM,
    ROUNDED_GRAPHS,
    BlobEntry,
    FleetSpec,
    Manifest,
    Serving,
)
from replayfleet.federation.wire.protocol.tensors import decode_arrays, encode_arrays
from replayfleet.models.specs import AnyTaskSpec

_NO_PARAMETERS = encode_arrays({})

_log = EventLogger("replayfleet.aggregator.precision")


class Rounder:
    """Rounds what drafts serve; one thread calls it.

    Args:
        spec: the fleet.
        task: its task.
        blobs: models in, rounded ones out.
        sampler: draws replay.
        rules: the operator's.
    """

    def __init__(
        self, spec: FleetSpec, task: AnyTaskSpec, blobs: Blobs, sampler: Sampler, rules: PrecisionRules
    ) -> None:
        self._task, self._blobs, self._rules = task, blobs, rules
        self._replay = Replay(spec, sampler, blobs, rules.images)

    def rounded(
        self, drafts: Mapping[str, Manifest], wishes: Mapping[str, Wish], state: StoredArtefacts | None
    ) -> tuple[dict[str, Manifest], dict[str, str]]:
        """Return the drafts, those of clients that wish it with a rounded model, and why others keep float32.

        A model that several clients get is rounded once. Whatever goes wrong with it, its clients get float32; only a
        disk that takes nothing is for the caller.

        Args:
            drafts: client -> download.
            wishes: of clients that want another precision.
            state: the method's, in which sub-generators are.

        Raises:
            OSError: The disk fails.
        """
        exact: dict[str, str] = {}
        groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for client_id in sorted(drafts.keys() & wishes.keys()):
            wish, manifest = wishes[client_id], drafts[client_id]
            if manifest.serving is None or manifest.serving.precision != FP32:
                continue
            if why := wish.refused or self._forbidden(wish.precision):
                exact[client_id] = f"float32 is served: {why}"
                continue
            digests = {entry.name: entry.digest for entry in manifest.blobs}
            model = (digests[manifest.serving.graph], digests[manifest.serving.parameters], wish.precision)
            groups[model].append(client_id)
        found = dict(drafts)
        for (graph, parameters, precision), clients in groups.items():
            made = self._made(graph, parameters, precision, clients, drafts[clients[0]].round, state)
            if isinstance(made, str):
                exact |= dict.fromkeys(clients, f"float32 is served: {made}")
                continue
            stored = self._blobs.put(made.graph), self._blobs.put(_NO_PARAMETERS)
            for client_id in clients:
                found[client_id] = _serving(found[client_id], precision, stored, made)
        noticed = {c: _noticed(found[c], why) for c, why in exact.items()}
        return _shared({**found, **noticed}), exact

    def _forbidden(self, precision: str) -> str:
        if precision in self._rules.allowed:
            return ""
        return f"the client wants {precision[:20]!r}, --precision allows {', '.join(self._rules.allowed) or 'none'}"

    def _made(
        self,
        graph: str,
        parameters: str,
        precision: str,
        clients: list[str],
        round_index: int,
        state: StoredArtefacts | None,
    ) -> RoundedModel | str:
        """Return the rounded model, or why there is none."""
        row = format_of(precision)
        if row is None or row.max_loss_points is None:
            return f"{precision} is no precision"
        limit = row.max_loss_points if self._rules.max_loss_points is None else self._rules.max_loss_points
        try:
            samples = self._replay.samples(clients, state, round_index, calibrated=row.calibrated)
            arrays = decode_arrays(self._blobs.read(parameters))
            exact = self._blobs.read(graph)
            threads = max(1, torch.get_num_threads())
            return rounded_model(self._task, row, exact, arrays, samples, limit, threads)
        except NoSamples as none:
            return str(none)
        except GateError as error:
            verdict = error.verdict
            return (
                f"{precision} loses {verdict.loss_points:.2f} points of {verdict.measure}, at most "
                f"{verdict.limit_points:g} are accepted"
            )
        except Exception as error:  # whatever the graph, the samples or a converter did: float32 is there
            _log.warning("model not rounded", precision=precision, clients=",".join(clients[:5]), reason=error)
            return f"{precision} can't be made: {str(error).partition('; nothing was written')[0][:300]}"


def _serving(manifest: Manifest, precision: str, stored: tuple[str, str], made: RoundedModel) -> Manifest:
    assert manifest.serving is not None
    graph = BlobEntry(ROUNDED_GRAPHS + precision, stored[0], len(made.graph))
    empty = BlobEntry(ROUNDED_FROM + manifest.serving.model, stored[1], len(_NO_PARAMETERS))
    return msgspec.structs.replace(
        manifest, blobs=(*manifest.blobs, graph, empty), serving=Serving(graph.name, empty.name, made.probe)
    )


def _noticed(manifest: Manifest, why: str) -> Manifest:
    return manifest if manifest.notice else msgspec.structs.replace(manifest, notice=why[:MAX_TEXT])


def _shared(drafts: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Mark what of the rounded models all clients get."""
    added = (ROUNDED_GRAPHS, ROUNDED_FROM)
    owners = Counter(entry.digest for draft in drafts.values() for entry in draft.blobs if entry.name.startswith(added))
    everybodys = {digest for digest, count in owners.items() if count == len(drafts) > 1}
    if not everybodys:
        return dict(drafts)
    return {
        client_id: msgspec.structs.replace(
            draft,
            blobs=tuple(
                msgspec.structs.replace(entry, shared=entry.shared or entry.digest in everybodys)
                for entry in draft.blobs
            ),
        )
        for client_id, draft in drafts.items()
    }
