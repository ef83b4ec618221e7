"""A whole fleet in one thread: memory broker, a real aggregator, clients of the tiny method, a clock of numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
from support.tiny_method import TASK, TinyMethod

from replayfleet.aggregator.admission import Caps
from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.rounds.machine import RoundRules
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.steps import Step
from replayfleet.federation.methods.kit.records import Artefacts
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.service.artefact_codec import decode_artefacts, encode_artefacts
from replayfleet.federation.service.credentials.keys import KEYS
from replayfleet.federation.service.jobs import Jobs, Outcome, outcome_of
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import (
    COUNTER_BITS,
    Announcement,
    FleetSpec,
    Manifest,
    Presence,
    Probe,
    Report,
)
from replayfleet.federation.wire.protocol.topics import client_subscriptions, topic_of
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.incoming import TransferLimits
from replayfleet.federation.wire.transport.interfaces import (
    Arrived,
    Concluded,
    Offered,
    OnMessage,
    Received,
    Session,
    Will,
)
from replayfleet.federation.wire.transport.seal import Kind
from tests.support.memory_broker import MemoryBroker
from tests.support.voices import Member

FLEET = "tiny-fleet"
SEED = 7
STEP_S = 0.05


class TinyExporter:
    """Serving without ONNX: the probe is the parameters themselves."""

    def graphs(self) -> dict[str, bytes]:
        return {"graph/task": b"a graph"}

    def use(self, graphs: Any) -> None:
        assert graphs == self.graphs()

    def probe(self, parameters: Any) -> Probe:
        first = next(iter(parameters.values())).flatten()
        return Probe(0, 1, tuple(first[:4].tolist()), 1e-3)


class InlineJobs(Jobs):
    """Jobs run where they are submitted; their outcomes wait in the service's queue as usual."""

    def __init__(self, deliver: Callable[[Outcome], None]) -> None:
        self._deliver = deliver
        self._pending = 0

    def submit(self, work: Any, then: Any, failed: Any) -> None:
        self._pending += 1
        self._deliver(partial(self._deal_with, outcome_of(work, then, failed)))

    def stop(self) -> None:
        """Nothing runs."""


def tiny_spec(**changes: Any) -> FleetSpec:
    task = msgspec.to_builtins(TASK)
    return msgspec.structs.replace(FleetSpec(FLEET, "tiny", {"rate": 0.5}, task, SEED), **changes)


class Broker(Protocol):
    """Whatever makes sessions."""

    def session(self, client_id: str, *, on_message: OnMessage, will: Will | None) -> Session: ...


