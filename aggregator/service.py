"""The running aggregator: owns the sessions, the queue, the clock and the one loop; decisions are the coordinator's."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replayfleet.aggregator.admission import Gate
from replayfleet.aggregator.aggregation import Aggregation, upload_layout
from replayfleet.aggregator.coordinator import Coordinator, announcement
from replayfleet.aggregator.founding import Fleet, graphs_of, take_up
from replayfleet.aggregator.jobs import ThreadJobs
from replayfleet.aggregator.operator.journal import Journal
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.aggregator.parts import Outcome, Parts
from replayfleet.aggregator.presence import PresenceTable
from replayfleet.aggregator.publisher import Publisher
from replayfleet.aggregator.steps import Checkpoint, Step, no_checkpoint
from replayfleet.aggregator.store import AggregatorStore
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.wire.protocol.codec import encode
from replayfleet.federation.wire.protocol.messages import Announcement
from replayfleet.federation.wire.protocol.topics import aggregator_subscriptions, parse_topic, round_topic
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore
from replayfleet.federation.wire.transport.courier import FleetCourier
from replayfleet.federation.wire.transport.interfaces import Connect, Session, Will

TICK_S = 0.1
MAX_QUEUED = 20_000
"""Messages that wait for the loop; more are dropped and asked for again, which bounds the memory a flood can take."""

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
        jobs: makes the worker, given where outcomes go.

    Raises:
        SettingsError: The data dir is of a fleet with another spec.
        ArtefactRejected: The fleet's models can't be exported.
    """

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        connect: Connect,
        *,
        checkpoint: Checkpoint = no_checkpoint,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        jobs: Callable[[Callable[[Outcome], None]], ThreadJobs] = ThreadJobs,
    ) -> None:
        self._clock = clock
        self._inbox: queue.Queue[tuple[str, bytes] | Outcome] = queue.Queue()
        self._num_dropped = 0
        self._num_connections = (0, 0)
        self._store = AggregatorStore(folder)
        self._is_new = take_up(self._store, fleet.spec)
        self._store.set_num_rounds(fleet.rules.num_rounds)
        self._jobs = jobs(self._inbox.put)
        blobs = DiskBlobStore(folder / "blobs")
        graphs = graphs_of(self._store, blobs, fleet.exporter)
        publisher = Publisher(fleet.spec.fleet, blobs, fleet.exporter, graphs)
        self._parts = Parts(
            spec=fleet.spec,
            rules=fleet.rules,
            method=fleet.method,
            gate=Gate(fleet.spec.fleet, upload_layout(fleet.method), fleet.caps),
            store=self._store,
            blobs=blobs,
            courier=FleetCourier(
                "aggregator",
                fleet.spec.fleet,
                self._send,
                blobs,
                max_payload_bytes=lambda: self._data.max_payload_bytes,
            ),
            aggregation=Aggregation(fleet.spec, fleet.method, fleet.sampler, blobs, publisher),
            jobs=self._jobs,
            journal=Journal(folder),
            metrics=metrics or Metrics(),
            presence=PresenceTable(),
            announce=self._announce,
            epoch=uuid.uuid4().hex,
            wall_clock=time.time,
            checkpoint=checkpoint,
        )
        self.coordinator = Coordinator(self._parts, clock())
        self._control, self._data = self._sessions(connect)
        self._view = self._snapshot()

    def health(self) -> Mapping[str, Any]:
        """What ``/healthz`` says: where the run stands, and whether the broker is there."""
        return {
            **self._view,
            "healthy": self._control.connected and self._data.connected,
            "broker": self._control.state,
        }

    def run(self, stop: threading.Event, manager: ServiceManager | None = None) -> bool:
        """Serve until the run is finished (True) or ``stop`` is set (False).

        Args:
            stop: set by a signal handler.
            manager: is told that this aggregator is ready (it has the broker) and that its loop and MQTT turn; an
                aggregation may take hours, so its thread isn't waited for.

        Raises:
            ReplayfleetError: A round can't be aggregated, or the data dir can't be written. Nothing accepted is lost.
        """
        self.start()
        last_state = ""
        manager = manager or ServiceManager()
        try:
            while not stop.is_set():
                if self.coordinator.finish.over(self._clock()):
                    return True
                self.pump(TICK_S)
                last_state = self._tell_state(last_state)
                self._report(manager)
            return False
        finally:
            manager.stopping()
            self.stop()

    def start(self) -> None:
        """Connect in the background and take up the run."""
        if self._is_new:
            self._parts.checkpoint(Step.ROUND_OPENED)
        self._control.start()
        self._data.start()
        self.coordinator.start(self._clock())

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
        numbers = (self._control.num_connections, self._data.num_connections)
        if numbers != self._num_connections and min(numbers) > 0:
            self._num_connections = numbers
            self.coordinator.on_connected(now)
        self._guarded(lambda: self.coordinator.tick(now), "tick")
        self._view = self._snapshot()

    def stop(self) -> None:
        """Say goodbye and close everything. Idempotent."""
        self.coordinator.farewell(self._clock())
        self._control.stop()
        self._data.stop()
        self._jobs.stop()
        self._parts.journal.close()
        self._store.close()

    def _snapshot(self) -> Mapping[str, Any]:
        """Where the run stands; made by the loop, read by the endpoint's threads."""
        rounds = self.coordinator.rounds
        return {
            "fleet": self._parts.spec.fleet,
            "method": self._parts.spec.method,
            "round": rounds.index,
            "phase": rounds.phase.value,
            "uploads": len(rounds.accepted),
            "expected": rounds.rules.num_clients,
            "clients": self._parts.presence.live,
            "messages_dropped": self._num_dropped,
        }

    def _deal_with(self, item: tuple[str, bytes] | Outcome) -> None:
        now = self._clock()
        if isinstance(item, Outcome):
            try:
                self.coordinator.on_outcome(item, now)
            except (sqlite3.Error, OSError) as error:
                raise _unwritable(error) from error
            self._jobs.handed_over()
        else:
            self._guarded(lambda: self.coordinator.on_message(*item, now), "message")

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        """One bad message must not stop a fleet; a disk that fails must."""
        try:
            work()
        except (sqlite3.Error, OSError) as error:
            raise _unwritable(error) from error
        except Exception:
            self._parts.metrics.errors.inc()
            _log.exception("unexpected error", while_handling=what)

    def _sessions(self, connect: Connect) -> tuple[Session, Session]:
        fleet = self._parts.spec.fleet
        gone = announcement(self._parts, self.coordinator.rounds, self._clock(), state="offline")
        will = Will(round_topic(fleet), encode(gone), retain=True)
        control = connect(f"{fleet}-aggregator-control", self._receive, will)
        data = connect(f"{fleet}-aggregator-data", self._receive, None)
        topics = aggregator_subscriptions(fleet)
        control.subscribe(topics.control)
        data.subscribe(topics.data)
        return control, data

    def _receive(self, topic: str, payload: bytes) -> None:
        """Called on a network thread: only enqueue."""
        if self._inbox.qsize() < MAX_QUEUED:
            self._inbox.put((topic, payload))
        else:
            self._num_dropped += 1

    def _send(self, topic: str, payload: bytes) -> None:
        session = self._data if parse_topic(topic).carries_blocks else self._control
        session.publish(topic, payload)

    def _announce(self, message: Announcement) -> None:
        self._control.publish(round_topic(message.spec.fleet), encode(message), retain=True)

    def _report(self, manager: ServiceManager) -> None:
        rounds, online = self.coordinator.rounds, len(self._parts.presence.live)
        turns = {"mqtt control": self._control.turns, "mqtt data": self._data.turns}
        status = (
            f"round {rounds.index} {rounds.phase.value}; {len(rounds.accepted)} of {rounds.rules.num_clients} uploads; "
            f"{online} clients online; broker {self._control.state}"
        )
        ready = self._control.connected and self._data.connected
        manager.report(turns, ready=ready, status=status, now=self._clock())

    def _tell_state(self, last: str) -> str:
        """Log why the broker isn't there whenever that changes; the session itself logs when it is."""
        state = "" if self._control.connected else self._control.state
        if state and state != last:
            _log.warning("broker", state=state)
        return state


def _unwritable(error: Exception) -> ReplayfleetError:
    return ReplayfleetError(f"the data dir can't be written: {error}; what was accepted is kept")
