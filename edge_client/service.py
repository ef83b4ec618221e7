"""The running client: owns the sessions, the queue, the clock and the one loop; decisions are ``Client``'s."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from replayfleet.devices.limits import Sensors, Throttle
from replayfleet.devices.profiles import FP32
from replayfleet.edge_client.client import Client
from replayfleet.edge_client.flow import CountsLabels, Shown
from replayfleet.edge_client.frames.answerer import FrameCounts
from replayfleet.edge_client.frames.frame_service import FrameService
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, FeedbackRefused, TakeBack, TakesFeedback
from replayfleet.edge_client.learning.local_training import LocalTraining, Trainer, TrainerEvent, TrainerProcess
from replayfleet.edge_client.learning.training.brake import TrainingBrake
from replayfleet.edge_client.learning.training.job import BLOBS
from replayfleet.edge_client.operator.display.drawing import Legend
from replayfleet.edge_client.operator.metrics import Metrics
from replayfleet.edge_client.operator.operator_desk import OperatorDesk
from replayfleet.edge_client.operator.studio.sharing import SharedStudio
from replayfleet.edge_client.operator.studio.studio import Known, Studio
from replayfleet.edge_client.operator.waits import PATIENCE, Facts, FleetClock, waits
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.sources import OpenSource
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync.download import Gate
from replayfleet.edge_client.sync.parts import Compute, Parts
from replayfleet.edge_client.sync.presence import PresenceClock
from replayfleet.edge_client.sync.trust import FOLDER, FleetTrust
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.credentials.certificates import CertificateTimes
from replayfleet.federation.service.credentials.keys import KEYS, ROOT, signing_key
from replayfleet.federation.service.data_dir import STATUS_FILE
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.fleet.presets import stores_data
from replayfleet.federation.service.inbox import FairInbox
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.loop import Loop
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.service.waits import Waits
from replayfleet.federation.wire.protocol.messages import spoken
from replayfleet.federation.wire.protocol.topics import client_subscriptions, topic_of
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.claims import ClaimStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Connect
from replayfleet.federation.wire.transport.seal import SEALED, Signer, Voices

log = EventLogger(__name__)


def _shares_nothing(payload: bytes, now: float) -> None:
    raise FeedbackRefused("a question to the studio, which --remote-operator would open")


STATUS_EVERY_S = 5.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this client is.

    Attributes:
        fleet: fleet name.
        client_id: its name in the fleet.
        device: the device profile's name.
        compute: how it computes; its first provider was proved.
    """

    fleet: str
    client_id: str
    device: str
    compute: Compute


