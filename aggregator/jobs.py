"""One worker thread: training mathematics never blocks the loop that talks to the fleet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aggregator.parts import Outcome


class ThreadJobs:
    """Runs jobs one by one; ``submit``, ``handed_over`` and ``idle`` belong to the loop's thread.

    Args:
        deliver: takes outcomes, on the worker's thread.
        prepare: called once on the worker's thread, before its first job.
    """

    def __init__(self, deliver: Callable[[Outcome], None], prepare: Callable[[], None] | None = None) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aggregation", initializer=prepare)
        self._pending = 0

    def submit(self, name: str, work: Callable[[], object]) -> None:
        """Run ``work`` after everything submitted before."""
        self._pending += 1
        self._pool.submit(self._run, name, work)

    def handed_over(self) -> None:
        """The loop took an outcome and dealt with it."""
        self._pending -= 1

    @property
    def idle(self) -> bool:
        """Whether nothing is running, waiting, or done but not handed over."""
        return self._pending == 0

    def stop(self) -> None:
        """Drop what waits, let the running job end, join the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, name: str, work: Callable[[], object]) -> None:
        self._deliver(run_job(name, work))


def run_job(name: str, work: Callable[[], object]) -> Outcome:
    """Run a job and return how it ended, whatever it raises."""
    try:
        return Outcome(name, work())
    except Exception as error:
        return Outcome(name, error=error)
