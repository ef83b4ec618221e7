from __future__ import annotations

import signal
import threading

from replayfleet.federation.service.signals import stopped_by_signals


class Interrupted(threading.Event):
    """An event during whose setting, while its lock is held, the same signal comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.again = threading.Lock(), True

    def set(self) -> None:
        assert self.lock.acquire(timeout=60), "the second signal waits for the first, which waits for it"
        if self.again:
            self.again = False
            signal.raise_signal(signal.SIGTERM)
        super().set()
        self.lock.release()


def test_a_second_signal_within_the_first_hangs_nothing() -> None:
    stop = Interrupted()
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(60)
