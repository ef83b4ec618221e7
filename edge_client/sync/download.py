"""Downloads: which manifests may be received, and how what arrived becomes the served model.

Axes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import Candidate
from replayfleet.export.running.artefact import check_probe
from replayfleet.export.running.facts import task_facts
from replayfleet.export.running.inspection import MAX_SENT_GRAPH_BYTES
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.wire.protocol.codec import encode_manifest
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest, Serving, spoken
from replayfleet.models.specs import AnyTaskSpec

DEFAULT_MAX_DOWNLOAD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Gate:
    """What a client accepts from the network; pure.

    Attributes:
        fleet: whose manifests.
        client_id: for whom.
        max_bytes: decoded bytes of one download.
    """

    fleet: str
    client_id: str
    max_bytes: int = DEFAULT_MAX_DOWNLOAD_BYTES

    def check(self, peer: str, manifest: Manifest, held: Manifest | None, sent_away: int = -1) -> None:
        """Decide from the manifest alone, before a byte is received.

        Args:
            peer: on whose topic the offer came.
            manifest: what is offered.
            held: what is served.
            sent_away: the last version that was rolled back.

        Raises:
            ArtefactRejected: Not for this fleet or client, too large, not servable, older than what is held, or rolled
                back.
        """
        if manifest.direction != "down":
            raise ArtefactRejected(Reason.MALFORMED, f"direction is {manifest.direction!r}, expected 'down'")
        if manifest.fleet != self.fleet:
            raise ArtefactRejected(Reason.WRONG_FLEET, f"manifest is for {manifest.fleet!r}, this is {self.fleet!r}")
        if peer != manifest.client_id or peer not in {self.client_id, EVERYBODY}:
            raise ArtefactRejected(
                Reason.UNKNOWN_CLIENT,
                f"manifest for {manifest.client_id!r} came for {peer!r}, this is {self.client_id!r}",
            )
        total = sum(entry.size_bytes for entry in manifest.blobs)
        if total > self.max_bytes:
            raise ArtefactRejected(Reason.TOO_LARGE, f"{total} bytes, at most {self.max_bytes} are accepted")
        if peer != EVERYBODY:
            _check_serving(manifest)
            _check_version(manifest, held)
            if manifest.version <= sent_away:
                raise ArtefactRejected(
                    Reason.ROLLED_BACK,
                    f"version {sent_away} was rolled back, so version {manifest.version} isn't taken",
                )


def is_same(manifest: Manifest, held: Manifest | None) -> bool:
    """Whether a download is the one that is held already."""
    return held is not None and encode_manifest(manifest.plain) == encode_manifest(held.plain)


def serves_best(spec: FleetSpec) -> bool:
    """Whether devices of a fleet serve what proves best on their own evidence; else they serve what they download."""
    return spec.settings.get("serve") == "best"


def candidate(manifest: Manifest, task: AnyTaskSpec, workers: Workers) -> Candidate:
    """Return a verified download as something to install; loading happens later, in a process of its own.

    Raises:
        ArtefactRejected: It has no task model.
    """
    serving = _check_serving(manifest)
    digests = {entry.name: entry.digest for entry in manifest.blobs}
    return Candidate(
        version=manifest.version,
        round=manifest.round,
        image_shape=task.image_shape,
        load=lambda: workers.model(
            digests[serving.graph], digests[serving.parameters], task.image_shape, task_facts(task)
        ),
        check=lambda model: check_probe(model, serving.probe, task.image_shape, task.output_shape),
    )


def _check_serving(manifest: Manifest) -> Serving:
    if manifest.serving is None:
        raise ArtefactRejected(Reason.WRONG_LAYOUT, "manifest says nothing about serving")
    sizes = {entry.name: entry.size_bytes for entry in manifest.blobs}
    for name in (manifest.serving.graph, manifest.serving.parameters):
        if name not in sizes:
            raise ArtefactRejected(Reason.WRONG_LAYOUT, f"serving names blob {name!r}, which the manifest doesn't list")
    if sizes[manifest.serving.graph] > MAX_SENT_GRAPH_BYTES:
        raise ArtefactRejected(Reason.TOO_LARGE, f"graph has {sizes[manifest.serving.graph]} bytes")
    return manifest.serving


def _check_version(manifest: Manifest, held: Manifest | None) -> None:
    if held is None or is_same(manifest, held):
        return
    if manifest.version <= held.version:
        raise ArtefactRejected(
            Reason.STALE_VERSION,
            f"version {spoken(manifest.version)} is not newer than {spoken(held.version)}, which stays",
        )
