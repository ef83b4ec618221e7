"""Sensor data of one frame, out of what several sensors deliver on threads of their own, late and interleaved."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

FRAMES_KEPT = 16
"""Per sensor; the oldest make way, so that nothing piles up behind a reader that stands still."""

_NEWER_FRAMES_OF_A_LOST_ONE = 4
_LOOK_AT_STOP_S = 0.05


class Missing(enum.Enum):
    """Why a frame isn't there."""

    LATE = enum.auto()
    LOST = enum.auto()
    """A sensor has gone on without it."""


class FrameMatcher:
    """Collects what sensors deliver and hands it out by frame.

    Args:
        sensors: names, in the order in which ``take`` returns their data.
    """

    def __init__(self, sensors: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.sensors = tuple(sensors)
        self._held: dict[str, dict[int, Any]] = {sensor: {} for sensor in sensors}
        self._taken = -1
        self._changed = threading.Condition()
        self._clock = clock

    def receiver(self, sensor: str) -> Callable[[Any], None]:
        """Return what a sensor calls with its data, from any thread; data that are too old are let go."""
        held = self._held[sensor]

        def receive(data: Any) -> None:
            with self._changed:
                if data.frame <= self._taken:
                    return
                held[data.frame] = data
                while len(held) > FRAMES_KEPT:
                    del held[min(held)]
                self._changed.notify_all()

        return receive

    def take(self, frame: int, until: float, stop: threading.Event) -> tuple[Any, ...] | Missing:
        """Return the sensors' data of ``frame``, and let everything older go.

        Args:
            frame: what ``tick`` returned; frames are asked for in rising order.
            until: time of ``clock`` at which waiting ends.
            stop: ends waiting, too.
        """
        with self._changed:
            while True:
                found = [held.get(frame) for held in self._held.values()]
                if all(data is not None for data in found):
                    self._forget(frame)
                    return tuple(found)
                if self._is_lost(frame):
                    self._forget(frame)
                    return Missing.LOST
                left = until - self._clock()
                if left <= 0 or stop.is_set():
                    return Missing.LATE
                self._changed.wait(min(left, _LOOK_AT_STOP_S))

    def waiting_for(self, frame: int) -> str:
        """Return the names of the sensors that haven't delivered ``frame``."""
        with self._changed:
            return ", ".join(sensor for sensor, held in self._held.items() if frame not in held)

    def _is_lost(self, frame: int) -> bool:
        return any(
            frame not in held and sum(other > frame for other in held) >= _NEWER_FRAMES_OF_A_LOST_ONE
            for held in self._held.values()
        )

    def _forget(self, frame: int) -> None:
        self._taken = frame
        for held in self._held.values():
            for old in [other for other in held if other <= frame]:
                del held[old]
