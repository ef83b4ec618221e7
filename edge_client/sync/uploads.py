"""The upload of a finished round, from the training commit until its round is over."""

from __future__ import annotations

from replayfleet.edge_client.state_store import TrainingCommit
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.session_logic import Pending, Place
from replayfleet.federation.backoff import fleet_backoff
from replayfleet.federation.errors import TRANSIENT, ArtefactRejected
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import KEPT_DOWNLOADS, Announcement, Manifest, epoch_of, spoken
from replayfleet.federation.wire.transport.interfaces import Concluded, Failed

log = EventLogger(__name__)


class UploadDesk:
    """Offers what training committed until it counts, and keeps it until its round is over."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._backoff = fleet_backoff()
        self._offered_to = self._transfer_id = ""
        self._not_before = 0.0
        self._commit: TrainingCommit | None = None
        self._counts_in: int | None = None
        self._late_rounds = self._open_round = 0
        self._offered_at = 0.0
        self._packs = False
        self.problem = ""
        """Why the upload is offered again; empty if it is not."""
        self.last_upload_s: float | None = None
        """Seconds from the last accepted upload's offer to its verdict; None before the first."""
        self.reload()

    def reload(self) -> None:
        """Read what is pending from disk: at the start, and after training."""
        self._commit, self._counts_in = self._parts.records.pending()
        self._offered_to = self._transfer_id = self.problem = ""
        self._not_before = 0.0
        self._backoff.reset()

    def pending(self, spec_digest: str) -> Pending | None:
        """The upload whose round is not over, if it was made under this agreement."""
        commit = self._commit
        if commit is None or commit.spec_digest != spec_digest:
            return None
        until = commit.round + self._late_rounds if self._counts_in is None else self._counts_in
        return Pending(Place(epoch_of(commit.version), until), self._counts_in is not None, self._offered_to)

    def heard(self, word: Announcement, now: float, spec_digest: str) -> None:
        """Look whether the aggregator holds the upload: one that was restored, or lost its store, may have lost it.

        One of another agreement, as before the fleet learned more classes, is made again with its round.
        """
        self._packs, self._late_rounds = "packed" in word.decodes, word.late_rounds
        self._open_round = word.round
        commit = self._commit
        if commit is None or commit.spec_digest != spec_digest:
            return
        if word.round < commit.round or word.state not in {"open", "aggregating"}:
            return
        held = word.counts(self._manifest(commit).mark)
        if self._counts_in is not None and word.round <= self._counts_in and not held:
            # lost with a store, taken out by an operator, or the broker kept a word from before it came
            log.info("upload isn't named", round=commit.round, next="it is offered again")
            self._offered_to, self._not_before, self._counts_in = "", now, None
        if held:
            self._keep(commit, word.round)

    def offer(self, instance: str, held: Manifest | None, now: float) -> None:
        """Offer the pending upload to this instance of the aggregator."""
        commit = self._commit
        if commit is None or now < self._not_before:
            return
        parts = self._parts
        known = {entry.digest for entry in held.blobs} if held is not None else set()
        missing = [entry.digest for entry in commit.upload if entry.digest not in known]
        try:
            bases = known | self._trained_from(commit, missing) if self._packs else None
            upload = self._manifest(commit)
            self._transfer_id = parts.courier.send(parts.client_id, upload, tuple(missing), now, bases=bases)
        except (KeyError, ArtefactRejected) as error:
            self._settle("damaged", f"a blob of the upload is lost ({error})")
            return
        except OSError:
            self._offered_to = ""  # the spool took nothing: again when it does
            raise
        self._offered_to, self._offered_at = instance, now
        log.info("upload offered", round=commit.round, version=spoken(commit.version), blobs=len(missing))

    def _trained_from(self, commit: TrainingCommit, digests: list[str]) -> set[str]:
        """Blobs of the download that these were trained from, while the aggregator has them though a newer one is held.

        Should it have lost one, it wants what was packed from that again, whole.
        """
        kept = self._open_round - commit.round <= KEPT_DOWNLOADS
        return self._parts.blobs.packed_against(digests) if kept else set()

    def concluded(self, event: Concluded, now: float) -> bool:
        """Take the verdict, if it is on this upload. An accepted one is kept all the same: only a commit makes sure."""
        commit, verdict = self._commit, event.verdict
        if commit is None or event.manifest.version != commit.version or event.manifest.direction != "up":
            return False
        if verdict.accepted:
            self._keep(commit, max(commit.round, verdict.counts_in))
            self.problem = ""
            log.info("upload accepted", round=commit.round, counts_in=self._counts_in, bytes=event.bytes_on_wire)
            self.last_upload_s = now - self._offered_at
            self._backoff.reset()
        elif verdict.reason in TRANSIENT:
            self._try_again(verdict.reason, verdict.detail, now)
        else:
            self._settle(verdict.reason or "refused", verdict.detail)
        return True

    def failed(self, event: Failed, now: float) -> bool:
        """Begin a transfer again that ended without a verdict, by our own disk for example, if it is the upload's."""
        if event.transfer_id != self._transfer_id:
            return False
        self._parts.disk.takes(event.error)
        if self._commit is not None and self._counts_in is None:
            self._try_again("it can't be sent", str(event.error), now)
        return True

    def let_go(self) -> None:
        """The upload's round is over, with it or without; the state it came from stays."""
        if self._counts_in is not None and self._commit is not None:
            log.info("upload's round is over", round=self._commit.round)
            self._parts.records.settle(self._commit.version, "accepted")
            self._commit = None
        else:
            self._settle("dropped", "its round is over")

    def _keep(self, commit: TrainingCommit, counts_in: int) -> None:
        """Keep an upload that counts until its round is over, over a restart too, which else would call it unused."""
        if counts_in != self._counts_in:
            self._counts_in = counts_in
            self._parts.records.settle(commit.version, "accepted", counts_in=counts_in)

    def _manifest(self, commit: TrainingCommit) -> Manifest:
        return Manifest(
            direction="up",
            fleet=self._parts.gate.fleet,
            client_id=self._parts.client_id,
            round=commit.round,
            version=commit.version,
            blobs=commit.upload,
            facts=commit.upload_facts,
        )

    def _try_again(self, reason: str, detail: str, now: float) -> None:
        delay_s = self._backoff.next_s()
        self._offered_to, self._not_before = "", now + delay_s
        self.problem = detail or reason
        log.warning("upload not taken", reason=reason, detail=detail, again_in_s=round(delay_s, 1))

    def _settle(self, outcome: str, detail: str) -> None:
        if self._commit is not None:
            log.warning(
                "upload not used", round=self._commit.round, reason=outcome, detail=detail, next="state is kept"
            )
            self._parts.records.settle(self._commit.version, outcome)
            self._commit, self.problem = None, ""
