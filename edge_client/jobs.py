"""Slow work beside the loop: loading models, measuring them, reading images. One thread, first come, first served."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Outcome: TypeAlias = Callable[[float], None]
"""To be called with ``now`` on the loop's thread."""


class JobThread:
    """Implements ``parts.Jobs``.

    Args:
        enqueue: hands an outcome to the loop; called on the job thread.
    """

    def __init__(self, enqueue: Callable[[Outcome], None]) -> None:
        self._enqueue = enqueue
        self._work: queue.SimpleQueue[Callable[[], Outcome] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], then: Callable[[T, float], None], failed: Callable[[Exception, float], None]
    ) -> None:
        """Run ``work``, then one of the others on the loop's thread."""
        self._work.put(lambda: outcome_of(work, then, failed))

    def stop(self) -> None:
        """End the thread after the job in progress. Idempotent."""
        self._work.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            self._enqueue(work())


def outcome_of(
    work: Callable[[], T], then: Callable[[T, float], None], failed: Callable[[Exception, float], None]
) -> Outcome:
    """Run ``work`` here and now; returns what is left to do."""
    try:
        result = work()
    except Exception as caught:  # root of a thread: the loop decides what a failure means
        error = caught
        return lambda now: failed(error, now)
    return lambda now: then(result, now)
