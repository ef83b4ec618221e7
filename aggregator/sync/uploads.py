"""Uploads, from the offer to the verdict: nothing is acknowledged before it is durable."""

from __future__ import annotations

from replayfleet.aggregator.admission import decode_upload, what_next
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.rounds.machine import Rounds
from replayfleet.aggregator.steps import Step
from replayfleet.federation.errors import Reason, UploadRejected, told
from replayfleet.federation.methods.kit.packing import sub_generators_among
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.messages import Manifest
from replayfleet.federation.wire.transport.interfaces import Arrived, Event, Failed, Offered

MAX_NOTED_FACTS_BYTES = 4096
"""The journal shows the facts of an upload if they are this small."""

_log = EventLogger("replayfleet.aggregator.sync.uploads")


class UploadDesk:
    """Decides on offers and on what arrived."""

    def __init__(self, parts: Parts, rounds: Rounds) -> None:
        self._parts = parts
        self._rounds = rounds
        self.marks = {client: held.mark for client, held in parts.store.uploads(rounds.index).items()}
        """Of each upload that counts for the round, by client; announced, so that each client finds its own."""

    def offered(self, event: Offered, now: float) -> list[Event]:
        """Receive, refuse, or repeat the verdict on what was accepted before; returns what the courier says to it."""
        parts, offer = self._parts, event.offer
        manifest = offer.manifest
        if not parts.presence.knows(event.peer):
            parts.courier.refuse(event.peer, offer, Reason.BUSY.value, "not known yet; say that you are there", now)
            return []
        if parts.disk.problem:
            parts.courier.refuse(event.peer, offer, Reason.BUSY.value, parts.disk.problem, now)
            return []
        index = self._rounds.index
        counts_in = parts.store.counts_in(event.peer, manifest, index) if manifest.direction == "up" else None
        if counts_in is not None:  # its verdict got lost on the way
            parts.courier.conclude(event.peer, manifest, offer.transfer_id, accepted=True, counts_in=counts_in)
            return []
        known = parts.store.has_place(event.peer)
        num_known = 0 if known else len(parts.store.places())
        try:
            self._check_standing(event.peer)
            parts.gate.check_offer(event.peer, offer, self._rounds, num_known, known=known)
            self._check_epoch(event.peer, manifest)
        except UploadRejected as rejected:
            detail = self._note_rejection(event.peer, manifest, rejected, 0)
            parts.courier.refuse(event.peer, offer, rejected.reason.value, detail, now)
            return []
        parts.arriving.begin(event.peer, offer.manifest)
        return parts.courier.accept(event.peer, offer, now)

    def arrived(self, event: Arrived) -> None:
        """Check the upload, make it durable, then tell the client."""
        parts, manifest = self._parts, event.manifest
        parts.checkpoint(Step.UPLOAD_ARRIVED)
        try:
            facts = self._accept_or_wait(event)
        except UploadRejected as rejected:
            parts.arriving.begin(event.peer, manifest)
            if not self._counts_soon(rejected):
                parts.arriving.let_go(event.peer)
            detail = self._note_rejection(event.peer, manifest, rejected, event.bytes_on_wire)
            reason = rejected.reason.value
            parts.courier.conclude(
                event.peer, manifest, event.transfer_id, accepted=False, reason=reason, detail=detail
            )
            return
        except Exception as error:  # no descriptor, no memory: without a verdict nobody would look at it again
            busy, why = Reason.BUSY.value, f"it can't be looked at now ({told(error)})"
            parts.courier.conclude(event.peer, manifest, event.transfer_id, accepted=False, reason=busy, detail=why)
            raise
        parts.arriving.keep(event.peer)
        parts.checkpoint(Step.UPLOAD_STORED)
        self._rounds.accept(event.peer)
        self.marks[event.peer] = manifest.mark
        self._note_acceptance(event, facts)
        parts.courier.conclude(event.peer, manifest, event.transfer_id, accepted=True, counts_in=self._rounds.index)
        parts.checkpoint(Step.UPLOAD_CONCLUDED)

    def failed(self, event: Failed) -> None:
        """Note that a transfer ended without a verdict; the client offers again."""
        self._parts.arriving.let_go(event.peer)
        self._parts.disk.takes(event.error)
        self._parts.journal.add("transfer failed", client=event.peer, detail=str(event.error))

    def _accept_or_wait(self, event: Arrived) -> dict[str, object]:
        try:
            return self._accept(event)
        except UploadRejected:
            raise
        except Exception as error:
            if not self._parts.disk.takes(error):
                raise
            raise UploadRejected(Reason.BUSY, f"it can't be kept ({self._parts.disk.problem})") from error

    def _check_standing(self, peer: str) -> None:
        if self._parts.store.roll.excludes(peer):
            raise UploadRejected(Reason.EXCLUDED, "this client takes no part; the fleet's operator may readmit it")
        if why := self._parts.store.shut_out(peer):  # since its offer was taken
            raise UploadRejected(Reason.EXCLUDED, f"this client {why}")

    def _check_epoch(self, peer: str, manifest: Manifest) -> None:
        """Refuse what was trained in another epoch than the client's download; where it has none, in an earlier one."""
        store = self._parts.store
        download, epoch = store.download(peer), store.epoch()
        if manifest.epoch < epoch if download is None else manifest.epoch != download.epoch:
            raise UploadRejected(
                Reason.WRONG_ROUND,
                f"upload was trained in epoch {manifest.epoch}, the client's download is of epoch "
                f"{epoch if download is None else download.epoch}; the client trains the round from that",
            )

    def _accept(self, event: Arrived) -> dict[str, object]:
        parts, manifest = self._parts, event.manifest
        self._check_standing(event.peer)
        parts.gate.check_round(manifest, self._rounds, event.peer)
        self._check_epoch(event.peer, manifest)
        try:
            upload = decode_upload(parts.method, manifest, parts.blobs, parts.gate.layout)
        except KeyError as error:
            raise UploadRejected(Reason.WRONG_DIGEST, f"blob {error} got lost on the way; send it again") from error
        # Before it is durable, for what this raises has the upload offered again.
        facts = dict(upload.pack().facts) if len(manifest.facts) <= MAX_NOTED_FACTS_BYTES else {}
        if not parts.store.accept_upload(manifest, event.bytes_on_wire, self._rounds.index):
            raise UploadRejected(Reason.WRONG_ROUND, f"round {self._rounds.index} was closed meanwhile")
        return facts

    def _counts_soon(self, rejected: UploadRejected) -> bool:
        """Whether the next round takes it, and nothing is wrong: what has arrived of it stays."""
        return rejected.reason is Reason.BUSY and not self._parts.disk.problem

    def _note_rejection(self, peer: str, manifest: Manifest, rejected: UploadRejected, bytes_on_wire: int) -> str:
        parts = self._parts
        if self._counts_soon(rejected):
            return f"{rejected.detail}; it is offered again, for the next one"
        parts.journal.add(
            "upload rejected",
            round=manifest.round,
            client=peer,
            reason=rejected.reason.value,
            detail=rejected.detail,
            bytes=bytes_on_wire,
            next=what_next(self._rounds),
        )
        return f"{rejected.detail}; {what_next(self._rounds)}"[:1000]

    def _note_acceptance(self, event: Arrived, facts: dict[str, object]) -> None:
        parts, manifest = self._parts, event.manifest
        late = self._rounds.index - manifest.round
        parts.ring.keep(event.peer)  # it may have trained from a download that it couldn't serve, and never confirmed
        parts.journal.add(
            "upload accepted",
            details={"facts": facts},
            **({"rounds_late": late} if late else {}),
            round=self._rounds.index,
            client=event.peer,
            version=manifest.version,
            blobs=len(manifest.blobs),
            sub_generators=len(sub_generators_among(parts.method.Upload, (blob.name for blob in manifest.blobs))),
            bytes=event.bytes_on_wire,
            uploads=self._rounds.num_accepted,
        )
