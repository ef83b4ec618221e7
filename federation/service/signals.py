"""Ending a service on a signal: the loop is told, and says its goodbyes itself."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGINT, SIGTERM and SIGHUP while the block runs; main thread only.

    SIGHUP comes when a terminal is closed; who said ``nohup`` has it ignored.
    ``Event.set`` takes a lock, and a second signal would wait for it inside the first: a thread of its own sets it.
    """

    def tell(*_: object) -> None:
        try:
            _thread.start_new_thread(stop.set, ())
        except RuntimeError:  # no memory for one, or as many as there may be
            stop.set()

    hangs_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, *hangs_up)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
