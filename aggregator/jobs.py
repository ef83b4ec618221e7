"""One worker thread: training mathematics never blocks the loop that talks to the fleet."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from replayfleet.aggregator.parts import Outcome

STOP_TIMEOUT_S = 2.0


class ThreadJobs:
    """Runs jobs one by one; ``submit``, ``handed_over``, ``idle`` and ``stop`` belong to the loop's thread.

    The thread is a daemon: an aggregation of minutes doesn't hold up the end of the process, for the next start
    computes it again.

    Args:
        deliver: takes outcomes, on the worker's thread.
        prepare: called once on the worker's thread, before its first job.
    """

    def __init__(self, deliver: Callable[[Outcome], None], prepare: Callable[[], None] | None = None) -> None:
        self._deliver = deliver
        self._prepare = prepare
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._stopped = False
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name="aggregation", daemon=True)
        self._thread.start()

    def submit(self, name: str, work: Callable[[], object]) -> None:
        """Run ``work`` after everything submitted before."""
        self._pending += 1
        self._waiting.put((name, work))

    def handed_over(self) -> None:
        """The loop took an outcome and dealt with it."""
        self._pending -= 1

    @property
    def idle(self) -> bool:
        """Whether nothing is running, waiting, or done but not handed over."""
        return self._pending == 0

    def stop(self) -> None:
        """Drop what waits; give the running job a moment. Idempotent."""
        self._stopped = True
        self._waiting.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while True:
            job = self._waiting.get()
            if job is None or self._stopped:
                return
            self._deliver(run_job(*job))


def run_job(name: str, work: Callable[[], object]) -> Outcome:
    """Run a job and return how it ended, whatever it raises."""
    try:
        return Outcome(name, work())
    except Exception as error:
        return Outcome(name, error=error)
