"""Slow work beside a service's loop: one thread, first come, first served; the loop itself does what follows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

from replayfleet.federation.errors import told

T = TypeVar("T")

Outcome: TypeAlias = Callable[[float], None]
"""To be called with ``now`` on the loop's thread."""

_given_up: list[threading.Thread] = []


class Jobs:
    """Runs slow work one after the other, off the loop's thread, which calls all of this.

    The thread is a daemon: work of minutes doesn't hold up the end of the process, for the next start does it again.

    Args:
        deliver: hands an outcome to the loop; called on the job thread.
        prepare: called once on the job thread, before its first job.
        stop_timeout_s: how long the job in progress is waited for at the end.
    """

    def __init__(
        self,
        deliver: Callable[[Outcome], None],
        prepare: Callable[[], None] = lambda: None,
        *,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self._deliver = deliver
        self._prepare = prepare
        self._stop_timeout_s = stop_timeout_s
        self._waiting: queue.SimpleQueue[Callable[[], Outcome]] = queue.SimpleQueue()
        self._stopped = False
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], then: Callable[[T, float], None], failed: Callable[[Exception, float], None]
    ) -> None:
        """Run ``work``; the loop's thread then gets ``then(result, now)`` or ``failed(error, now)``."""
        self._pending += 1
        self._waiting.put(lambda: outcome_of(work, then, failed))

    @property
    def idle(self) -> bool:
        """Whether nothing is running, waiting, or done but not dealt with by the loop."""
        return self._pending == 0

    def stop(self) -> None:
        """Drop what waits; give the job in progress a moment. Idempotent."""
        self._stopped = True
        self._waiting.put(lambda: lambda now: None)  # wakes the thread
        self._thread.join(self._stop_timeout_s)
        if self._thread.is_alive():
            _given_up.append(self._thread)

    def _run(self) -> None:
        self._prepare()
        while True:
            job = self._waiting.get()
            if self._stopped:
                return
            outcome = job()
            self._deliver(partial(self._deal_with, outcome))

    def _deal_with(self, outcome: Outcome, now: float) -> None:
        try:
            outcome(now)
        finally:
            self._pending -= 1


def some_go_on() -> bool:
    """Whether a job goes on that was in progress when its ``Jobs`` stopped."""
    return any(thread.is_alive() for thread in _given_up)


def outcome_of(
    work: Callable[[], T], then: Callable[[T, float], None], failed: Callable[[Exception, float], None]
) -> Outcome:
    """Run ``work`` here and now; returns what is left to do."""
    try:
        result = work()
    except BaseException as caught:  # root of a thread, exits too: the loop decides what a failure means
        error = caught if isinstance(caught, Exception) else RuntimeError(f"it would end the process ({told(caught)})")
        return lambda now: failed(error, now)
    return lambda now: then(result, now)
