"""Downloads, from the committed manifest to the client's verdict."""

from __future__ import annotations

import functools
import itertools

from replayfleet.aggregator.aggregation import RoundResult
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.rounds.machine import Rounds
from replayfleet.aggregator.steps import Step
from replayfleet.aggregator.store import digests_of
from replayfleet.federation.backoff import Backoff, fleet_backoff
from replayfleet.federation.errors import TRANSIENT, ArtefactRejected, MalformedMessage, Reason
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.waits import Why
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.limits import EVERYBODY
from replayfleet.federation.wire.protocol.messages import Manifest, RolledBack
from replayfleet.federation.wire.transport.interfaces import Concluded, Failed

MAX_PREPARING = 4
"""Downloads made for newcomers at a time: they share a worker with the rounds' aggregation."""
CRASHED_AGAIN_S = 5.0
"""After so long a client on which a model's process died gets the round's download anew, then after twice as long, and
so on: not every death is the model's doing, and the round may wait for this client alone."""

_MODELS_FAULTS = frozenset(
    reason.value
    for reason in (
        Reason.PROBE_MISMATCH,
        Reason.LOAD_FAILED,
        Reason.WRONG_LAYOUT,
        Reason.NOT_FINITE,
        Reason.TOO_LARGE,
        Reason.CRASHED,
        Reason.HUNG,
        Reason.TOO_SLOW,
    )
)
"""Why a device refuses a download where another precision may help."""

MAX_OFFERS = 32
"""Clients that are offered a committed round's download in one turn of the loop."""

_log = EventLogger("replayfleet.aggregator.sync.downloads")


