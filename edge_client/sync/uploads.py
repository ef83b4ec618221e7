"""The upload of a finished round, from the training commit to the verdict."""

from __future__ import annotations

from replayfleet.edge_client.state_store import TrainingCommit
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.session_logic import Pending
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.service.backoff import Backoff
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.interfaces import Concluded

log = EventLogger(__name__)

MAX_OFFERS = 6
"""Offers of one upload that the aggregator may answer with "try again"."""

_TRY_AGAIN = frozenset({Reason.BUSY.value, Reason.WRONG_DIGEST.value})


class UploadDesk:
    """Offers what training committed until it has a verdict."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._backoff = Backoff(2.0, 60.0)
        self._offered_epoch = ""
        self._not_before = 0.0
        self._commit: TrainingCommit | None = None
        self._offered_at = 0.0
        self.bytes_on_wire = 0
        self.last_upload_s: float | None = None
        """Seconds from the last accepted upload's offer to its verdict; None before the first."""
        self.reload()

    def reload(self) -> None:
        """Read what is pending from disk: at the start, and after training."""
        self._commit = self._parts.records.pending()
        self._offered_epoch = ""
        self._not_before = 0.0
        self._backoff.reset()

    def pending(self, spec_digest: str) -> Pending | None:
        """The upload without a verdict, if it was made under this agreement."""
        commit = self._commit
        if commit is None or commit.spec_digest != spec_digest:
            return None
        return Pending(commit.round, self._offered_epoch)

    def offer(self, epoch: str, held: Manifest | None, now: float) -> None:
        """Offer the pending upload in this epoch of the aggregator."""
        commit = self._commit
        if commit is None or now < self._not_before:
            return
        self._offered_epoch = epoch
        parts = self._parts
        manifest = Manifest(
            direction="up",
            fleet=parts.gate.fleet,
            client_id=parts.client_id,
            round=commit.round,
            version=commit.version,
            blobs=commit.upload,
            facts=commit.upload_facts,
        )
        known = {entry.digest for entry in held.blobs} if held is not None else set()
        missing = [entry.digest for entry in commit.upload if entry.digest not in known]
        try:
            parts.courier.send(parts.client_id, manifest, tuple(dict.fromkeys(missing)), now)
        except (KeyError, ArtefactRejected) as error:
            self._settle("damaged", f"a blob of the upload is lost ({error})")
            return
        except OSError:
            self._offered_epoch = ""  # the spool took nothing: again when it does
            raise
        self._offered_at = now
        log.info("upload offered", round=commit.round, version=commit.version, blobs=len(missing))

    def concluded(self, event: Concluded, now: float) -> None:
        commit, verdict = self._commit, event.verdict
        if commit is None or event.manifest.version != commit.version or event.manifest.direction != "up":
            return
        self.bytes_on_wire = event.bytes_on_wire
        if verdict.accepted:
            log.info("upload accepted", round=commit.round, bytes=event.bytes_on_wire)
            self.last_upload_s = now - self._offered_at
            self._parts.records.settle(commit.version, "accepted")
            self._commit = None
        elif verdict.reason in _TRY_AGAIN and self._backoff.attempts < MAX_OFFERS:
            delay_s = self._backoff.next_s()
            self._offered_epoch, self._not_before = "", now + delay_s
            log.warning("upload refused", reason=verdict.reason, detail=verdict.detail, again_in_s=delay_s)
        else:
            self._settle(verdict.reason or "refused", verdict.detail)

    def drop(self) -> None:
        """Let go of an upload whose round is over; the state it came from stays."""
        self._settle("dropped", "its round is over")

    def _settle(self, outcome: str, detail: str) -> None:
        if self._commit is not None:
            log.warning(
                "upload not used", round=self._commit.round, reason=outcome, detail=detail, next="state is kept"
            )
            self._parts.records.settle(self._commit.version, outcome)
            self._commit = None
