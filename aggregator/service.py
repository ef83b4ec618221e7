"""The running aggregator: owns the sessions, the queue, the clock and the one loop; decisions are the coordinator's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replayfleet.aggregator.admission import Gate
from replayfleet.aggregator.aggregation import Aggregation, Terms
from replayfleet.aggregator.control.door import Control
from replayfleet.aggregator.control.exported import FleetCollector
from replayfleet.aggregator.control.growing import planned
from replayfleet.aggregator.control.local import LocalSocket
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import VerbRefused
from replayfleet.aggregator.control.waits import PATIENCE, fleet_waits
from replayfleet.aggregator.coordinator import Coordinator, announcement
from replayfleet.aggregator.founding import Fleet, graphs_of, initial_of, take_up
from replayfleet.aggregator.leading import Claim, Leadership
from replayfleet.aggregator.listening import Listening
from replayfleet.aggregator.operator.journal import JOURNAL, Journal, Listener, read_journal
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.aggregator.operator.thumbnails import CHANNEL, ThumbnailDesk
from replayfleet.aggregator.parts import Parts
from replayfleet.aggregator.precision.rounding import Rounder
from replayfleet.aggregator.precision.wishes import Wishes
from replayfleet.aggregator.presence import PresenceTable
from replayfleet.aggregator.publisher import Publisher
from replayfleet.aggregator.rounds.machine import Phase
from replayfleet.aggregator.steps import Checkpoint, Step, no_checkpoint
from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.aggregator.trust.key_ring import KeyRing
from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.errors import NothingLearned, SettingsError
from replayfleet.federation.methods.kit.placement import torch_device
from replayfleet.federation.methods.kit.promises import remembered_layout
from replayfleet.federation.service.credentials.certificates import CertificateTimes
from replayfleet.federation.service.credentials.keys import KEYS
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.fleet.growth import extends
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.inbox import WORK, FairInbox
from replayfleet.federation.service.jobs import Jobs, Outcome
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.loop import Loop
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.service.waits import Waits, Why
from replayfleet.federation.service.words import count_of
from replayfleet.federation.wire.protocol.codec import decode, encode
from replayfleet.federation.wire.protocol.messages import Announcement
from replayfleet.federation.wire.protocol.topics import Subscriptions, topic_of
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.federation.wire.transport.claims import ClaimStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.incoming import TransferLimits
from replayfleet.federation.wire.transport.interfaces import Connect, Will
from replayfleet.federation.wire.transport.seal import Sealed, Voices

LOOK_EVERY_S = 1.0
_log = EventLogger("aggregator")


class AggregatorService:
    """One aggregator process.

    Args:
        fleet: what it serves.
        folder: a claimed data dir.
        connect: makes sessions.
        checkpoint: called after every step that a crash could follow.
        clock: seconds; never runs backwards.
        metrics: what ``/metrics`` shows.
        listeners: told every event of the journal besides, also those that it leaves out.
        jobs: makes the worker, given where outcomes go.
        keys: folder of the fleet's keys, made at first use; ``keys`` in the data dir unless given.
        certificate: the aggregator's certificate file, whose beginning and end are watched; None: none.
        claims: a store through which large transfers go; None: all goes over the broker.
        lock: of the data dir, so that it is noticed if the folder is replaced.
        broker: our own, if it is one: started again whenever it was ended.

    Raises:
        SettingsError: The data dir is of a fleet with another spec, or has lost its database.
        ArtefactRejected: The fleet's models can't be exported.
    """

    _caught_up: Announcement | None = None

    def __init__(  # noqa: PLR0913  # the last ten have defaults
        self,
        fleet: Fleet,
        folder: Path,
        connect: Connect,
        *,
        checkpoint: Checkpoint = no_checkpoint,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        listeners: Sequence[Listener] = (),
        jobs: Callable[[Callable[[Outcome], None]], Jobs] = Jobs,
        keys: Path | None = None,
        certificate: Path | None = None,
        claims: ClaimStore | None = None,
        lock: os.stat_result | None = None,
        broker: PrivateBroker | None = None,
    ) -> None:
        self._clock, self._broker = clock, broker
        metrics = metrics or Metrics()
        disk = Disk(folder, "uploads wait", clock(), lock=lock)
        with contextlib.closing(_store_of(folder)) as store:
            releases = Releases(
                keys or folder / KEYS, may_found=not store.is_followed() or fleet.claim is Claim.TAKE_OVER
            )
        self.loop = Loop(
            self, clock, inbox=FairInbox(work=WORK), disk=disk, count_error=metrics.errors.inc, signer=releases.signer
        )
        self._must_go = ""
        self._store = AggregatorStore(folder)
        blobs = DiskBlobStore(folder / "blobs")
        self._is_new = take_up(self._store, blobs, fleet)
        fleet = dataclasses.replace(fleet, spec=self._store.spec() or fleet.spec)
        self._store.set_num_rounds(fleet.rules.num_rounds)
        self._jobs = jobs(lambda outcome: self.loop.put("job", outcome, guarded=False))
        graphs = graphs_of(self._store, blobs, fleet.exporter)
        place = (self._store.epoch(), self._store.round().index)
        leadership = Leadership(self._store.home(), secrets.token_hex(8), place, fleet.claim)
        presence = PresenceTable()
        ring = KeyRing(
            releases.signer,
            self._store,
            presence.is_live,
            self._on_other_device,
            self._on_refused,
            self._on_other_fleet,
            functools.partial(_was_said_before, releases.signer.now_us(), leadership),
        )
        voices = Voices(releases.signer, ring)
        self._thumbnails = ThumbnailDesk(folder, voices, lambda name: self._store.signing_key(name) is not None)
        publisher = Publisher(fleet.spec.fleet, blobs, fleet.exporter, graphs)
        self._parts = Parts(
            spec=fleet.spec,
            rules=fleet.rules,
            method=fleet.method,
            gate=Gate(fleet.spec.fleet, remembered_layout(fleet.method), fleet.caps),
            store=self._store,
            blobs=blobs,
            disk=disk,
            courier=FleetCourier(
                "aggregator",
                fleet.spec.fleet,
                self.loop,
                blobs,
                voices,
                limits=TransferLimits(max_open=fleet.max_transfers),
                claims=claims,
            ),
            aggregation=Aggregation(
                fleet.spec,
                fleet.method,
                fleet.sampler,
                blobs,
                publisher,
                Terms(
                    fleet.max_change,
                    torch_device(fleet.torch_device),
                    initial_of(self._store, blobs),
                    fleet.spread,
                    Rounder(fleet.spec, task_of(fleet.spec), blobs, fleet.sampler, fleet.precision),
                ),
            ),
            jobs=self._jobs,
            journal=Journal(folder, disk.takes, listeners=(metrics.told, *listeners)),
            metrics=metrics,
            presence=presence,
            wishes=Wishes(presence),
            announce=self._announce,
            leadership=leadership,
            releases=releases,
            ring=ring,
            wall_clock=time.time,
            checkpoint=checkpoint,
        )
        self._parts.courier.follow(leadership.instance)
        self.coordinator = Coordinator(self._parts, clock())
        self._waits, self._looked_at = Waits(PATIENCE), float("-inf")
        self._certificate = CertificateTimes(certificate)
        self.growth: tuple[tuple[str, ...], str] | None = None
        """Classes that the fleet is to learn too, and who asked for it: whoever runs this service begins anew."""
        self.control = Control(self.loop.put, self.coordinator.control, self._look, self._grow)
        self._collector = FleetCollector(
            self.control.look,
            metrics.reported,
            folder,
            connected=lambda: self.loop.connected,
            problem=lambda: self.loop.disk.problem,
        )
        metrics.registry.register(self._collector)
        name = fleet.spec.fleet
        gone = announcement(self._parts, self.coordinator.rounds, clock(), state="offline")
        will = Will(topic_of(name, "round"), encode(gone), retain=True)
        # A name for each store: two aggregators of one fleet would take each other's session for ever.
        self.loop.connect(connect, f"{name}-aggregator-{self._store.home()}", Subscriptions((), ()), will)
        self._listening = Listening(name, self.loop)
        self._listen(clock())
        self._view = self._snapshot()
        self._refusal = ""
        self._folder = folder

    def health(self) -> Mapping[str, Any]:
        """What ``/healthz`` says: where the run stands, and whether the broker is there."""
        problem = self.loop.disk.problem
        healthy = self.ready and not (problem or self.loop.refusal or self._waits.hurt)
        return {
            **self._view,
            "healthy": healthy,
            "waits": self._waits.rows(),
            "broker": self.loop.broker,
            "disk": problem,
        }

    @property
    def turns(self) -> Mapping[str, int]:
        """MQTT's; an aggregation may take hours, so its thread isn't waited for."""
        return self.loop.turns

    @property
    def ready(self) -> bool:
        return self.loop.connected

    @property
    def summary(self) -> str:
        rounds, online = self.coordinator.rounds, len(self._parts.presence.live)
        uploads = f"{rounds.num_accepted} of {count_of(rounds.quorum, 'upload')}"
        first = next((f"; {wait.text}" for wait in self._waits.told if wait.reason is not Why.UPLOAD), "")
        return f"round {rounds.index} {rounds.phase.value}; {uploads}; {count_of(online, 'client')} online{first}"

    def run(self, stop: threading.Event, manager: ServiceManager | None = None) -> bool:
        """Serve until the run is finished and confirmed or ``stop`` is set; returns whether it is finished.

        Args:
            stop: set by a signal handler.
            manager: is told that this aggregator is ready, and that its loop and MQTT turn.

        Raises:
            ReplayfleetError: A round can't be aggregated, or the database is damaged. Nothing accepted is lost.
            NothingLearned: No round of a finished run could use an upload.
        """
        manager = manager or ServiceManager()
        local = LocalSocket(self._folder, self.control)
        try:
            self.start()
            self.loop.run(stop, lambda now: self._grows or self.coordinator.over(now), manager)
            rounds = self.coordinator.rounds
            if rounds.phase is Phase.FINISHED and 0 < rounds.index == self._store.num_in_vain():
                raise NothingLearned(
                    f"no upload could be used in {count_of(rounds.index, 'round')}, every client has the model that it "
                    "began with; `aggregator history --data-dir DIR` says why"
                )
            return rounds.phase is Phase.FINISHED
        finally:
            if self.growth is None:
                manager.stopping()
            local.stop()
            self.stop()

    def start(self) -> None:
        """Connect in the background and take up the run."""
        if self._is_new:
            self._parts.checkpoint(Step.ROUND_OPENED)
        self.loop.start()
        self.coordinator.start(self._clock())

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        if topic.endswith(f"/{CHANNEL}"):
            if not self.loop.disk.problem:
                self._thumbnails.take(topic, payload, now)
        else:
            self.coordinator.on_message(topic, payload, now)

    def on_connected(self, now: float) -> None:
        self.coordinator.on_connected(now)

    def on_tick(self, now: float) -> None:
        if self._must_go:
            raise SettingsError(self._must_go)
        if self._parts.leadership.yields_to_a_copy:
            raise SettingsError(
                "another aggregator runs on a copy of this data dir; stop one of them, and make copies with "
                "`aggregator backup` and `aggregator restore`"
            )
        if not self.loop.connected:
            self._parts.leadership.cut_off(now)
        self._parts.presence.unheard = self.loop.inbox.senders()
        self.loop.guarded("tick", self.coordinator.tick, now)
        self._catch_up()
        self._listen(now)
        if self.loop.refusal != self._refusal:
            self._refusal = self.loop.refusal
            if self._refusal:
                self._parts.journal.add("broker refuses", reason=self._refusal.removeprefix("broker refuses: "))
        if now - self._looked_at >= LOOK_EVERY_S:
            if self._broker is not None:
                with contextlib.suppress(SettingsError, OSError):  # that nothing listens there, the log says already
                    if self._broker.keep():
                        _log.warning("private broker ended", next="it is started again, at its port")
            self._look(now)
        self._view = self._snapshot()

    def _on_other_device(self, client: str) -> None:
        self._parts.journal.add("other device", client=client, reason="it has this name, and another signing.key")

    def _on_refused(self, client: str, why: str) -> None:
        self._parts.journal.add("client refused", client=client, reason=why)

    def _on_other_fleet(self, sealed: Sealed) -> None:
        """Another key announces itself as this fleet.

        We go if ours was replaced, so that no client listens to us, and where we begin, with nothing to lose.
        """
        parts, word = self._parts, decode(sealed.frame)
        if not isinstance(word, Announcement) or word.state in {"offline", "standby"}:
            return
        name = parts.spec.fleet
        if root := parts.releases.replaced_by(word.roots, sealed.key):
            self._must_go = (
                f"the keys of fleet {name!r} were rotated (root {root}), and another aggregator has the new ones; make "
                "this one's data dir anew, from a backup of that (`aggregator restore --replace`)"
            )
        elif word.state != "finished" and parts.leadership.gives_way and self._has_nothing_to_lose():
            self._must_go = (
                f"a fleet {name!r} with other keys is announced at this broker already; choose another --fleet, "
                "restore its backup, or say --take-over if that one is gone"
            )
        parts.journal.add("other aggregator", reason=f"it announces itself as {name!r}, with other keys; one must go")

    def _has_nothing_to_lose(self) -> bool:
        store = self._parts.store
        return store.round().index == 0 and not store.clients() and not store.is_enrolled()

    def _look(self, now: float) -> Waits:
        """See what keeps this aggregator from its work, and since when."""
        self._looked_at = now
        facts = dataclasses.replace(
            self.coordinator.control.facts(now),
            connected=self.loop.connected,
            broker=self.loop.broker,
            refusal=self.loop.refusal,
            certificate_left_s=self._certificate.left_s(now, self._parts.wall_clock()),
            too_early=self._certificate.too_early(now, self._parts.wall_clock()),
        )
        for wait in self._waits.note(fleet_waits(facts), now):
            _log.info("waits", reason=wait.reason.value, why=wait.text)
        return self._waits

    def _listen(self, now: float) -> None:
        """Listen to those who are taken in, and to no one who floods."""
        presence = self._parts.presence
        for client, count in self._parts.courier.take_useless().items():
            if self.coordinator.leads:  # to one that stands by they may belong to nothing, for the leader has the offer
                self.loop.inbox.blame(client, count)
        clients = presence.members.union(presence.newcomers)
        self.loop.inbox.set_members(clients)
        for client, for_s in self._listening.update(clients, self.loop.flooding, now).items():
            self._parts.journal.add("client muted", client=client, for_s=for_s, reason="it sends too many messages")

    @property
    def _grows(self) -> bool:
        """Whether this service ends so that the fleet can learn more classes; a round that is aggregated ends first."""
        return self.growth is not None and self.coordinator.rounds.phase is not Phase.AGGREGATING

    def _grow(self, names: tuple[str, ...], who: str, only_plan: bool) -> Plan:
        """Say what more classes would do, and let this service end for it; on the loop's thread."""
        coordinator = self.coordinator
        if not coordinator.leads:
            raise VerbRefused(f"this aggregator doesn't lead the fleet ({coordinator.notice}); ask the one that does")
        if self.growth is not None:
            raise VerbRefused(f"{', '.join(self.growth[0])} is being added; the aggregator begins anew for it")
        grown = planned(self._store, names)
        if not only_plan:
            if self._parts.disk.problem:
                raise VerbRefused(f"{self._parts.disk.problem}; nothing was changed")
            self.growth = (names, who)
        return Plan(grown.text)

    def _catch_up(self) -> None:
        """Learn classes that who led before had, and this store, an earlier copy, lacks: else nobody follows."""
        before, spec = self._parts.leadership.rival, self._parts.spec
        if before is None or before is self._caught_up or not self.coordinator.leads or self._parts.disk.problem:
            return
        self._caught_up = before
        if extends(before.spec, spec):
            try:
                names = task_of(before.spec).class_names[len(task_of(spec).class_names) :]
                self._grow(names, "who led before", only_plan=False)
            except (SettingsError, VerbRefused) as error:
                _log.warning("classes not added", reason=error, next="no device that knows them follows")

    def stop(self) -> None:
        """Say goodbye and close everything. Idempotent."""
        with contextlib.suppress(KeyError):
            self._parts.metrics.registry.unregister(self._collector)
        self.coordinator.farewell(self._clock())
        self._parts.courier.forget()  # no other shared bundle takes the last one's place in a store
        self.loop.stop()
        self._jobs.stop()
        self._parts.journal.close()
        self._store.close()

    def _snapshot(self) -> Mapping[str, Any]:
        """Where the run stands; made by the loop, read by the endpoint's threads."""
        rounds = self.coordinator.rounds
        return {
            "fleet": self._parts.spec.fleet,
            "method": self._parts.spec.method,
            "leads": self.coordinator.leads,
            "notice": self.coordinator.notice,
            "round": rounds.index,
            "phase": rounds.phase.value,
            "uploads": rounds.num_accepted,
            "expected": rounds.quorum,
            "clients": self._parts.presence.live,
            "muted": self._listening.muted(self._clock()),
            "messages_dropped": self.loop.inbox.num_dropped,
        }

    def _announce(self, message: Announcement) -> None:
        self.loop.say(topic_of(message.spec.fleet, "round"), encode(message), retain=message.state != "standby")


def _was_said_before(began_us: int, leadership: Leadership, sealed: Sealed) -> bool:
    """Whether our own key signed an announcement before we began, of no later epoch than that in which we lead.

    Then it was recorded, and would have us give way to a process that is dead: who leads beside us hears us, and signs
    what it says later than that.
    """
    if not leadership.leads or sealed.time_us >= began_us:
        return False
    word = decode(sealed.frame)
    return isinstance(word, Announcement) and word.epoch <= leadership.epoch


def _store_of(folder: Path) -> AggregatorStore:
    store = AggregatorStore(folder)
    if store.spec() is None and any(read_journal(folder, "round opened")):
        store.close()
        raise SettingsError(
            f"{folder / DATABASE} was lost: it holds no fleet, and {JOURNAL} tells of its rounds; restore a backup. "
            "For a fleet that begins anew, choose another data dir"
        )
    return store