class DownloadDesk:
    """Sees to it that every client that is there holds the download of the current round."""

    def __init__(self, parts: Parts, rounds: Rounds) -> None:
        self._parts = parts
        self._rounds = rounds
        self._preparing: set[str] = set()
        self._repaired: set[tuple[str, int]] = set()
        self._counted_broadcast = -1
        self._rolled_back: dict[str, int] = {}
        self._sent_back: dict[str, int] = {}  # client -> version that it refused, or confirmed and rolled back
        self._again: dict[str, tuple[float, Backoff]] = {}  # client -> when to offer again what it couldn't take
        self._crashed: dict[str, tuple[float, int, Backoff]] = {}  # client -> when to provide anew, in which round
        self._unoffered: dict[str, None] = {}  # of the last commit, in order
        self._broadcasted: frozenset[str] = frozenset()  # digests that everybody was sent then

    def provide(self, client_id: str, now: float) -> None:
        """Offer a client the download of the current round; make it first if there is none.

        A client that came back gets the offer even if it confirmed it before: it may have lost its disk. One that is
        gone gets none until then.
        """
        if self._parts.store.leaves_out(client_id) or not self._parts.presence.is_live(client_id):
            return
        self._catch_up(client_id)
        manifest = self._parts.store.download(client_id)
        if manifest is not None and manifest.round == self._rounds.index:
            self._offer(manifest, now)
            return
        self._prepare(client_id, now)

    def hold_back(self, client_id: str, *, for_good: bool = False) -> None:
        """End what is on its way to and from a client; what arrived is kept for a later offer, or isn't."""
        self._again.pop(client_id, None)
        self._sent_back.pop(client_id, None)
        self._crashed.pop(client_id, None)
        self._unoffered.pop(client_id, None)
        self._parts.courier.forget(client_id, for_good=for_good)
        self._parts.arriving.let_go(client_id)

    def forget(self, client_id: str) -> None:
        """A newcomer never confirmed anything: keep nothing of it."""
        self.hold_back(client_id, for_good=True)
        self._rolled_back.pop(client_id, None)
        self._parts.releases.forget(client_id)
        self._parts.store.forget(client_id)

    def _catch_up(self, client_id: str) -> None:
        """A client that serves what this store never sent is ahead of it: the store is older than the fleet."""
        parts, presence = self._parts, self._parts.presence.last(client_id)
        if presence is not None and parts.store.outpace(client_id, presence.serving_version):
            parts.journal.add(
                "client ahead",
                client=client_id,
                version=presence.serving_version,
                round=self._rounds.index,
                detail="it serves what this store never sent; it gets the open round's download as a newer version",
            )

    def _prepare(self, client_id: str, now: float) -> None:
        parts = self._parts
        known = parts.store.places()
        others = {*known, *self._preparing} - {client_id}  # strangers that come at the same time count too
        if client_id not in known and len(others) >= parts.gate.caps.max_clients:
            _log.warning(
                "client not served", client=client_id, reason=f"the fleet is full: {count_of(len(others), 'client')}"
            )
            return
        if client_id in self._preparing or not self._rounds.takes_downloads:
            return  # while a round is aggregated its commit makes downloads for all, and then this is called again
        if client_id not in parts.presence.members and len(self._preparing) >= MAX_PREPARING:
            self._offer_later(client_id, now)
            return
        self._preparing.add(client_id)
        wishes = parts.wishes.of({client_id: parts.store.download(client_id)})
        state, left_out = parts.store.state(), parts.store.left_out()
        work = functools.partial(parts.aggregation.download_for, client_id, self._rounds.index, state, wishes, left_out)

        def failed(error: Exception, now: float) -> None:
            self._preparing.discard(client_id)
            if not parts.disk.takes(error):
                parts.metrics.errors.inc()
                self._offer_later(client_id, now)
            parts.journal.add("download failed", client=client_id, round=self._rounds.index, detail=str(error))

        parts.jobs.submit(work, self._prepared, failed)

    def _prepared(self, draft: Manifest, now: float) -> None:
        """Keep and offer a download that was made; if its round has passed meanwhile, begin again."""
        self._preparing.discard(draft.client_id)
        if not self._parts.presence.knows(draft.client_id):
            return  # it gave its place up meanwhile
        current = self._parts.store.download(draft.client_id)
        if draft.round == self._rounds.index and (current is None or current.round != draft.round):
            self._parts.store.put_download(draft)
            self._parts.checkpoint(Step.DOWNLOAD_PREPARED)
        self.provide(draft.client_id, now)

    def publish(self, result: RoundResult, now: float) -> None:
        """Send a committed round's downloads to all who are there: what they share once, the rest one by one."""
        parts = self._parts
        there = [client for client in parts.presence.live if not parts.store.leaves_out(client)]
        live = [client for client in there if client in result.drafts]
        self._broadcasted = self._broadcast(result, live, now)
        self._unoffered = dict.fromkeys(there)
        self._offer_some(now)

    def _offer_some(self, now: float) -> None:
        """Offer the next few what was published, so that no heartbeat waits for a thousand of them."""
        for client_id in list(itertools.islice(self._unoffered, MAX_OFFERS)):
            self._unoffered.pop(client_id, None)
            if not self._parts.presence.is_live(client_id):
                continue  # when it comes back it is offered its download anyway
            manifest = self._parts.store.download(client_id)
            if manifest is not None and manifest.round == self._rounds.index:
                self._offer(manifest, now, already_sent=self._broadcasted)
            else:
                self.provide(client_id, now)

    def provide_again(self, now: float) -> None:
        """Give who sent the round's download back, or couldn't train from it, a new version: the round waits for them.

        What went wrong may have passed (a board without memory, a client that was killed), and whoever serves the
        new version begins to train at once.
        """
        for client_id in self._parts.presence.live:
            self._provide_anew(client_id, now)

    def _provide_anew(self, client_id: str, now: float) -> None:
        store = self._parts.store
        manifest = None if store.leaves_out(client_id) else store.download(client_id)
        if manifest is None or manifest.round != self._rounds.index:
            return
        presence = self._parts.presence.last(client_id)
        failed = presence is not None and presence.reason == Why.TRAINING_FAILED.value
        if failed or manifest.version == self._sent_back.get(client_id):
            self._again.pop(client_id, None)
            self._offer(store.put_download(manifest), now)

    def tick(self, now: float) -> None:
        """Offer the next of what was published, and again what clients couldn't take for a reason that passes."""
        self._offer_some(now)
        live = frozenset(self._parts.presence.live) if self._again else frozenset()
        for client_id in [client for client, (due, _) in self._again.items() if now >= due]:
            if client_id not in live:
                del self._again[client_id]  # when it comes back it is offered its download anyway
                continue
            self._again[client_id] = (float("inf"), self._again[client_id][1])
            self.provide(client_id, now)
        for client_id, (due, index, backoff) in list(self._crashed.items()):
            if now >= due and client_id in self._parts.presence.live:
                self._crashed[client_id] = (float("inf"), index, backoff)
                self._provide_anew(client_id, now)

    def failed(self, event: Failed, now: float) -> None:
        """A transfer ended without a verdict; if it was a download, our own disk failed it."""
        if event.peer != EVERYBODY:
            self._offer_later(event.peer, now)

    def _offer_later(self, client_id: str, now: float) -> None:
        _, backoff = self._again.get(client_id, (0.0, fleet_backoff()))
        self._again[client_id] = (now + backoff.next_s(), backoff)

    def concluded(self, event: Concluded, now: float) -> None:
        """Remember what a client confirmed, or note why it refused."""
        parts, manifest, verdict = self._parts, event.manifest, event.verdict
        if manifest.client_id == EVERYBODY:
            self._shared_concluded(event)
            return
        if verdict.accepted:
            self._sent_back.pop(event.peer, None)
            self._again.pop(event.peer, None)
            parts.store.confirm(manifest)
            parts.ring.keep(event.peer)
            parts.journal.add(
                "download confirmed",
                round=manifest.round,
                client=event.peer,
                version=manifest.version,
                bytes=event.bytes_on_wire,
            )
            return
        repeated = self._sent_back.get(event.peer) == manifest.version
        self._sent_back[event.peer] = manifest.version
        if verdict.reason in TRANSIENT:
            self._offer_later(event.peer, now)
            if repeated:
                return
        parts.journal.add(
            "download refused",
            round=manifest.round,
            client=event.peer,
            version=manifest.version,
            reason=verdict.reason,
            detail=verdict.detail,
        )
        if verdict.reason == Reason.CRASHED.value:
            self._make_anew_later(event.peer, now)
        if verdict.reason in _MODELS_FAULTS:
            self._float32_instead(manifest, f"{verdict.reason}, {verdict.detail}", now)

    def rolled_back(self, told: RolledBack, now: float) -> None:
        """Note that a client took back what it had confirmed. It waits for another download."""
        parts = self._parts
        offered = parts.store.download(told.client_id)
        newest = offered.version if offered is not None else -1
        if not self._rolled_back.get(told.client_id, -1) < told.version <= newest or told.round > self._rounds.index:
            return  # a repetition, or about nothing that we sent
        self._rolled_back[told.client_id] = self._sent_back[told.client_id] = told.version
        if told.reason == Reason.CRASHED.value:
            self._make_anew_later(told.client_id, now)
        parts.journal.add(
            "model rolled back",
            round=told.round,
            client=told.client_id,
            version=told.version,
            serving=told.serving_version,
            reason=told.reason,
            detail=told.detail,
        )
        if offered is not None and offered.version == told.version:
            self._float32_instead(offered, f"{told.reason}, {told.detail}", now)

    def _make_anew_later(self, client_id: str, now: float) -> None:
        _, index, backoff = self._crashed.get(client_id, (0.0, -1, Backoff()))
        backoff = backoff if index == self._rounds.index else Backoff(CRASHED_AGAIN_S, longest_s=86400.0)
        self._crashed[client_id] = (now + backoff.next_s(), self._rounds.index, backoff)

    def _float32_instead(self, manifest: Manifest, why: str, now: float) -> None:
        """Give a client that can't serve a rounded model the float32 one, now and from now on."""
        client_id, store = manifest.client_id, self._parts.store
        if not self._parts.wishes.refuse(manifest, why):
            return
        newest = store.download(client_id)
        if newest is not None and (newest.version, newest.round) == (manifest.version, self._rounds.index):
            store.drop_download(client_id)
            self._prepare(client_id, now)

    def _broadcast(self, result: RoundResult, live: list[str], now: float) -> frozenset[str]:
        """Send shared blobs that somebody lacks on the shared topic; returns their digests."""
        if len(live) < 2:
            return frozenset()
        entries = tuple(entry for entry in result.drafts[live[0]].blobs if entry.shared)
        held = [self._parts.store.holdings(client) for client in live]
        missing = frozenset(entry.digest for entry in entries if not all(entry.digest in holdings for holdings in held))
        if not missing:
            return missing
        manifest = Manifest(
            direction="down",
            fleet=self._parts.spec.fleet,
            client_id=EVERYBODY,
            round=self._rounds.index,
            version=self._rounds.index,
            blobs=tuple(entry for entry in entries if entry.digest in missing),
        )
        packs = all(self._packs(client) for client in live)
        bases = frozenset.intersection(*map(frozenset, held)) if packs else None
        try:
            self._parts.courier.send(EVERYBODY, manifest, sorted(missing), now, bases=bases)
        except (KeyError, OSError, ArtefactRejected, MalformedMessage) as error:
            if self._parts.disk.takes(error):
                raise  # all of it is begun again
            # An own offer mends what is damaged here, and is tried again where a descriptor was missing.
            _log.warning("shared download not sent", reason=repr(error), next="each client is sent its own")
            return frozenset()
        return missing

    def _shared_concluded(self, event: Concluded) -> None:
        if event.manifest.round > self._counted_broadcast:  # it went out once, however many confirm it
            self._counted_broadcast = event.manifest.round
            self._parts.journal.add(
                "shared download sent",
                round=event.manifest.round,
                blobs=len(event.manifest.blobs),
                bytes=event.bytes_on_wire,
            )
        if event.verdict.accepted and self._parts.presence.knows(event.peer):
            self._parts.store.hold(event.peer, digests_of(event.manifest))

    def _packs(self, client_id: str) -> bool:
        """Whether a client says that it takes packed blobs."""
        presence = self._parts.presence.last(client_id)
        return presence is not None and "packed" in presence.decodes

    def _offer(self, manifest: Manifest, now: float, already_sent: frozenset[str] = frozenset()) -> None:
        client_id = manifest.client_id
        skip = self._parts.store.holdings(client_id) | already_sent
        missing = dict.fromkeys(entry.digest for entry in manifest.blobs if entry.digest not in skip)
        try:
            presence, signed = self._parts.presence.last(client_id), self._parts.releases.signed(manifest)
            boot = presence.boot_id if presence else ""
            bases = skip if self._packs(client_id) else None
            self._parts.courier.send(client_id, signed, tuple(missing), now, boot, bases)
        except OSError as error:
            _log.warning("download not offered", client=client_id, reason=error, next="trying again")
            self._offer_later(client_id, now)
        except (KeyError, ArtefactRejected, MalformedMessage) as error:
            self._parts.journal.add("download failed", client=client_id, round=manifest.round, detail=repr(error))
            if (client_id, manifest.round) not in self._repaired:  # a blob was damaged on our disk: make it again
                self._repaired.add((client_id, manifest.round))
                self._parts.store.drop_download(client_id)
                self._prepare(client_id, now)
