"""The run: connects rounds, uploads, downloads and aggregation; called by one loop, owns no thread, socket or clock."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from replayfleet.aggregator.aggregation import RoundResult
from replayfleet.aggregator.chronicle import Chronicle
from replayfleet.aggregator.control.desk import ControlDesk
from replayfleet.aggregator.leading import Deed
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.presence import DEAD_AFTER_S, Change
from replayfleet.aggregator.records.roll import expected_uploads
from replayfleet.aggregator.rounds.machine import Decision, Phase, Rounds
from replayfleet.aggregator.rounds.opening import Signs, since
from replayfleet.aggregator.steps import Step
from replayfleet.aggregator.store import digests_of
from replayfleet.aggregator.sync.downloads import DownloadDesk
from replayfleet.aggregator.sync.finish import Finish
from replayfleet.aggregator.sync.uploads import UploadDesk
from replayfleet.federation.errors import ReplayfleetError, is_out_of_memory, told
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.limits import MAX_HOLDS
from replayfleet.federation.wire.protocol.messages import (
    ENCODINGS,
    Announcement,
    Presence,
    Report,
    RolledBack,
    client_mark,
)
from replayfleet.federation.wire.transport.interfaces import Arrived, Concluded, Event, Failed, Offered, Received

ANNOUNCE_EVERY_S = 10.0
"""The announcement is retained with the seconds that are left, so it is renewed; it also shows that we live."""

ANSWER_EVERY_S = 0.3
"""Others who announce or ask are answered at once, but not more often."""

FRESH_S = 1.0
"""A client that comes online plans its round by what is left: it gets an announcement at most this old."""

LIST_EVERY_S = 1.0
"""How often the store is asked who its members are."""

MAX_LITTER_BYTES = 256 << 20
"""Blobs of uploads that came to nothing go with the next commit, if they are so many, or if the disk needs the room."""
MAX_REPORTS = 16
"""Reports of a client that are noted while a round is open: one comes for each download that it gets."""
SEEN_EVERY_S = 60.0
"""How often the store is told when members were heard of."""
TURNED_EVERY_S = 5.0
"""And how often at most that one began or ceased to train: each time it writes."""

_log = EventLogger("aggregator")


class Coordinator:
    """Feeds every event to whom it concerns; a restart continues where the store says.

    Args:
        parts: collaborators.
        now: the loop's clock, in seconds; never runs backwards.
    """

    def __init__(self, parts: Parts, now: float) -> None:
        self._parts = parts
        record = parts.store.round()
        self.rounds = Rounds(
            parts.rules,
            now,
            index=record.index,
            accepted=record.accepted,
            closed=record.phase is Phase.AGGREGATING,
            begun=parts.store.begun(record.index),
        )
        self.rounds.steer(parts.store.course(), now)
        self.rounds.extend(parts.store.extension_s(record.index), now)
        self._uploads = UploadDesk(parts, self.rounds)
        self._downloads = DownloadDesk(parts, self.rounds)
        self._chronicle = Chronicle(parts, self.rounds, now)
        self.control = ControlDesk(parts, self.rounds, self)
        self._announced_at = now
        self._seen_at = now - SEEN_EVERY_S
        self._list_members(now)
        self._began_at = now
        self._answer_due = False
        self._outlived: Announcement | None = None
        self._collect_due = True
        self._aggregates = self._aggregates_again = self._aggregation_waits = False
        self._reported: dict[str, int] = {}
        self._num_reports = Counter[str]()
        self.finish = Finish(self.rounds, parts.presence, parts.store, self._reported, parts.courier.advanced_at)

    def start(self, now: float) -> None:
        """Lead, unless others have to be asked first; that begins with the connection."""
        self._parts.disk.tick(now)  # it knows the time from before the models were exported, which may take a minute
        if not self._parts.leadership.must_ask:
            self._do(self._parts.leadership.connected(now), now)

    @property
    def leads(self) -> bool:
        """Whether this aggregator leads its fleet, or another one does."""
        return self._parts.leadership.leads

    @property
    def notice(self) -> str:
        """Why it doesn't lead; empty if it does."""
        return self._parts.leadership.notice

    def over(self, now: float) -> bool:
        """Whether the process may end."""
        return self.leads and self.finish.over(now)

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        """Take a message from the network."""
        self._handle(self._parts.courier.handle(topic, payload, now), now)

    def on_connected(self, now: float) -> None:
        """The broker accepted us (again): repeat what it may have lost."""
        self._do(self._parts.leadership.connected(now), now)
        self._announce(now)
        self._parts.courier.resume(now)

    def tick(self, now: float) -> None:
        """Let time pass; call at least every 0.2 s."""
        parts = self._parts
        if not (parts.disk.problem and parts.leadership.stands_by):  # who can't raise the epoch can't take over
            self._do(parts.leadership.tick(now), now)
        if now - self._listed_at >= LIST_EVERY_S:
            self._list_members(now)
            self._forget_ghosts(now)
            self._note_who_was_seen(now)
            if parts.leadership.leads and not parts.disk.problem:
                parts.disk.do(lambda now: self.control.tell())  # `enroll`, `renew` and `revoke` write deeds beside us
        if parts.disk.tick(now):
            self._on_disk(now)
        if not parts.leadership.leads:
            parts.presence.expire(now)
            return
        self._handle(parts.courier.tick(now), now)
        self._downloads.tick(now)
        for client_id in parts.presence.expire(now):
            self._gone(client_id, "silent")
        self._decide(now)
        if now - self._announced_at >= (ANSWER_EVERY_S if self._answer_due else ANNOUNCE_EVERY_S):
            self._announce(now)
        if parts.arriving.litter_bytes > (0 if parts.disk.problem else MAX_LITTER_BYTES):
            self._collect_due = True
        if self._collect_due and parts.jobs.idle and parts.disk.settled and parts.disk.is_there():
            self._collect_due = False
            self._collect()

    def tell_fleet(self, now: float) -> None:
        """Announce who takes part, and whether rounds go on; the next tick sees whether the round is over."""
        self._list_members(now)
        self._announce(now)

    def round_closed(self, now: float) -> None:
        """Aggregate the round that an operator closed, which is durable."""
        self._parts.disk.do(functools.partial(self._close, Decision.CLOSE_OPERATOR))

    def left_out(self, client_id: str) -> None:
        """Send a client nothing more, and receive nothing."""
        self._uploads.marks.pop(client_id, None)
        self._downloads.hold_back(client_id)

    def provide(self, client_id: str, now: float) -> None:
        """Offer a client that is there the round's download."""
        self._downloads.provide(client_id, now)

    def farewell(self, now: float) -> None:
        """Say that we stop; a finished run stays announced as finished."""
        if self._parts.leadership.leads and self.rounds.phase is not Phase.FINISHED:
            self._announce(now, state="offline")
        self._seen_at = float("-inf")
        with contextlib.suppress(sqlite3.Error):  # of a store that is closed already, or damaged
            self._note_who_was_seen(now)

    def _list_members(self, now: float) -> None:
        parts = self._parts
        self._listed_at, parts.presence.members = now, parts.store.members()
        standings = parts.store.roll.standings
        self._leave_out_who_counts_no_more()
        for client_id in parts.store.roll.revoked & parts.metrics.reported.keys():
            del parts.metrics.reported[client_id]
        self.rounds.expected = expected_uploads(parts.rules.num_clients, standings.values())
        if self.rounds.rests:
            expected = [client for client, standing in standings.items() if standing.is_expected]
            num_samples = parts.presence.samples_waiting(expected, self.rounds.index)
            lowest = parts.presence.least_accurate(expected, self.rounds.index)
            wall_s = parts.wall_clock()
            begins_s = since(self.rounds.signs, parts.store.round().opened_at, wall_s)
            self.rounds.signs = Signs(num_samples, wall_s, begins_s, *lowest)

    def _leave_out_who_counts_no_more(self) -> None:
        """Send nothing to those who were revoked, or never enrolled, and take their uploads out of the open round."""
        parts = self._parts
        if not parts.leadership.leads:
            return
        for client_id in parts.presence.live:
            if parts.store.shut_out(client_id):
                self.left_out(client_id)
        if not self.rounds.is_open or parts.disk.problem:
            return
        durable = parts.store.round().accepted
        for client_id in self.rounds.accepted:
            gone = "" if client_id in durable else "it was revoked, and enrolled again"
            if why := parts.store.shut_out(client_id) or gone:
                parts.store.withdraw(client_id)
                self.rounds.withdraw(client_id)
                self.left_out(client_id)
                parts.journal.add("upload withdrawn", round=self.rounds.index, client=client_id, reason=why)

    def _note_who_was_seen(self, now: float) -> None:
        """Keep when members were heard of; soon if one began or ceased to train."""
        parts, standings = self._parts, self._parts.store.roll.standings
        seen, age = parts.presence.heard_of(), parts.wall_clock() - now
        turned = any(client in standings and standings[client].trains != trains for client, (_, trains) in seen.items())
        if seen and not parts.disk.problem and now - self._seen_at >= (TURNED_EVERY_S if turned else SEEN_EVERY_S):
            self._seen_at = now
            parts.store.roll.saw({client: (age + heard_at, trains) for client, (heard_at, trains) in seen.items()})
            self._list_members(now)

    def _do(self, deed: Deed, now: float) -> None:
        """Lead, answer or step back."""
        parts = self._parts
        if deed is Deed.ASK:
            parts.announce(announcement(parts, self.rounds, now, "standby"))
        elif deed is Deed.ANSWER:
            self._answer_due = True
        elif deed is Deed.LEAD:
            parts.disk.do(self._lead)
        elif deed is Deed.STAND_BY:
            parts.journal.add("standing by", detail=parts.leadership.notice)
            parts.courier.forget()
            parts.arriving.clear()

    def _lead(self, now: float) -> None:
        """Tell the fleet where the run stands, provide for who is there, and finish what a crash interrupted."""
        parts, before = self._parts, self._parts.store.epoch()
        if not parts.leadership.leads:
            return  # somebody else does since the disk failed
        if parts.leadership.epoch > before:
            try:
                parts.store.raise_epoch(parts.leadership.epoch)
            except sqlite3.Error as error:
                if parts.disk.takes(error) and parts.leadership.stand_back(self.rounds.index):
                    return  # it is decided anew when the disk takes it again
                raise
            parts.checkpoint(Step.EPOCH_RAISED)
            detail = (
                f"leading from round {self.rounds.index} in epoch {parts.leadership.epoch}; clients go on from there"
            )
            parts.journal.add("epoch raised", round=self.rounds.index, detail=detail)
        if parts.leadership.rival is not self._outlived:  # once, however often the disk has all this begun again
            self._outlived = parts.leadership.rival
            parts.releases.outlive_rival()
        self.rounds.begin_again(now)
        self._list_members(now)  # who was revoked while nobody led counts no more
        self.control.tell(recovering=True)  # of what was done before
        self._chronicle.started()
        self._announce(now)
        for client_id in parts.presence.live:
            self._downloads.provide(client_id, now)
        if self.rounds.phase is Phase.AGGREGATING and not self._aggregates:
            self._aggregate()

    def _handle(self, events: list[Event], now: float) -> None:
        pending, raised = list(events), None
        while pending:
            try:
                pending.extend(self._on_event(pending.pop(0), now))
            except Exception as error:  # noqa: PERF203 -- it costs no other client its own: nothing arrives twice
                if raised is not None:  # which is told further out
                    _log.error("unexpected error", while_handling="what came at once", error=told(error))
                raised = raised or error
        if raised is not None:
            raise raised
        if self._parts.leadership.leads:
            self._decide(now)

    def _on_event(self, event: Event, now: float) -> list[Event]:
        match event:
            case Received(_, Announcement() as word):
                self._do(self._parts.leadership.heard(word, now, self.rounds.index), now)
            case Received(peer, Presence() as presence) if presence.client_id == peer:
                self._on_presence(presence, now)
            case _ if not self._parts.leadership.leads:
                pass  # whoever leads deals with it
            case Offered():
                return self._uploads.offered(event, now)
            case Arrived():
                self._uploads.arrived(event)
            case Concluded():
                self._downloads.concluded(event, now)
            case Failed():
                self._uploads.failed(event)
                self._downloads.failed(event, now)
            case Received(peer, Report() as report) if report.client_id == peer:
                self._on_report(report)
            case Received(peer, RolledBack() as told) if told.client_id == peer:
                self._downloads.rolled_back(told, now)
            case _:
                _log.debug("message ignored", kind=type(event).__name__)
        return []

    def _forget_ghosts(self, now: float) -> None:
        """Take places back from newcomers that confirm nothing, so that they keep no others out."""
        parts = self._parts
        if not parts.leadership.leads or parts.disk.problem:
            return
        ghosts = parts.presence.ghosts(parts.courier.advanced_at, now)
        for client_id in ghosts:
            parts.presence.forget(client_id)
        if now - self._began_at >= DEAD_AFTER_S:  # until then those of before a restart come back
            ghosts += [client_id for client_id in parts.store.clients() if not parts.presence.knows(client_id)]
        for client_id in ghosts:
            self._downloads.forget(client_id)
            self._reported.pop(client_id, None)
            parts.metrics.reported.pop(client_id, None)
        if ghosts:
            _log.info("newcomers forgotten", count=len(ghosts), reason="they confirmed no download")

    def _on_presence(self, presence: Presence, now: float) -> None:
        change = self._parts.presence.heard(presence, now)
        if not self._parts.leadership.leads:
            return
        if change is Change.ONLINE:
            self._parts.journal.add(
                "client online",
                client=presence.client_id,
                device=presence.device,
                provider=presence.provider,
                version=presence.serving_version,
            )
            if now - self._announced_at >= FRESH_S:
                self._announce(now)  # the retained one says how much time was left when it was made
            self._downloads.provide(presence.client_id, now)
        elif change is Change.GONE:
            self._gone(presence.client_id, presence.status)

    def _gone(self, client_id: str, reason: str) -> None:
        """Offer a client nothing more; when it is back it is offered what it should have then."""
        self._parts.journal.add("client gone", client=client_id, reason=reason)
        self._parts.courier.withdraw(client_id)

    def _on_report(self, report: Report) -> None:
        offered = self._parts.store.download(report.client_id)
        newest = offered.version if offered is not None else -1
        if not self._reported.get(report.client_id, -1) < report.version <= newest or report.round > self.rounds.index:
            return  # a repetition, or about nothing that we sent
        if self._num_reports[report.client_id] >= MAX_REPORTS:
            return  # whoever claims a version far ahead is sent higher ones, below which there is room for any number
        self._num_reports[report.client_id] += 1
        self._reported[report.client_id] = report.version
        measure = "boxes_found" if "boxes_found" in report.metrics else "accuracy"
        self._parts.journal.add(
            "client report",
            details={"metrics": dict(report.metrics)},
            client=report.client_id,
            round=report.round,
            version=report.version,
            **{measure: report.metrics.get(measure)},
        )

    def _on_disk(self, now: float) -> None:
        """The disk takes everything again: catch up on what it didn't take."""
        if self._aggregation_waits:
            self._aggregate()
        for client_id in self._parts.presence.live if self._parts.leadership.leads else ():
            self._downloads.provide(client_id, now)

    def _decide(self, now: float) -> None:
        if self._parts.disk.problem:
            return  # the round stays open until its end can be written down
        decision = self.rounds.decide(now)
        if decision is Decision.BEGIN:
            self._parts.disk.do(self._begin)
        elif decision is Decision.EXTEND:
            self._chronicle.extended()
            self._announce(now)
            self._downloads.provide_again(now)
        elif decision in {Decision.CLOSE_QUORUM, Decision.CLOSE_DEADLINE}:
            self._parts.disk.do(functools.partial(self._close, decision))

    def _begin(self, now: float) -> None:
        self._parts.store.begin(self.rounds.index)
        self._chronicle.began()
        self._announce(now)

    def _close(self, decision: Decision, now: float) -> None:
        self._parts.store.close_round(self.rounds.index, self._parts.wall_clock())
        self._parts.checkpoint(Step.ROUND_CLOSED)
        self._chronicle.closed(decision, now)
        self._announce(now)
        self._aggregate()

    def _aggregate(self) -> None:
        parts, index = self._parts, self.rounds.index
        self._aggregates, self._aggregation_waits = True, False
        uploads = parts.store.uploads(index)
        newest = {client: parts.store.download(client) for client in parts.store.clients()}
        former, wishes = {c: held for c, held in newest.items() if held is not None}, parts.wishes.of(newest)
        state, left_out = parts.store.state(), parts.store.left_out()
        work = functools.partial(parts.aggregation.run, index, uploads, state, former, wishes, left_out)
        parts.jobs.submit(work, self._aggregated, self._not_aggregated)

    def _aggregated(self, result: RoundResult, now: float) -> None:
        self._parts.checkpoint(Step.AGGREGATED)
        self._parts.disk.do(functools.partial(self._commit, result))

    def _commit(self, result: RoundResult, now: float) -> None:
        parts = self._parts
        before = parts.store.state()
        made = result.state.digests().union(*map(digests_of, result.drafts.values()))
        made -= set() if before is None else before.digests()
        if not (self._aggregates_again or all(map(parts.blobs.has, made))):
            self._aggregates_again = True  # once: what it made lies in a folder that replaced our data dir meanwhile
            self._aggregate()
            return
        self._aggregates_again = False
        # Methods make a download for each client of their state. Who is enrolled again gets one as a newcomer does.
        drafts = {client: draft for client, draft in result.drafts.items() if not parts.store.shut_out(client)}
        result = dataclasses.replace(result, drafts=drafts)
        committed = parts.store.commit_round(
            result.round, result.state, result.drafts, parts.wall_clock(), result.quarantined, result.in_vain
        )
        if not committed:
            raise ReplayfleetError(f"round {result.round} was committed twice; the data dir has two writers")
        self._aggregates = False
        parts.checkpoint(Step.COMMITTED)
        self.rounds.committed(now)
        self._num_reports.clear()
        self._list_members(now)
        self._uploads.marks.clear()
        self._chronicle.committed(result, now)
        self._announce(now)
        parts.disk.do(functools.partial(self._publish, result))  # begun again without a second commit

    def _publish(self, result: RoundResult, now: float) -> None:
        if self._parts.leadership.leads:
            self._downloads.publish(result, now)
        self._parts.checkpoint(Step.PUBLISHED)
        self._collect_due = True

    def _not_aggregated(self, error: Exception, now: float) -> None:
        if self._parts.disk.takes(error):
            self._aggregates, self._aggregation_waits = False, True
            self._collect_due = True  # what was made in vain takes room
            return
        # A bare MemoryError says nothing, and PyTorch's words name a line of its own.
        why = f"memory doesn't suffice ({told(error)})" if is_out_of_memory(error) else str(error)
        raise ReplayfleetError(
            f"round {self.rounds.index} can't be aggregated: {why}; its uploads are kept, the next start tries again"
        ) from error

    def _announce(self, now: float, state: Literal["offline"] | None = None) -> None:
        if not self._parts.leadership.leads:
            return
        self._announced_at, self._answer_due = now, False
        holds = b"".join(sorted(self._uploads.marks.values())[:MAX_HOLDS])
        self._parts.announce(announcement(self._parts, self.rounds, now, state, holds))

    def _collect(self) -> None:
        keep = self._parts.store.referenced() | self._parts.arriving.digests()
        removed, self._parts.arriving.litter_bytes = self._parts.blobs.collect(keep), 0
        _log.debug("blobs collected", removed=removed, kept=len(keep))
        self._parts.checkpoint(Step.COLLECTED)


def announcement(
    parts: Parts, rounds: Rounds, now: float, state: Literal["offline", "standby"] | None = None, holds: bytes = b""
) -> Announcement:
    """What the fleet should know right now; with ``state`` when we are gone, or ask who leads."""
    return Announcement(
        instance=parts.leadership.instance,
        round=rounds.index,
        state=state or rounds.phase.value,
        deadline_s=rounds.remaining_s(now) if state is None and not rounds.is_paused else 0.0,
        spec=parts.spec,
        epoch=parts.store.epoch(),
        holds=holds if state is None else b"",
        roots=parts.releases.roots,
        excluded=_marks(parts.store.roll.excluded()),
        shut_out=_marks(parts.ring.turned_away()),
        paused=rounds.is_paused,
        rests_s=rounds.rests_s(now),
        decodes=ENCODINGS,
        late_rounds=rounds.rules.late_rounds,
    )


def _marks(clients: Iterable[str]) -> bytes:
    return b"".join(sorted(map(client_mark, clients))[:MAX_HOLDS])
