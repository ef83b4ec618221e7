"""Downloads, from the aggregator's offer to the verdict: receive, install, hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from replayfleet.edge_client.serving.slot import RollBack, ServedModel
from replayfleet.edge_client.state_store import Choice, HeldDownload, SentAway, spec_digest
from replayfleet.edge_client.sync.download import candidate, is_same, serves_best
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.edge_client.sync.reports import ReportDesk
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import BlobEntry, FleetSpec, Manifest, RolledBack
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.interfaces import Arrived, Event, Failed, Offered
from replayfleet.models.specs import AnyTaskSpec

log = EventLogger(__name__)

AGAIN_S, LONGEST_S = 2.0, 600.0
"""After so long a stored model is tried again whose process couldn't be had, died or hung: not always its doing."""
STARVED_S = 60.0
"""No later is a download tried again for which there was no process or no memory: each try costs a second of a core,
and memory, and it is offered every 3 s."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the fleet agreed on, and the task that it makes."""

    spec: FleetSpec
    task: AnyTaskSpec
    digest: str


def agreement(spec: FleetSpec) -> Agreement:
    """Return an agreement with its task.

    Raises:
        SettingsError: The task is not one that this build knows.
    """
    return Agreement(spec, task_of(spec), spec_digest(spec))


@dataclass(frozen=True, slots=True)
class Installed:
    """A served download, how long the swap took, loading included, and whether it still has to be confirmed."""

    served: ServedModel
    swap_s: float
    on_probation: bool