class TinyClient:
    """A client that trains as soon as it may; its disk is ``folder``, all else is lost in a crash."""

    def __init__(
        self, broker: Broker, client_id: str, folder: Path, boot: str = "b1", method: Any = None, data: Any = None
    ) -> None:
        self.method, self.data = method or TinyMethod(), data
        self.client_id = client_id
        self.boot = boot
        self.blobs = DiskBlobStore(folder)
        self.signer = (member := Member(folder)).signer
        self.announcement: Announcement | None = None
        self.manifest: Manifest | None = None
        self.verdicts: list[Any] = []
        self.uploaded = -1
        self.dies_in = 1 << 30
        self.asks_leave = False
        self.metrics = {"accuracy": 0.5}
        self.says: dict[str, Any] = {}
        self.broken: Callable[[Artefacts, Manifest], tuple[Artefacts, Manifest]] | None = None
        self._inbox: list[tuple[str, bytes]] = []
        self._sequence = 0
        self._heartbeat_at = -1e9
        topics = client_subscriptions(FLEET, client_id)
        topic = topic_of(FLEET, "state", client_id)
        will = Will(topic, member.signer.seal(topic, encode(self._presence("offline")), Kind.WILL))
        self.session = broker.session(client_id, on_message=lambda t, p: self._inbox.append((t, p)), will=will)
        self.session.subscribe([*topics.control, *topics.data])
        links = SimpleNamespace(control=self.session, data=self.session)
        self.courier = FleetCourier("client", FLEET, links, self.blobs, member.voices, own_id=client_id)
        self.session.start()

    def beat(self, now: float) -> None:
        """Say that it is there, if it is time."""
        if now - self._heartbeat_at >= 5:
            self._heartbeat_at = now
            self._sequence += 1
            self.say("state", self._presence("online"), retain=True)

    def pump(self, now: float) -> None:
        self.beat(now)
        inbox, self._inbox = self._inbox, []
        for topic, payload in inbox:
            self._deal_with(self.courier.handle(topic, payload, now), now)
        self._deal_with(self.courier.tick(now), now)
        self._train(now)

    def _deal_with(self, events: list[Any], now: float) -> None:
        pending = list(events)
        while pending:
            pending += self._on_event(pending.pop(0), now)

    def _on_event(self, event: Any, now: float) -> list[Any]:
        match event:
            case Offered(peer, offer):
                return self.courier.accept(peer, offer, now)
            case Arrived(peer, transfer_id, manifest):
                if manifest.client_id == self.client_id:
                    self.manifest = manifest
                self.courier.conclude(peer, manifest, transfer_id, accepted=True)
                report = Report(self.client_id, manifest.round, manifest.version, self.metrics)
                if manifest.client_id == self.client_id:
                    self.say("control", report)
            case Concluded(_, _, verdict):
                self.verdicts.append(verdict)
            case Received(_, Announcement() as announcement):
                if self.announcement is not None and announcement.instance != self.announcement.instance:
                    self.courier.resume(now)
                self.announcement = announcement
                self.courier.follow(announcement.instance)
        return []

    def say(self, channel: str, message: Any, *, retain: bool = False) -> None:
        topic = topic_of(FLEET, channel, self.client_id)
        self.session.publish(topic, self.signer.seal(topic, encode(message)), retain=retain)

    def download(self) -> Any:
        blobs = [entry for entry in self.manifest.blobs if not entry.name.startswith("graph/")]
        return self.method.Download.unpack(decode_artefacts(blobs, self.manifest.facts, self.blobs))

    def _train(self, now: float) -> None:
        said, manifest = self.announcement, self.manifest
        if said is None or manifest is None or said.state != "open" or not manifest.round == said.round > self.uploaded:
            return
        if manifest.epoch != said.epoch or (self.asks_leave and said.paused):
            return
        rng = seeded_generator(SEED, said.round, self.client_id)
        _, upload = self.method.local_round(None, self.data, self.download(), rng, sampler=None)
        if said.round >= self.dies_in:
            return
        self.uploaded = said.round
        self.send(upload.pack(), said.round, now)

    def send(self, artefacts: Artefacts, round_index: int, now: float) -> None:
        epoch = self.manifest.epoch if self.manifest is not None else 0
        draft = Manifest("up", FLEET, self.client_id, round_index, (epoch << COUNTER_BITS) + round_index + 1, ())
        if self.broken is not None:
            artefacts, draft = self.broken(artefacts, draft)
        encoded = encode_artefacts(artefacts, self.blobs)
        manifest = msgspec.structs.replace(
            draft, blobs=draft.blobs or encoded.blobs, facts=draft.facts or encoded.facts
        )
        self.courier.send(self.client_id, manifest, [entry.digest for entry in encoded.blobs], now)

    def _presence(self, status: str) -> Presence:
        return Presence(self.client_id, status, self.boot, self._sequence, **self.says)


