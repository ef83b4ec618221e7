"""Which uploads a round takes: decisions on an offer before any byte, and on the upload after it was received.

``federation.wire.protocol.limits`` has already held every message against what any fleet may send; here an upload is
held against this fleet, this round and this method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replayfleet.aggregator.rounds.machine import Phase, Rounds
from replayfleet.federation.errors import ArtefactRejected, Reason, UploadRejected
from replayfleet.federation.methods.kit.records import Method
from replayfleet.federation.service.artefact_codec import BlobFiles, Layout, largest_encoding_bytes, open_artefacts
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.messages import Manifest, Offer


@dataclass(frozen=True, slots=True)
class Caps:
    """What one upload may cost.

    Attributes:
        max_blobs: parameter sets in one upload.
        max_upload_bytes: decoded bytes of all its blobs.
        max_clients: clients that a fleet may have, not counting the revoked; a stranger beyond it is refused.
    """

    max_blobs: int = 4096
    max_upload_bytes: int = 1 << 30
    max_clients: int = 1024


@dataclass(frozen=True, slots=True)
class Gate:
    """What admission knows; pure.

    Attributes:
        fleet: name of the fleet.
        layout: tensors of each parameter set that the method's uploads may have.
        caps: what one upload may cost.
    """

    fleet: str
    layout: Layout
    caps: Caps

    def check_offer(self, peer: str, offer: Offer, rounds: Rounds, num_known_clients: int, *, known: bool) -> None:
        """Decide on an offer from its manifest alone.

        Args:
            peer: the client on whose topic it came.
            offer: what it wants to send.
            rounds: the open round.
            num_known_clients: clients of the fleet so far.
            known: whether ``peer`` is one of them.

        Raises:
            UploadRejected: It isn't for this fleet, round or client, or is larger or other than it may be.
        """
        manifest = offer.manifest
        self._check_origin(peer, manifest)
        if not known and num_known_clients >= self.caps.max_clients:
            raise UploadRejected(Reason.UNKNOWN_CLIENT, f"the fleet already has its {self.caps.max_clients} clients")
        self.check_round(manifest, rounds, peer)
        self._check_blobs(manifest)
        self._check_bundle(offer)

    def _check_origin(self, peer: str, manifest: Manifest) -> None:
        if manifest.direction != "up":
            raise UploadRejected(Reason.MALFORMED, f"manifest's direction is {manifest.direction!r}, expected 'up'")
        if manifest.fleet != self.fleet:
            raise UploadRejected(Reason.WRONG_FLEET, f"upload is for fleet {manifest.fleet!r}, this is {self.fleet!r}")
        if manifest.client_id != peer:
            raise UploadRejected(Reason.UNKNOWN_CLIENT, f"upload is of {manifest.client_id!r}, but came from {peer!r}")

    def check_round(self, manifest: Manifest, rounds: Rounds, peer: str) -> None:
        """Decide whether the open round takes an upload of this client; again when it arrived, for rounds close.

        Raises:
            UploadRejected: It is for another round, the round isn't open, or it has one of this client.
        """
        if not rounds.takes(manifest.round):
            raise UploadRejected(
                Reason.WRONG_ROUND,
                f"upload is for round {manifest.round}, {rounds.phase.value} round is {rounds.index}",
            )
        if not rounds.is_open:
            # As late again when the next one is open.
            next_takes = rounds.phase is Phase.AGGREGATING and rounds.takes(manifest.round - 1)
            raise UploadRejected(
                Reason.BUSY if next_takes else Reason.WRONG_ROUND,
                f"round {rounds.index} takes no uploads, it is {rounds.phase.value}",
            )
        if rounds.counts(peer):
            raise UploadRejected(
                Reason.STALE_VERSION, f"round {rounds.index} already has another upload of this client, which stays"
            )

    def _check_blobs(self, manifest: Manifest) -> None:
        if len(manifest.blobs) > self.caps.max_blobs:
            raise UploadRejected(
                Reason.TOO_LARGE, f"upload has {len(manifest.blobs)} blobs, at most {self.caps.max_blobs} are allowed"
            )
        for blob in manifest.blobs:
            expected = self.layout(blob.name)
            if expected is None:
                raise UploadRejected(Reason.WRONG_LAYOUT, f"parameter set {blob.name!r} is not known to this method")
            most = largest_encoding_bytes(expected)
            if blob.size_bytes > most:
                raise UploadRejected(
                    Reason.TOO_LARGE, f"blob {blob.name!r} has {blob.size_bytes} bytes, expected at most {most}"
                )
        total = sum(blob.size_bytes for blob in manifest.blobs)
        if total > self.caps.max_upload_bytes:
            raise UploadRejected(
                Reason.TOO_LARGE, f"upload has {total} bytes, at most {self.caps.max_upload_bytes} are allowed"
            )

    def _check_bundle(self, offer: Offer) -> None:
        sizes = {blob.digest: blob.size_bytes for blob in offer.manifest.blobs}
        for part in offer.parts:
            # Data that don't shrink travel raw, so nothing honest grows.
            if part.encoded_bytes > sizes.get(part.digest, 0):
                raise UploadRejected(
                    Reason.TOO_LARGE, f"a part of the bundle claims {part.encoded_bytes} encoded bytes"
                )


def decode_upload(
    method: Method, manifest: Manifest, store: BlobFiles, layout: Layout, *, must_be_finite: bool = True
) -> Any:
    """Return the method's upload from the blobs of a manifest, every tensor and fact checked; its tensors stay there.

    Args:
        method: of the fleet.
        manifest: that lists them.
        store: holds them.
        layout: of every set that an upload may have.
        must_be_finite: look at every number; what was admitted once needs that no more, as digests are held.

    Raises:
        UploadRejected: A blob has the wrong layout or isn't finite, or the facts are impossible.
    """
    try:
        artefacts = open_artefacts(manifest.blobs, manifest.facts, store, layout, must_be_finite=must_be_finite)
    except ArtefactRejected as error:
        raise UploadRejected(error.reason, error.detail) from error
    try:
        upload = method.Upload.unpack(artefacts)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UploadRejected(Reason.MALFORMED, f"not an upload of method {method.name!r}: {error}") from error
    try:
        method.check_upload(upload)
    except (ValueError, TypeError) as error:
        raise UploadRejected(Reason.WRONG_COUNTS, str(error)) from error
    return upload


def what_next(rounds: Rounds) -> str:
    """Say how the round goes on after an upload was rejected."""
    if rounds.is_open:
        return f"the round goes on with {rounds.num_accepted} of {count_of(rounds.quorum, 'client')}"
    return f"round {rounds.index} is {rounds.phase.value}, the next download brings the client up to date"
