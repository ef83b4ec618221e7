"""Slows training down while the board is too hot or draws too much: the training process stands still in between.

Its parent stops and continues it (SIGSTOP, SIGCONT), a share of every second. So it works for every method, whatever
its steps are like, and serving, which lives in other processes, is left as it is. Sensors are read on a thread of
their own, for some take long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from replayfleet.devices.limits import Reading, Throttle
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

PERIOD_S = 1.0
READ_EVERY_S = 2.0


class Pausable(Protocol):
    """What the brake acts on."""

    def pause(self, *, paused: bool) -> None:
        """Let training stand still, or go on; does nothing if it is so already."""


class TrainingBrake:
    """Decides at every tick whether training may run right now.

    Args:
        read: the sensors.
        throttle: what follows from them.
        training: what is stopped and continued.
    """

    def __init__(self, read: Callable[[], Reading], throttle: Throttle, training: Pausable) -> None:
        self._read = read
        self._throttle = throttle
        self._training = training
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._said = "full"
        self.reading = Reading()

    @property
    def time_share(self) -> float:
        """Of its time that training may run, 0 to 1."""
        return self._throttle.time_share

    @property
    def reason(self) -> str:
        """Why that is less than 1; empty if it isn't."""
        return self._throttle.reason

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="sensors", daemon=True)
        self._thread.start()

    def tick(self, now: float) -> None:
        """Stop or continue training; call at least every tenth of a second."""
        self._training.pause(paused=now % PERIOD_S >= self.time_share * PERIOD_S)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def update(self) -> None:
        """Read the sensors once; one log line when training is slowed, stopped or set free."""
        self._take(self._read())

    def _take(self, reading: Reading) -> None:
        self.reading = reading
        share = self._throttle.update(reading)
        state = "full" if share == 1 else "slowed" if share > 0 else "stopped"
        if state != self._said:
            self._said = state
            (log.info if state == "full" else log.warning)(
                "training speed", state=state, time_share=round(share, 2), reason=self.reason
            )

    def _watch(self) -> None:
        failed = False
        while not self._stop.is_set():
            try:
                self.update()
                failed = False
            except Exception:  # root of the thread
                if not failed:
                    log.exception(
                        "sensors can't be read", next="they are read again; training gets its time back slowly"
                    )
                failed = True
                self._take(Reading())
            self._stop.wait(READ_EVERY_S)
