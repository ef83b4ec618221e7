"""When a recording or a simulated camera takes its next picture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator


class Pace:
    """At most ``rate_hz`` pictures a second; one that comes late moves all later ones, so nothing hurries after it.

    Args:
        rate_hz: pictures per second.
    """

    def __init__(self, rate_hz: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = 1.0 / rate_hz
        self._clock = clock
        self._due_at = clock()

    def wait(self, stop: threading.Event) -> bool:
        """Return True when the next picture is due, False as soon as ``stop`` is set."""
        now = self._clock()
        self._due_at = max(self._due_at, now)
        if stop.wait(self._due_at - now):
            return False
        self._due_at += self._period_s
        return True


def ticks(
    rate_hz: float, stop: threading.Event, clock: Callable[[], float], first_id: int = 0
) -> Iterator[tuple[int, float]]:
    """Yield (frame id, time) of the pictures of a camera that waits for nobody, until ``stop`` is set.

    A reader that falls behind makes it skip ahead: frame ids then jump, and nothing queues up.
    """
    began, frame_id = clock(), first_id
    while not stop.wait(max(0.0, began + (frame_id - first_id) / rate_hz - clock())):
        yield frame_id, clock()
        frame_id = max(frame_id + 1, first_id + int((clock() - began) * rate_hz))
