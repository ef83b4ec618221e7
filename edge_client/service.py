"""The running client: owns the sessions, the queue, the clock and the one loop; decisions are ``Client``'s."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from replayfleet.devices.limits import Sensors, Throttle
from replayfleet.edge_client.client import Client
from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.frames.answerer import FrameCounts
from replayfleet.edge_client.frames.frame_service import FrameService
from replayfleet.edge_client.jobs import JobThread
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, FeedbackRefused, TakesFeedback
from replayfleet.edge_client.learning.local_training import LocalTraining, Trainer, TrainerEvent, TrainerProcess
from replayfleet.edge_client.learning.training.brake import TrainingBrake
from replayfleet.edge_client.learning.training.job import BLOBS
from replayfleet.edge_client.operator.display.drawing import Legend
from replayfleet.edge_client.operator.metrics import Metrics
from replayfleet.edge_client.operator.operator_desk import OperatorDesk
from replayfleet.edge_client.operator.status import STATUS_FILE
from replayfleet.edge_client.serving.model import Workers
from replayfleet.edge_client.serving.slot import ModelSlot
from replayfleet.edge_client.sources import OpenSource
from replayfleet.edge_client.state_store import StateStore
from replayfleet.edge_client.sync.download import Gate
from replayfleet.edge_client.sync.parts import Compute, Parts
from replayfleet.edge_client.sync.presence import PresenceClock
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.presets import stores_data
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.wire.protocol.topics import client_subscriptions, feedback_topic, parse_topic
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Connect, Session

log = EventLogger(__name__)

TICK_S = 0.1
STATUS_EVERY_S = 5.0
MAX_QUEUED = 4096
"""Messages that wait for the loop; more are dropped and asked for again, which bounds the memory a flood can take."""


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


@dataclass(frozen=True, slots=True)
class _Message:
    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _JobOutcome:
    apply: Callable[[float], None]


_Item: TypeAlias = _Message | _JobOutcome | TrainerEvent


class ClientService:
    """One client process.

    Args:
        identity: who it is.
        folder: a claimed data dir.
        connect: makes sessions.
        open_source: makes the source once the fleet's task is known.
        metrics: what ``/metrics`` shows.
        spawn: starts a training process, given where its events go.
        clock: seconds; never runs backwards.
    """

    def __init__(  # the last three have defaults
        self,
        identity: Identity,
        folder: Path,
        connect: Connect,
        open_source: OpenSource,
        *,
        metrics: Metrics | None = None,
        spawn: Callable[[Callable[[TrainerEvent], None]], Trainer] = TrainerProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._folder = folder
        self._clock = clock
        self.desk = OperatorDesk(self._class_names, self._learn, clock)
        self.watchers: list[Callable[[Shown], None]] = [self.desk.watch]
        """Called on the serving thread with every picture and its prediction; must be quick."""
        self._inbox: queue.Queue[_Item] = queue.Queue()
        self._jobs = JobThread(lambda outcome: self._inbox.put(_JobOutcome(outcome)))
        self._slot = ModelSlot()
        self._frames = FrameService(self._slot, identity.compute.probation, self.watchers)
        self._num_connections = (0, 0)
        self._status_at = float("-inf")
        self.metrics = metrics or Metrics(identity.device, identity.compute.providers[0])
        self._feedback_topic = feedback_topic(identity.fleet, identity.client_id)
        self._presence = PresenceClock(
            identity.fleet, identity.client_id, device=identity.device, provider=identity.compute.providers[0]
        )
        self._parts = self._build(folder, open_source, LocalTraining(lambda: spawn(self._inbox.put)))
        self.client = Client(self._parts)
        allowance = identity.compute.allowance
        self._sensors = Sensors(allowance)
        self._brake = TrainingBrake(self._sensors.read, Throttle(allowance), self._parts.training)
        self._control, self._data = self._sessions(connect)

    @property
    def counts(self) -> FrameCounts:
        """What became of all frames."""
        return self._frames.counts

    def status(self) -> dict[str, Any]:
        """What ``/healthz`` and ``edge-client status`` show; safe to call from another thread."""
        identity, client, problem = self._identity, self.client, self._frames.error
        return {
            "healthy": self._connected and not problem,
            "fleet": identity.fleet,
            "client": identity.client_id,
            "device": identity.device,
            "provider": identity.compute.providers[0],
            "method": client.method,
            "stores_data": stores_data(client.method),
            "phase": client.step.value,
            "round": client.round,
            "serving_version": client.serving_version,
            **self._frames.serving(),
            **({} if self._parts.engines is None else {"engine": self._parts.engines.state}),
            **self._frames.status(),
            "trainer_pid": self._parts.training.pid,
            **self._training_status(),
            "source": "" if client.source is None else client.source.pictures.description,
            "source_error": problem,
            "broker": "connected" if self._connected else self._control.state,
            "pid": os.getpid(),
        }

    def legend(self, camera: str) -> Legend:
        """What drawings of a camera's pictures need; safe to call from another thread."""
        source = self.client.source
        cameras = () if source is None else source.pictures.cameras
        names = next((found.class_names for found in cameras if found.name == camera), ())
        return Legend(self.client.class_names, names, self.client.round)

    @property
    def turns(self) -> Mapping[str, int]:
        """What capture, inference and MQTT have done so far, for a watchdog.

        A camera that is lost counts while it is tried again, and so does a broker that isn't there: a restart would
        help neither. A client without a source yet waits for its fleet's task.
        """
        return {**self._frames.turns, "mqtt control": self._control.turns, "mqtt data": self._data.turns}

    def run(self, stop: threading.Event, *, stay: bool = False, manager: ServiceManager | None = None) -> bool:
        """Serve until the run is finished or ``stop`` is set; returns whether it is finished.

        Args:
            stop: set by a signal handler.
            stay: go on serving frames after the run is finished.
            manager: is told that this client is ready (it serves what was on its disk, or has the broker) and turns.

        Raises:
            SettingsError: The source doesn't fit the fleet's task.
            ReplayfleetError: The data dir can't be written.
        """
        last_state = ""
        manager = manager or ServiceManager()
        try:
            self.start()
            while not stop.is_set():
                self.pump(TICK_S)
                self._report(manager)
                last_state = self._tell_state(last_state)
                if self.client.finished and not stay:
                    break
            return self.client.finished
        finally:
            manager.stopping()
            self.stop()

    def start(self) -> None:
        """Serve what is on disk, and connect in the background."""
        self.client.start()
        self._frames.start()
        self._brake.start()
        self._control.start()
        self._data.start()
        self._follow()

    def _follow(self) -> None:
        source = self.client.source
        if source is not None:  # the fleet's task is known
            self._frames.follow(source.pictures, source.samples.watch)

    def pump(self, wait_s: float) -> None:
        """Deal with everything that waits, at most ``wait_s`` after the last; then let time pass."""
        deadline = self._clock() + wait_s
        try:
            self._deal_with(self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait())
            while wait_s == 0 or self._clock() < deadline:
                self._deal_with(self._inbox.get_nowait())
        except queue.Empty:
            pass
        now = self._clock()
        self._notice_connections(now)
        self._guarded(lambda: self.client.tick(now), "tick")
        self._brake.tick(now)
        self._follow()
        self._speak(now)

    def stop(self) -> None:
        """Say goodbye and end everything. Idempotent."""
        now = self._clock()
        if self._control.connected:
            self._control.publish(self._presence.topic, self._presence.say("stopped", self._state(), now), retain=True)
        self._control.stop()
        self._data.stop()
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

    @property
    def _connected(self) -> bool:
        return self._control.connected and self._data.connected

    def _build(self, folder: Path, open_source: OpenSource, training: LocalTraining) -> Parts:
        identity = self._identity
        blobs = DiskBlobStore(folder / BLOBS)
        return Parts(
            client_id=identity.client_id,
            data_dir=folder,
            gate=Gate(identity.fleet, identity.client_id),
            records=StateStore(folder),
            blobs=blobs,
            courier=FleetCourier(
                "client",
                identity.fleet,
                self._send,
                blobs,
                own_id=identity.client_id,
                max_payload_bytes=lambda: self._data.max_payload_bytes,
            ),
            publish=lambda topic, payload, retain: self._control.publish(topic, payload, retain=retain),
            slot=self._slot,
            workers=Workers(
                folder / BLOBS,
                num_threads=identity.compute.inference_threads,
                providers=identity.compute.providers,
            ),
            engines=identity.compute.open_engines(folder, self._slot),
            training=training,
            jobs=self._jobs,
            open_source=open_source,
            frame_measures=self._frames.measures,
            compute=identity.compute,
        )

    def _sessions(self, connect: Connect) -> tuple[Session, Session]:
        fleet, client_id = self._identity.fleet, self._identity.client_id
        control = connect(f"{fleet}-{client_id}-control", self._receive, self._presence.will())
        data = connect(f"{fleet}-{client_id}-data", self._receive, None)
        topics = client_subscriptions(fleet, client_id)
        control.subscribe(topics.control)
        data.subscribe(topics.data)
        return control, data

    def _deal_with(self, item: _Item) -> None:
        now = self._clock()
        if isinstance(item, _Message) and item.topic == self._feedback_topic:
            self._guarded(lambda: self._take_feedback(item.payload), "feedback")
        elif isinstance(item, _Message):
            self._guarded(lambda: self.client.on_message(item.topic, item.payload, now), "message")
        elif isinstance(item, _JobOutcome):
            self._guarded(lambda: self.client.on_outcome(item.apply, now), "job")
        else:
            self._guarded(lambda: self.client.on_trainer(item, now), "training")

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        """One bad message must not stop a device; a disk that fails and a source that doesn't fit must."""
        try:
            work()
        except OSError as error:
            raise ReplayfleetError(f"the data dir can't be written: {error}; what was committed is kept") from error
        except ReplayfleetError:
            raise
        except Exception:
            self.metrics.errors.inc()
            log.exception("unexpected error", while_handling=what)

    def _take_feedback(self, payload: bytes) -> None:
        try:
            self.desk.take(payload)
            log.info("feedback taken")
        except FeedbackRefused as refused:
            log.warning("feedback refused", reason=refused)

    def _learn(self, feedback: AnyFeedback) -> None:
        """Called on any thread."""
        samples: object = None if self.client.source is None else self.client.source.samples
        if not isinstance(samples, TakesFeedback):
            raise FeedbackRefused("feedback needs a camera; this client's source brings its labels itself")
        samples.feedback(feedback)

    def _class_names(self) -> tuple[str, ...]:
        return self.client.class_names

    def _receive(self, topic: str, payload: bytes) -> None:
        """Called on a network thread: only enqueue."""
        if self._inbox.qsize() < MAX_QUEUED:
            self._inbox.put(_Message(topic, payload))

    def _send(self, topic: str, payload: bytes) -> None:
        session = self._data if parse_topic(topic).carries_blocks else self._control
        session.publish(topic, payload)

    def _notice_connections(self, now: float) -> None:
        numbers = (self._control.num_connections, self._data.num_connections)
        if numbers != self._num_connections and self._connected:
            self._num_connections = numbers
            self._presence.forget()  # the will of the broken connection may stand where we do
            self._guarded(lambda: self.client.on_connected(now), "connection")

    def _training_status(self) -> dict[str, Any]:
        """What the budget makes of the round, and what heat and power make of the budget."""
        training, reading = self._parts.training, self._brake.reading
        return {
            "training": "" if training.course is None else training.course.text(),
            "training_error": training.problem,
            "training_time_share": round(self._brake.time_share, 2),
            "training_slowed_by": self._brake.reason,
            "temperature_c": reading.temperature_c,
            "power_w": reading.power_w,
        }

    def _state(self) -> tuple[str, int, int]:
        return (self.client.step.value, self.client.round, self.client.serving_version)

    def _speak(self, now: float) -> None:
        if self._connected:
            presence = self._presence.due(*self._state(), now)
            if presence is not None:
                self._control.publish(self._presence.topic, presence, retain=True)
        if now - self._status_at >= STATUS_EVERY_S:
            self._write_status(now)

    def _write_status(self, now: float) -> None:
        self._status_at = now
        counters, metrics = self._parts.courier.counters, self.metrics
        metrics.frames(self.counts)
        metrics.transferred(counters["bytes_sent"], counters["bytes_received"])
        metrics.round.set(self.client.round)
        metrics.version.set(self.client.serving_version)
        metrics.serving(self._frames.serving())
        metrics.connected.set(float(self._connected))
        metrics.restarts.set(self._parts.training.num_restarts)
        metrics.training(self._parts.training.num_shortened, self._brake.time_share, self._brake.reading)
        temporary = self._folder / f".{STATUS_FILE}"  # not flushed to disk: flash memory wears
        temporary.write_text(json.dumps(self.status(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._folder / STATUS_FILE)

    def _report(self, manager: ServiceManager) -> None:
        phase, round_index, version = self._state()
        engine = "" if self._parts.engines is None else f"; {self._parts.engines.state}".rstrip("; ")
        where = f"round {round_index}" if round_index >= 0 else "no round yet"
        served = f"serving version {version}" if version > 0 else "serving no model yet"
        status = f"{phase}; {where}, {served}; broker {self._control.state}{engine}"
        manager.report(self.turns, ready=self._connected or version > 0, status=status, now=self._clock())

    def _tell_state(self, last: str) -> str:
        connected = self._connected
        state = "connected" if connected else self._control.state
        if state != last:
            (log.info if connected else log.warning)("broker", state=state)
        return state
