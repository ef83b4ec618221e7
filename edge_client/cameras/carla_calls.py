"""Calls into a native library that may never come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

from edge_client.cameras.base import CameraError

T = TypeVar("T")


class CallThread:
    """Runs calls one by one on a thread of its own, so that one that hangs costs a thread and not its caller.

    CARLA's own time-outs end most waits; a deadlock within its client library (the traffic manager has known ones) has
    none.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._name = name
        self.stuck = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], limit_s: float) -> T:
        """Return ``work()``.

        Raises:
            CameraError: It isn't done within ``limit_s``, now or in an earlier call; the thread is given up.
            Exception: What ``work`` raises.
        """
        if self.stuck:
            raise CameraError(f"{self._name}: an earlier call never returned")
        done: Future[T] = Future()
        self._calls.put((work, done))
        try:
            return done.result(limit_s)
        except NotDone:
            if done.done():
                raise
            self.stuck = True
            self._calls.put(None)
            raise CameraError(f"{self._name}: no answer within {limit_s:g} s, not even a time-out") from None

    def end(self) -> None:
        """Let the thread end, and wait for it unless it is stuck."""
        self._calls.put(None)
        if not self.stuck:
            self._thread.join(1.0)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            work, done = item
            try:
                done.set_result(work())
            except BaseException as error:  # the caller's to handle
                done.set_exception(error)
