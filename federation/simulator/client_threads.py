"""Clients of a simulation that are trained or mixed for at the same time, each on a thread of its own.

The networks are small: the threads of one operation wait for each other most of the time, while whole clients have
nothing to do with each other. PyTorch and ONNX Runtime leave the interpreter to other threads while they compute.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from replayfleet.federation.service.cluster.engine import HERE, RayEngine, engine
from replayfleet.federation.service.torch_setup import prepare_torch

_NAME = "client-half"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ClientThreads:
    """What does a round's work for each client.

    Attributes:
        turn: hold it for what one client does at a time.
        elsewhere: a cluster that does it; what it does must be values.
    """

    _pool: ThreadPoolExecutor | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    elsewhere: RayEngine | None = None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, in order; the first error ends those that haven't begun."""
        if self.elsewhere is not None:
            return self.elsewhere.map(function, items)
        return list(map(function, items) if self._pool is None else self._pool.map(function, items))


@contextlib.contextmanager
def client_threads(num_workers: int, num_threads: int, where: str = HERE) -> Iterator[ClientThreads]:
    """Provide ``num_workers`` threads with ``num_threads`` per operation; of one worker, the caller's own thread.

    Or what does their work on a cluster (``engine``).

    An error or Ctrl-C leaves without waiting for who still trains: see ``still_training``.
    """
    if where != HERE:
        with engine(where, num_threads, num_workers) as elsewhere:
            yield ClientThreads(elsewhere=elsewhere)
        return
    if num_workers == 1:
        yield ClientThreads()
        return
    pool = ThreadPoolExecutor(num_workers, _NAME, initializer=prepare_torch, initargs=(num_threads,))
    try:
        yield ClientThreads(pool)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def still_training(timeout_s: float) -> bool:
    """Whether threads of an ended simulation go on for longer than ``timeout_s``: they hear of no signal."""
    ends = time.monotonic() + timeout_s
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return any(thread.is_alive() for thread in threads)
