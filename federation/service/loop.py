"""The one loop of a service: an inbox, two sessions, and time that passes. Decisions are those of whom it serves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.disk import Disk
from replayfleet.federation.service.inbox import FEEDBACK_LANE, FairInbox, Message, Work
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.wire.protocol.topics import Subscriptions
from replayfleet.federation.wire.transport.interfaces import Connect, Session, Will
from replayfleet.federation.wire.transport.seal import Kind, Signer

log = EventLogger(__name__)

TICK_S = 0.1
LOOK_EVERY_S = 0.5
FLOOD = 50
"""So many messages sent in vain between two looks are a flood; of an honest client there are hardly any."""
MAX_WILL_BYTES = 0xFFFF
TELL_EVERY_S = 10.0
MAX_TOLD = 4
"""Those who had most messages dropped are named, one line each."""


class Served(Protocol):
    """Whose loop it is. Everything is called on the loop's thread."""

    def on_message(self, topic: str, payload: bytes, now: float) -> None:
        """Take a message from the network."""

    def on_connected(self, now: float) -> None:
        """The broker accepted both sessions (again): repeat what it may have lost."""

    def on_tick(self, now: float) -> None:
        """Let time pass; called after everything that waited, at least every ``TICK_S``."""

    @property
    def turns(self) -> Mapping[str, int]:
        """What the threads of this service have done so far, for a watchdog."""

    @property
    def ready(self) -> bool:
        """Whether the service does what it is there for."""

    @property
    def summary(self) -> str:
        """One line for ``systemctl status``, without the broker's state."""