class TinyFleet:
    """The fleet under test."""

    jobs: type[Jobs] = InlineJobs

    def __init__(
        self,
        tmp_path: Path,
        client_ids: tuple[str, ...] = ("cam-1", "cam-2", "cam-3"),
        caps: int = Caps().max_clients,
        transfers: int = TransferLimits().max_open,
        **rules: Any,
    ) -> None:
        self.tmp_path, self.caps, self.transfers = tmp_path, caps, transfers
        tmp_path.mkdir(exist_ok=True)
        self.now = 100.0
        self.broker = MemoryBroker()
        self.private: PrivateBroker | None = None
        self.rules = RoundRules(**{"num_clients": len(client_ids), "deadline_s": 60, "num_rounds": 3, **rules})
        self.claim = Claim.SOLE
        self.keys = tmp_path / "keys"  # they outlive a lost store
        self.crash_at: Step | None = None
        self.skip = 0
        self.steps: list[Step] = []
        self.clients: dict[str, TinyClient] = {}
        self.service = self.new_service()
        for client_id in client_ids:
            self.add_client(client_id)

    def new_service(self, spec: FleetSpec | None = None) -> AggregatorService:
        folder = self.tmp_path / "aggregator"
        folder.mkdir(exist_ok=True)
        fleet = Fleet(
            spec or tiny_spec(),
            TinyMethod(),
            lambda parameters: None,
            TinyExporter(),
            self.rules,
            caps=Caps(max_clients=self.caps),
            max_transfers=self.transfers,
            claim=self.claim,
        )
        self.service = AggregatorService(
            fleet,
            folder,
            self._connect,
            checkpoint=self._checkpoint,
            clock=lambda: self.now,
            jobs=self.jobs,
            keys=linked_keys(folder, self.keys),
            broker=self.private,
        )
        self._started = False
        return self.service

    def add_client(self, client_id: str, boot: str = "b1", disk: str | None = None) -> TinyClient:
        folder = self.tmp_path / (disk or client_id)
        self.clients[client_id] = TinyClient(self.broker, client_id, folder, boot)
        return self.clients[client_id]

    @property
    def store(self):
        return self.service._parts.store

    @property
    def rounds(self):
        return self.service.coordinator.rounds

    def run(self, *, until: Callable[[], bool] | None = None, for_s: float = 120.0) -> None:
        """Let time pass until the run is finished and confirmed, or ``until`` holds."""
        done = until or (lambda: self.service.coordinator.finish.over(self.now))
        end = self.now + for_s
        if not self._started:
            self._started = True
            self.service.start()
        while not done():
            assert self.now < end, f"nothing more happens: {self.service.health()}"
            self.now += STEP_S
            self.service.loop.pump(0)
            for client in self.clients.values():
                client.pump(self.now)

    def kill_aggregator(self) -> None:
        """All memory is gone; what is on disk stays as it is."""
        self.service._store.close()
        self.service._parts.journal.close()
        for session in (self.service.loop.control, self.service.loop.data):
            self.broker.kill(session.client_id)

    def kill_client(self, client_id: str) -> None:
        del self.clients[client_id]
        self.broker.kill(client_id)

    def outcome(self) -> dict[str, Any]:
        """What a run leaves behind, to the bit: digests of the state, and every client's download but its version."""
        downloads = {c: self.store.download(c) for c in self.store.clients()}
        return {
            "state": sorted((entry.name, entry.digest) for entry in self.store.state().blobs),
            "facts": self.store.state().facts,
            "downloads": {
                c: (d.round, sorted((b.name, b.digest) for b in d.blobs), d.facts) for c, d in downloads.items()
            },
        }

    def close(self) -> None:
        self.service.stop()

    def _connect(self, client_id: str, on_message: Any, will: Will | None) -> Session:
        return self.broker.session(client_id, on_message=on_message, will=will)

    def _checkpoint(self, step: Step) -> None:
        self.steps.append(step)
        if step is self.crash_at:
            if self.skip == 0:
                self.crash_at = None
                raise Crash(step)
            self.skip -= 1


def linked_keys(data_dir: Path, keys: Path) -> Path:
    """Return the folder of an aggregator's keys, which outlives its data dir, and let the data dir link to it."""
    data_dir.mkdir(exist_ok=True)
    if not os.path.lexists(data_dir / KEYS):
        (data_dir / KEYS).symlink_to(keys.absolute())
    return keys


class Crash(BaseException):
    """Stands for kill -9 inside one process: nothing catches it."""