class ClientService:
    """One client process.

    Args:
        identity: who it is.
        folder: a claimed data dir.
        connect: makes sessions.
        open_source: makes the source once the fleet's task is known.
        metrics: what ``/metrics`` shows.
        spawn: starts a training process, given where its events go and whether it takes only what nobody else wants.
        clock: seconds; never runs backwards.
        certificate: its certificate file, whose beginning and end are watched; None: none.
        claims: a store through which large transfers go; None: all goes over the broker.
        keys: folder with this client's ``signing.key``, made at first use, and the fleet's ``root.json`` if the device
            was given one; ``keys`` in the data dir unless given.
        lock: of the data dir, so that it is noticed if the folder is replaced.
    """

    def __init__(  # noqa: PLR0913  # the last seven have defaults
        self,
        identity: Identity,
        folder: Path,
        connect: Connect,
        open_source: OpenSource,
        *,
        metrics: Metrics | None = None,
        spawn: Callable[[Callable[[TrainerEvent], None], bool], Trainer] = TrainerProcess,
        clock: Callable[[], float] = time.monotonic,
        keys: Path | None = None,
        certificate: Path | None = None,
        claims: ClaimStore | None = None,
        lock: os.stat_result | None = None,
    ) -> None:
        self._identity = identity
        self._claims = claims
        self._folder = folder
        self._clock = clock
        self.desk = OperatorDesk(lambda: self.client.class_names, self.learn, clock)
        self.metrics = metrics or Metrics(identity.device, identity.compute.providers[0])
        self.watchers: list[Callable[[Shown], None]] = [self.desk.watch, self.metrics.shown]
        """Called on the serving thread with every picture and its prediction; must be quick."""
        keys = keys or folder / KEYS
        self._signer = Signer(signing_key(keys))
        self._disk = Disk(folder, "serving goes on, training waits", clock(), lock=lock)
        self.loop = Loop(
            self,
            clock,
            inbox=FairInbox(frozenset({identity.client_id})),
            fatal=(ReplayfleetError,),
            disk=self._disk,
            count_error=self.metrics.errors.inc,
            signer=self._signer,
        )
        self._jobs = Jobs(lambda outcome: self.loop.put("job", lambda now: self.client.on_outcome(outcome, now)))
        self._slot = ModelSlot()
        self._frames = FrameService(self._slot, identity.compute.probation, self.watchers)
        self._status_at = self._looked_at = float("-inf")
        self._waits, self._fleet_clock, self._certificate = Waits(PATIENCE), FleetClock(), CertificateTimes(certificate)
        self._asked: Callable[[bytes, float], None] = _shares_nothing
        self._feedback_topic = topic_of(identity.fleet, "feedback", identity.client_id)
        self._presence = PresenceClock(
            identity.fleet,
            identity.client_id,
            device=identity.device,
            provider=identity.compute.providers[0],
            trains=identity.compute.trains,
            precision="" if identity.compute.precision == FP32 else identity.compute.precision,
        )

        def hear(event: TrainerEvent) -> None:
            self.loop.put("training", lambda now: self.client.on_trainer(event, now))

        root = keys / ROOT
        trust = FleetTrust(
            folder / FOLDER,
            identity.client_id,
            self._signer.public_key,
            root.read_bytes() if root.is_file() else None,
        )
        self._parts = self._build(folder, open_source, LocalTraining(partial(spawn, hear)), trust)
        self.client = Client(self._parts)
        allowance = identity.compute.allowance
        self._sensors = Sensors(allowance)
        self._brake = TrainingBrake(self._sensors.read, Throttle(allowance), self._parts.training)
        topics = client_subscriptions(identity.fleet, identity.client_id)
        self.loop.connect(connect, f"{identity.fleet}-{identity.client_id}", topics, self._presence.will())

    @property
    def counts(self) -> FrameCounts:
        return self._frames.counts

    def status(self) -> dict[str, Any]:
        """What ``/healthz`` and ``edge-client status`` show; safe to call from another thread."""
        identity, client, problem = self._identity, self.client, self._frames.error
        return {
            "healthy": self.loop.connected
            and not (self.loop.refusal or problem or self._disk.problem or self._waits.hurt),
            "waits": self._waits.rows(),
            "fleet": identity.fleet,
            "client": identity.client_id,
            "device": identity.device,
            "provider": identity.compute.providers[0],
            "method": client.method,
            "stores_data": stores_data(client.method),
            "phase": client.step.value,
            "round": client.round,
            "notice": client.notice,
            "serving_version": client.serving_version,
            "precision": client.precision,
            "choice": client.choice,
            **self._frames.serving(),
            **({} if self._parts.engines is None else {"engine": self._parts.engines.state}),
            **self._frames.status(),
            "trainer_pid": self._parts.training.pid,
            **self._training_status(),
            "source": "" if client.source is None else client.source.pictures.description,
            "source_error": problem,
            "disk": self._disk.problem,
            "broker": self.loop.broker,
            "pid": os.getpid(),
        }

    def legend(self, camera: str) -> Legend:
        """What drawings of a camera's pictures need; safe to call from another thread."""
        source = self.client.source
        cameras = () if source is None else source.pictures.cameras
        names = next((found.class_names for found in cameras if found.name == camera), ())
        return Legend(self.client.class_names, names, self.client.round)

    def known(self) -> Known:
        """What the label studio shows of this client; safe to call from another thread."""
        client, source = self.client, self.client.source
        labels = source.samples.progress() if source and isinstance(source.samples, CountsLabels) else None
        name, boxes = self._identity.client_id, client.max_boxes
        return Known(name, client.class_names, client.round, client.serving_version, labels, boxes)

    def share(self, studio: Studio, key: bytes) -> SharedStudio:
        """Let whoever has this key see and label the studio's frames over the fleet's broker."""
        topic = topic_of(self._identity.fleet, "studio", self._identity.client_id)

        def answer(frame: bytes) -> None:
            self.loop.put("studio", lambda now: self.loop.say(topic, frame))

        shared = SharedStudio(
            studio, key, self._signer, self._feedback_topic, answer, lambda: self.loop.control.max_payload_bytes
        )
        self._asked = shared.hear
        return shared

    def say_thumbnail(self, frame: bytes) -> None:
        """Send a picture to the aggregator; may be called on any thread. Without a broker it is let go."""
        topic = topic_of(self._identity.fleet, "thumbnail", self._identity.client_id)
        if self.loop.connected:
            self.loop.put("thumbnail", lambda now: self.loop.say(topic, frame))

    @property
    def turns(self) -> Mapping[str, int]:
        """What capture, inference and MQTT have done so far, for a watchdog.

        A camera that is lost counts while it is tried again, and so does a broker that isn't there: a restart would
        help neither. A client without a source yet waits for its fleet's task.
        """
        return {**self._frames.turns, **self.loop.turns}

    @property
    def ready(self) -> bool:
        return self.loop.connected or self.client.serving_version > 0

    @property
    def summary(self) -> str:
        phase, round_index, version = self._state()
        where = f"round {round_index}" if round_index >= 0 else "no round yet"
        served = f"serving version {spoken(version)}" if version > 0 else "serving no model yet"
        engine = "" if self._parts.engines is None else f"; {self._parts.engines.state}".rstrip("; ")
        first = next((f"; {wait.text}" for wait in self._waits.told), "")
        return f"{phase}; {where}, {served}{engine}{first}"

    def run(self, stop: threading.Event, *, stay: bool = False, manager: ServiceManager | None = None) -> bool:
        """Serve until the run is finished or ``stop`` is set; returns whether it is finished.

        Args:
            stop: set by a signal handler.
            stay: go on serving frames after the run is finished.
            manager: is told that this client is ready, and that it turns.

        Raises:
            SettingsError: The source doesn't fit the fleet's task.
        """
        manager = manager or ServiceManager()
        try:
            self.start()
            self.loop.run(stop, lambda now: self.client.finished and not stay, manager)
            return self.client.finished
        finally:
            manager.stopping()
            self.stop()

    def start(self) -> None:
        """Serve what is on disk, and connect in the background."""
        self.client.start()
        self._frames.start()
        self._brake.start()
        self.loop.start()
        self._follow()

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        if topic != self._feedback_topic:
            self.client.on_message(topic, payload, now)
            return
        try:
            if payload[:1] == bytes([SEALED]) or self._asked is not _shares_nothing:  # who has a key, signs
                self._asked(payload, now)
                return
            self.desk.take(payload)
            log.info("feedback taken")
        except FeedbackRefused as refused:
            log.warning("feedback refused", reason=refused)

    def on_connected(self, now: float) -> None:
        self._fleet_clock.reconnected()
        self._presence.forget()  # the will of the broken connection may stand where we do
        self.client.on_connected(now)

    def on_tick(self, now: float) -> None:
        self.loop.guarded("tick", self.client.tick, now)
        self._brake.tick(now)
        self._follow()
        state = self._state()
        speaks = self.loop.connected and self._presence.is_due(state, now)
        if now - self._looked_at >= LOOK_EVERY_S or speaks:
            self._look(now)  # what is said of a round is of that round: labels, and how its model answers
        if speaks:
            self.loop.say(self._presence.topic, self._presence.say("online", state, now), retain=True)
        if now - self._status_at >= STATUS_EVERY_S:
            self._write_status(now)

    def stop(self) -> None:
        """Say goodbye and end everything. Idempotent."""
        now = self._clock()
        if self.loop.control.connected:
            goodbye = self._presence.say("stopped", self._state(), now)
            self.loop.say(self._presence.topic, goodbye, retain=True)
        self.loop.stop()
        self._frames.stop()
        if self._parts.engines is not None:
            self._parts.engines.stop()
        self.client.stop()
        self._slot.clear()
        self._brake.stop()
        self._sensors.close()
        self._parts.training.stop()
        self._jobs.stop()
        self._write_status(now)

    def _look(self, now: float) -> None:
        """See what keeps this client from its work, and since when."""
        client, wall_s, labels = self.client, time.time(), self.known().labels
        self._looked_at = now
        self._fleet_clock.hear(self._parts.trust.heard_us, wall_s)
        facts = Facts(
            member=self._identity.client_id,
            connected=self.loop.connected,
            broker=self.loop.broker,
            refusal=self.loop.refusal,
            trust_problem=self._parts.trust.problem,
            ignored=client.ignored,
            disk=self._disk.problem,
            camera=self._frames.error,
            reading_s=client.reading_s(now),
            step=client.step,
            round=client.round,
            trains=self._identity.compute.trains,
            excluded=client.is_excluded,
            shut_out=client.is_shut_out,
            paused=client.is_paused,
            rests_s=client.rests_s,
            labels=labels,
            sent_away=client.sent_away,
            serving_version=client.serving_version,
            training_problem=self._parts.training.problem,
            download_problem=client.download_problem,
            upload_problem=client.upload_problem,
            upload_silent_s=client.upload_silent_s(now),
            clock_ahead_s=self._fleet_clock.ahead_s,
            certificate_left_s=self._certificate.left_s(now, wall_s),
            too_early=self._certificate.too_early(now, wall_s),
        )
        for wait in self._waits.note(waits(facts), now):
            log.info("waits", reason=wait.reason.value, why=wait.text)
        self._presence.wait = next(iter(self._waits.told), None)
        self._presence.labels_waiting = -1 if labels is None else labels.num_samples
        asked = labels is not None and client.measured_round == client.round  # counts of an earlier model say nothing
        self._presence.answered = (labels.num_answered, labels.num_right) if labels is not None and asked else (0, 0)
        self._presence.picture_age_s = self.metrics.oldest_picture_s()

    def _follow(self) -> None:
        source = self.client.source
        if source is not None:  # the fleet's task is known
            self._frames.follow(source.pictures, source.samples.watch)

    def _build(self, folder: Path, open_source: OpenSource, training: LocalTraining, trust: FleetTrust) -> Parts:
        identity = self._identity
        blobs = DiskBlobStore(folder / BLOBS)
        return Parts(
            client_id=identity.client_id,
            data_dir=folder,
            gate=Gate(identity.fleet, identity.client_id),
            trust=trust,
            boot_id=self._presence.boot_id,
            records=StateStore(folder, disk=self._disk),
            blobs=blobs,
            disk=self._disk,
            courier=FleetCourier(
                "client",
                identity.fleet,
                self.loop,
                blobs,
                Voices(self._signer, trust),
                own_id=identity.client_id,
                claims=self._claims,
            ),
            publish=lambda topic, payload, retain: self.loop.say(topic, payload, retain=retain),
            slot=self._slot,
            workers=Workers(
                folder / BLOBS,
                num_threads=identity.compute.inference_threads,
                providers=identity.compute.providers,
                verified=blobs.verified,
            ),
            engines=identity.compute.open_engines(folder, self._slot),
            training=training,
            jobs=self._jobs,
            open_source=open_source,
            clock=self._clock,
            frame_measures=self._frames.measures,
            compute=identity.compute,
        )

    def learn(self, feedback: AnyFeedback, shown: Shown | None = None) -> TakeBack:
        """Take an operator's word on any thread; returns how to take it back. Raises FeedbackRefused.

        ``shown``: the frame that it is about, where that is at hand.
        """
        if self.client.source is None:
            raise FeedbackRefused("the fleet's classes aren't known here yet: no aggregator has told them")
        samples: object = self.client.source.samples
        if not isinstance(samples, TakesFeedback):
            raise FeedbackRefused("feedback needs a camera; this client's source brings its labels itself")
        return samples.feedback(feedback, shown)

    def _training_status(self) -> dict[str, Any]:
        """What the budget makes of the round, and what heat and power make of the budget."""
        training, reading = self._parts.training, self._brake.reading
        return {
            "training": "" if training.course is None else training.course.text(),
            "training_error": training.problem,
            "privacy": self.client.privacy,
            "training_time_share": round(self._brake.time_share, 2),
            "training_slowed_by": self._brake.reason,
            "temperature_c": reading.temperature_c,
            "power_w": reading.power_w,
        }

    def _state(self) -> tuple[str, int, int]:
        return (self.client.step.value, self.client.round, self.client.serving_version)

    def _write_status(self, now: float) -> None:
        self._status_at = now
        counters, metrics = self._parts.courier.counters, self.metrics
        metrics.frames(self.counts)
        metrics.learning(self.client.measured, self.known().labels)
        metrics.transferred(counters["bytes_sent"], counters["bytes_received"])
        metrics.round.set(self.client.round)
        metrics.version.set(self.client.serving_version)
        metrics.serving(self._frames.serving())
        metrics.connected.set(float(self.loop.connected))
        metrics.waiting([wait.reason.value for wait in self._waits.told])
        metrics.healthy.set(float(self.status()["healthy"]))
        metrics.disk_problem.set(float(bool(self._disk.problem)))
        metrics.restarts.set(self._parts.training.num_restarts)
        metrics.training(self._parts.training.num_shortened, self._brake.time_share, self._brake.reading)
        if not self._disk.is_there():
            return
        try:
            temporary = self._folder / f".{STATUS_FILE}"  # not flushed to disk: flash memory wears
            temporary.write_text(json.dumps(self.status(), indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._folder / STATUS_FILE)
        except OSError as error:
            self._disk.takes(error)