class Loop:
    """Owns inbox, sessions and clock.

    Args:
        served: whose loop it is.
        clock: seconds; never runs backwards.
        inbox: what waits for it.
        fatal: errors of messages, connections and ticks that end the service; others are logged and counted.
        disk: of the data dir; is told its errors, which are a state and end nothing.
        count_error: called for each that is logged.
        signer: signs what is said.

    Attributes:
        control: session of small messages; there after ``connect``.
        data: session of blocks.
        inbox: what waits for it; whoever sends too much loses messages there.
        flooding: who sends in vain, in numbers; said once at each look, else empty.
    """

    control: Session
    data: Session

    def __init__(
        self,
        served: Served,
        clock: Callable[[], float] = time.monotonic,
        *,
        inbox: FairInbox,
        fatal: tuple[type[Exception], ...] = (),
        disk: Disk,
        count_error: Callable[[], None],
        signer: Signer,
    ) -> None:
        self._served = served
        self._clock = clock
        self.inbox = inbox
        self._fatal = fatal
        self.disk = disk
        self._count_error = count_error
        self._signer = signer
        self._num_connections = (0, 0)
        self._looked_at = self._told_at = float("-inf")
        self._dropped: Counter[str] = Counter()
        self._unsaid: dict[str, str] = {}  # topic -> why no message for it is on its way
        self.flooding: frozenset[str] = frozenset()

    def connect(self, connect: Connect, name: str, topics: Subscriptions, will: Will | None) -> None:
        """Make both sessions; they connect with ``start``. A will goes with the control session.

        Raises:
            SettingsError: MQTT has no room for the will.
        """
        if will is not None:
            will = Will(will.topic, self._signer.seal(will.topic, will.payload, Kind.WILL), will.retain)
            if len(will.payload) > MAX_WILL_BYTES:
                raise SettingsError(
                    f"what a broker says when we are gone takes {len(will.payload)} bytes, and MQTT {MAX_WILL_BYTES} "
                    "at most; shorten the names of classes"
                )
        self.control = connect(f"{name}-control", self._receive, will)
        self.data = connect(f"{name}-data", self._receive, None)
        self.control.subscribe(topics.control)
        self.data.subscribe(topics.data)

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted both sessions."""
        return self.control.connected and self.data.connected

    @property
    def refusal(self) -> str:
        """What the broker has against us, in words; empty: nothing."""
        return self.control.problem or self.data.problem or next(iter(self._unsaid.values()), "")

    @property
    def broker(self) -> str:
        """One line for operators: how we stand with the broker."""
        session = self.data if self.control.connected else self.control
        return self.refusal or ("connected" if session.connected else session.state)

    @property
    def turns(self) -> dict[str, int]:
        """What the sessions have done so far, for a watchdog."""
        return {"mqtt control": self.control.turns, "mqtt data": self.data.turns}

    def say(self, topic: str, frame: bytes, *, retain: bool = False) -> None:
        """Sign a message and publish it on the control session; that the broker takes none so large ends nothing."""
        try:
            self.control.publish(topic, self._signer.seal(topic, frame), retain=retain)
        except ValueError as error:
            if topic not in self._unsaid:  # it is said again every few seconds
                log.warning("message not sent", reason=error, next="raise the broker's packet limit")
            if retain:  # without these nobody knows of us
                why = f"broker: {error}; raise its packet limit (mosquitto's max_packet_size)"
                self._unsaid.setdefault(topic, why)
        else:
            self._unsaid.pop(topic, None)

    def put(self, what: str, work: Callable[[float], None], *, guarded: bool = True) -> None:
        """Have ``work`` called with ``now`` on the loop's thread; may be called on any.

        Args:
            what: for the log, if it fails.
            work: must be quick.
            guarded: as messages are; else whatever it raises, but for the disk's errors, ends the service.
        """
        self.inbox.put_own(Work(what, guarded, work))

    def start(self) -> None:
        """Connect in the background."""
        self.control.start()
        self.data.start()

    def stop(self) -> None:
        """Close both sessions. Idempotent."""
        self.control.stop()
        self.data.stop()

    def run(self, stop: threading.Event, over: Callable[[float], bool], manager: ServiceManager) -> None:
        """Turn until ``over(now)`` or until ``stop`` is set, and tell systemd."""
        last = ""
        while not stop.is_set() and not over(self._clock()):
            self.pump(TICK_S)
            state = self.broker
            summary = f"{self._served.summary}; broker {state}"
            manager.report(self._served.turns, ready=self._served.ready, status=summary, now=self._clock())
            problem = state.partition("): ")[2] or state  # whichever attempt: a night without a broker is one line
            if problem not in {last, "connected"}:  # the session itself logs when it is connected
                log.warning("broker", state=state)
            last = problem

    def pump(self, wait_s: float) -> None:
        """Deal with everything that waits, at most ``wait_s`` after the last; then let time pass."""
        deadline = self._clock() + wait_s
        item = self.inbox.get(wait_s)
        while item is not None:
            if isinstance(item, Message):
                began = time.thread_time()
                self.guarded("message", self._served.on_message, item.topic, item.payload, self._clock())
                self.inbox.charge(item.topic, time.thread_time() - began, self._clock())
            else:
                self._do(item)
            item = self.inbox.get(0.0) if wait_s == 0 or self._clock() < deadline else None
        numbers = (self.control.num_connections, self.data.num_connections)
        if numbers != self._num_connections and self.connected:
            self._num_connections = numbers
            self.guarded("connection", self._served.on_connected, self._clock())
        self._look_for_floods(self._clock())
        self._served.on_tick(self._clock())

    def guarded(self, what: str, work: Callable[..., None], *arguments: Any) -> None:
        """Call ``work``: neither one bad message nor a disk that fails may stop device or fleet."""
        try:
            work(*arguments)
        except self._fatal:
            raise
        except Exception as error:  # root of the loop
            if not self.disk.takes(error):
                self._count_error()
                log.exception("unexpected error", while_handling=what)

    def _do(self, work: Work) -> None:
        if work.guarded:
            self.guarded(work.what, work.run, self._clock())
            return
        try:
            work.run(self._clock())
        except Exception as error:
            if not self.disk.takes(error):
                raise

    def _look_for_floods(self, now: float) -> None:
        self.flooding = frozenset()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._dropped += self.inbox.take_dropped()
            self.flooding = frozenset(sender for sender, count in self.inbox.take_waste().items() if count >= FLOOD)
        if self._dropped and now - self._told_at >= TELL_EVERY_S:
            self._told_at, dropped, self._dropped = now, self._dropped, Counter()
            for sender, count in dropped.most_common(MAX_TOLD):
                is_lost = sender.endswith(FEEDBACK_LANE)
                then = "send them again, slower" if is_lost else "what mattered is repeated"
                log.warning("too many messages", client=sender, dropped=count, next=then)

    def _receive(self, topic: str, payload: bytes) -> None:
        """Called on a network thread: only enqueue."""
        self.inbox.put(topic, payload, self._clock())