class DownloadDesk:
    """Sees to it that the newest download is served and held on disk.

    Args:
        parts: collaborators.
        reports: measure what is served.
    """

    def __init__(self, parts: Parts, reports: ReportDesk) -> None:
        self._parts, self._reports = parts, reports
        gone = parts.records.begin()
        self._held = parts.records.held()
        if gone is not None and self._held is not None:
            log.error(
                "model rolled back",
                failed_version=gone.version,
                version=self._held.manifest.version,
                reason=gone.reason,
                detail=gone.detail,
            )
        self._sent_away = parts.records.sent_away()
        self._on_probation = parts.records.on_probation
        self._seen_rollback: RollBack | None = None
        self._installing: Arrived | None = None
        self._arrived: Callable[[], None] | None = None
        self._undecided: tuple[Arrived, Agreement] | None = None
        self._untold: tuple[str, Manifest, str] | None = None
        self._shared: Manifest | None = None
        self._shared_bytes = 0
        self._collect_due = True
        self._again_at, self._backoff = math.inf, Backoff(AGAIN_S, LONGEST_S)
        self._put_off, self._starving = (-1, 0.0), Backoff(AGAIN_S, STARVED_S)  # (version, until when)
        self.problem = ""
        """Why the newest download isn't served; empty if it is, or none came."""
        self.coming: HeldDownload | None = None
        """What arrived, is verified and is about to be served; None if there is none, or a choice has to be made."""

    @property
    def held(self) -> HeldDownload | None:
        return self._held

    @property
    def sent_away(self) -> SentAway | None:
        """The download that was rolled back last, unless a newer one is held."""
        gone, held = self._sent_away, self._held
        return gone if gone is not None and (held is None or held.manifest.version < gone.version) else None

    def serve_from_disk(self) -> None:
        """Serve the last good model at once, whether or not anybody can be reached.

        One that is still on probation takes the place of the one before it, so that there is a way back.
        """
        if self._held is None:
            return
        previous = self._parts.records.previous()
        if self._on_probation and previous is not None:
            self._install_from_disk([previous])
            self._install_from_disk([self._held])
        else:
            self._install_from_disk([self._held, previous])

    def serve_again(self, now: float) -> None:
        """Serve from disk what couldn't be for a reason that passes, unless it serves by now. Call often."""
        if now >= self._again_at and self._installing is None:
            self._again_at = math.inf
            if self._held is not None and not self._serves(self._held.served):
                self.serve_from_disk()

    def follow_slot(self) -> None:
        """Make durable, and tell, what became of the served model: confirmed, or rolled back. Call often.

        A version that was rolled back before its swap was noted is dealt with once that is.
        """
        slot, held = self._parts.slot, self._held
        if held is None:
            return
        rollback, version = slot.last_rollback, held.manifest.version
        if rollback is not None and rollback is not self._seen_rollback and rollback.version == version:
            self._seen_rollback = rollback
            why = rollback.reason.value, rollback.detail
            self._send_away(SentAway(rollback.version, rollback.round, *why, held.manifest.release))
        elif self._on_probation and slot.on_probation is None:
            served = slot.active
            if served is not None and served.version == version:
                self._on_probation = False
                self._parts.records.confirm(version)

    def stop(self) -> None:
        """Say that the client stops as it should."""
        self.follow_slot()
        self._parts.records.goodbye()

    def repeat_rollback(self) -> None:
        """Tell (again) what was rolled back: the aggregator may not know."""
        gone, parts = self.sent_away, self._parts
        if gone is not None:
            serving = -1 if self._held is None else self._held.manifest.version
            told = RolledBack(parts.client_id, gone.round, gone.version, serving, gone.reason, gone.detail)
            parts.publish(topic_of(parts.gate.fleet, "control", parts.client_id), encode(told), False)

    def offered(self, event: Offered, now: float) -> list[Event]:
        """Receive, refuse, or confirm again; returns what the courier says to it."""
        parts, offer = self._parts, event.offer
        if event.peer != EVERYBODY and offer.answers != parts.boot_id:
            log.debug("offer passed over", reason="it answers another process than this one")
            return []  # the aggregator will hear of this one
        held = None if self._held is None else self._held.manifest
        if self._held is not None and is_same(offer.manifest, held) and self._serves(self._held.served):
            self._tell(event.peer, offer.manifest, offer.transfer_id)
            return []
        try:
            # Whoever made what counts for nothing now, and neither does its version.
            gone = self._sent_away
            sent_away = gone.version if gone is not None and parts.trust.vouches_for(gone.release) else -1
            if held is not None and not parts.trust.vouches_for(held.release):
                held = None
            parts.gate.check(event.peer, offer.manifest, held, sent_away)
            if event.peer != EVERYBODY:
                parts.trust.check(offer.manifest)
        except ArtefactRejected as refused:
            self.problem = str(refused)
            log.warning("download refused", version=offer.manifest.version, reason=refused, next="still serving")
            parts.courier.refuse(event.peer, offer, refused.reason.value, refused.detail[:1000], now)
            return []
        version, until = self._put_off
        if parts.disk.problem or (version == offer.manifest.version and now < until):
            parts.courier.refuse(event.peer, offer, Reason.BUSY.value, parts.disk.problem or self.problem, now)
            return []
        parts.receiving[offer.transfer_id] = offer.manifest
        return parts.courier.accept(event.peer, offer, now)

    def arrived(self, event: Arrived, agreed: Agreement) -> None:
        """Take what arrived, to be installed; the verdict comes when it serves, or doesn't."""
        parts, manifest = self._parts, event.manifest
        if event.peer == EVERYBODY:
            self._shared = manifest
            self._shared_bytes += event.bytes_on_wire
            parts.receiving.pop(event.transfer_id, None)
            parts.courier.conclude(event.peer, manifest, event.transfer_id, accepted=True)
            return
        if self._installing is not None and is_same(manifest, self._installing.manifest):
            if event.transfer_id != self._installing.transfer_id:  # or else that one's verdict is this one's
                parts.receiving.pop(event.transfer_id, None)
                self._refuse(event, ArtefactRejected(Reason.BUSY, "it is being installed already"))
            return
        self._overtake()
        self.install()
        self._installing = event
        if serves_best(agreed.spec) and manifest.round >= 1 and parts.compute.trains:
            self._undecided, self.coming = (event, agreed), None  # until ``decide``
        else:
            self.coming = HeldDownload(manifest, agreed.spec)
            self._arrived = partial(self._serve, event, agreed, self.coming)  # until ``install``

    def install(self) -> None:
        """Install what arrived, if something did: after training asked for the round's samples, to go on beside it."""
        serve, self._arrived = self._arrived, None
        if serve is not None:
            serve()

    def to_choose(self) -> tuple[Manifest, BlobEntry | None] | None:
        """What arrived and waits for a choice, and what is served now, to be a candidate; None if nothing waits."""
        if self._undecided is None:
            return None
        event, agreed = self._undecided
        held = self._held
        # What round 0 began with was nobody's choice.
        if held is None or held.manifest.round < 1 or held.spec != agreed.spec or held.served.serving is None:
            return event.manifest, None
        model = held.served.serving.model
        return event.manifest, next(entry for entry in held.served.blobs if entry.name == model)

    def decide(self, version: int, choice: Choice | None) -> None:
        """Serve what was chosen of the download ``version``; with None, for want of evidence, what was downloaded."""
        if self._undecided is None or self._undecided[0].manifest.version != version:
            return  # overtaken
        (event, agreed), self._undecided = self._undecided, None
        if choice is not None:
            log.info("model chosen", version=version, round=event.manifest.round, served=choice.text)
        self._serve(event, agreed, HeldDownload(event.manifest, agreed.spec, choice))

    def _overtake(self) -> None:
        """Let go of a download that waits for a choice: a newer one is there."""
        if self._undecided is None:
            return
        (event, _), self._undecided = self._undecided, None
        self._finish(event)
        self._refuse(event, ArtefactRejected(Reason.STALE_VERSION, "a newer one is there"))

    def _refuse(self, event: Arrived, why: ArtefactRejected) -> None:
        self._parts.courier.conclude(
            event.peer,
            event.manifest,
            event.transfer_id,
            accepted=False,
            reason=why.reason.value,
            detail=why.detail[:1000],
        )

    def _serve(self, event: Arrived, agreed: Agreement, download: HeldDownload) -> None:
        """Install a download, or what was chosen in its place; the verdict comes when that serves, or doesn't."""
        parts, manifest = self._parts, event.manifest
        shown = download.served

        def installed(done: Installed, now: float) -> None:
            self.problem = ""
            self._starving.reset()
            noticed = "" if self._held is None else self._held.manifest.notice
            self._finish(event)
            self._hold(download, on_probation=done.on_probation)
            self._tell(event.peer, manifest, event.transfer_id)
            log.info("model swapped", version=manifest.version, round=manifest.round, swap_s=round(done.swap_s, 4))
            if manifest.notice not in {"", noticed}:
                log.warning("the aggregator's notice", version=manifest.version, notice=manifest.notice)
            down = {"swap_s": done.swap_s, "bytes_down": float(event.bytes_on_wire + self._shared_bytes)}
            self._shared_bytes = 0
            self._reports.measure(done.served, _measures_of(download.choice) | down)
            self.follow_slot()

        def failed(error: Exception, now: float) -> None:
            if download.choice is not None and isinstance(error, ArtefactRejected):
                log.warning(
                    "chosen model can't be served", version=manifest.version, reason=error, next="as downloaded"
                )
                self._serve(event, agreed, HeldDownload(manifest, agreed.spec))
                return
            self._finish(event)
            self._collect_due = True
            # What is no fault of the download passes: a disk that is full, a process that can't be started.
            refused = error if isinstance(error, ArtefactRejected) else ArtefactRejected(Reason.BUSY, str(error))
            if refused is not error:
                self._put_off = manifest.version, now + self._starving.next_s()
            self.problem = str(refused)
            log.warning("download refused", version=manifest.version, reason=refused, next="still serving")
            self._refuse(event, refused)

        parts.jobs.submit(lambda: self._install(shown, agreed.task), installed, failed)

    def failed(self, event: Failed) -> None:
        """A transfer ended without a verdict; the aggregator offers again."""
        self._parts.receiving.pop(event.transfer_id, None)
        self._parts.disk.takes(event.error)
        log.warning("download failed", reason=event.error, next="waiting for another offer")

    def tell_held(self) -> None:
        """Confirm the held download to the aggregator, as soon as its record is on disk. Call often."""
        if self._untold is not None and self._parts.disk.settled:
            (peer, manifest, transfer_id), self._untold = self._untold, None
            self._parts.courier.conclude(peer, manifest, transfer_id, accepted=True)

    def collect_soon(self) -> None:
        """Have ``collect_if_due`` look."""
        self._collect_due = True

    def collect_if_due(self) -> None:
        """Delete blobs that nothing needs any more, once after every swap; call while no training runs."""
        if not (self._collect_due and self._parts.disk.is_there()):
            return
        self._collect_due = False
        parts = self._parts
        installing = None if self._installing is None else self._installing.manifest
        manifests = [*parts.receiving.values(), self._shared, installing]
        keep = {entry.digest for manifest in manifests if manifest is not None for entry in manifest.blobs}
        removed = parts.blobs.collect(keep | parts.records.blobs_in_use())
        log.debug("blobs collected", removed=removed)

    def _install(self, manifest: Manifest, task: AnyTaskSpec) -> Installed:
        parts = self._parts
        began = parts.clock()
        served = parts.slot.install(candidate(manifest, task, parts.workers))
        if parts.engines is not None:
            parts.engines.want(served)
        return Installed(served, parts.clock() - began, on_probation=parts.slot.previous is not None)

    def _install_from_disk(self, candidates: list[HeldDownload | None]) -> None:
        download = candidates.pop(0) if candidates else None
        if download is None:
            return
        manifest = download.manifest

        def failed(error: Exception, now: float) -> None:
            log.error("stored model can't be served", version=manifest.version, reason=error)
            refused = error.reason if isinstance(error, ArtefactRejected) else None
            if refused is not None and self._on_probation and self._held is download:
                why = refused.value, str(error)[:300]
                self._send_away(SentAway(manifest.version, manifest.round, *why, manifest.release))
            elif refused in {None, Reason.CRASHED, Reason.HUNG}:
                self._again_at = now + self._backoff.next_s()
            self._install_from_disk(candidates)

        def installed(done: Installed, now: float) -> None:
            log.info("serving from disk", version=manifest.version, round=manifest.round)
            if self._held is download or not self._on_probation:
                self._reports.measure_unless_reported()

        task = agreement(download.spec).task
        self._parts.jobs.submit(lambda: self._install(download.served, task), installed, failed)

    def _tell(self, peer: str, manifest: Manifest, transfer_id: str) -> None:
        self._untold = (peer, manifest, transfer_id)
        self.tell_held()

    def _finish(self, event: Arrived) -> None:
        self._parts.receiving.pop(event.transfer_id, None)
        if self._installing is event:
            self._installing = self.coming = None

    def _hold(self, held: HeldDownload, *, on_probation: bool) -> None:
        self._held = held
        self._parts.records.hold(self._held, on_probation=on_probation)
        self._on_probation = self._parts.records.on_probation
        self._collect_due = True

    def _send_away(self, gone: SentAway) -> None:
        """Hold the previous download again, for good, and tell."""
        back = self._parts.records.send_away(gone)
        if back is None:
            log.error("nothing to return to", version=gone.version, reason=gone.reason, next="still held")
            return
        self._held, self._sent_away, self._on_probation = back, gone, False
        self._collect_due = True
        self.repeat_rollback()

    def _serves(self, manifest: Manifest) -> bool:
        served = self._parts.slot.active
        complete = all(self._parts.blobs.has(entry.digest) for entry in manifest.blobs)
        return complete and served is not None and served.version == manifest.version


def _measures_of(choice: Choice | None) -> dict[str, float]:
    """Return what a report says of a choice; sums of shares are off by rounding, so they are bounded."""
    if choice is None:
        return {}
    scores = {f"evidence/{name}": min(1.0, max(0.0, share)) for name, share in choice.scores.items()}
    return {**scores, f"served/{choice.name}": 1.0, "served_gain": choice.gain}
