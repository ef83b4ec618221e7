"""Where the same work for many clients is done: in this process, or on a Ray cluster.

A task does one client's work and is a function of its arguments alone, so it can be done again anywhere: who loses a
worker, or the whole cluster, loses time. Equal PyTorch, processors and threads give equal bits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import logging
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from replayfleet.federation.children import child_command, end, ending
from replayfleet.federation.errors import SettingsError, told
from replayfleet.federation.service.torch_setup import prepare_torch

HERE = "here"
START_S = 60.0
"""How long a start waits for the cluster; one that is there later is used from then on."""
AGAIN_S = 60.0
"""After how long a cluster that isn't there is looked for again."""
SILENCE_S = 60.0
"""After how long without an answer, or with a driver that takes nothing, this process does the work itself."""
GOODBYE_S = 10.0

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


def check_engine(text: str) -> str:
    """Return where work is to be done if it can be.

    Raises:
        SettingsError: Neither ``here`` nor a Ray cluster, or Ray isn't installed.
    """
    if text == HERE:
        return text
    place = re.fullmatch(r"ray://[^/\s]+:([0-9]{1,5})", text)  # without a port Ray tries for minutes
    if text != "ray" and not (place and int(place[1]) <= 65535):
        raise SettingsError(f"engine {text!r}: expected here, ray, or ray://HOST:PORT, a cluster that runs")
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(f"engine {text}: needs Ray: pip install 'replayfleet[ray]'")
    return text


class RayEngine:
    """Does work as tasks of a Ray cluster, and here while there is none; a process of its own drives the cluster.

    A cluster that says nothing (frozen, without free CPUs, busy with one long task) is waited for only so long: this
    process then does what that call asked for itself, until it answers. Later calls ask again, for no more than it
    holds at a time.

    Args:
        address: ``ray``: a cluster that is started on this machine, and ends with this process; ``ray://HOST:PORT``.
        num_threads: of one operation; results depend on their number.
        num_workers: of a cluster that is started; None: one for each core.
        start_s: how long to wait for the cluster; None: until it is there or can't be.
        again_s: after how long to look for it again.
        silence_s: after how long without an answer to do the work here.

    Raises:
        SettingsError: Ray isn't installed, or can't be imported.
    """

    def __init__(
        self,
        address: str,
        num_threads: int,
        num_workers: int | None = None,
        *,
        start_s: float | None = START_S,
        again_s: float = AGAIN_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        check_engine(address)
        try:
            self._pickled: Any = importlib.import_module("ray.cloudpickle")
        except Exception as error:  # which of its packages don't fit together, say: anything
            again = "install it anew, or leave --engine out"
            raise SettingsError(f"engine {address}: Ray can't be imported ({told(error)}); {again}") from error
        self._address, self._num_threads = address, num_threads
        self._command = (address, str(num_workers or 0), str(again_s))
        self._numbers = itertools.count()  # of all tasks: an answer may outlive the call that waited for it
        self._open = set[int]()  # which the cluster has and didn't answer, those that were done here meanwhile too
        self._told_silent = False
        self._size = 0  # how many tasks the cluster does at a time; 0 while there is none
        self._told = self._closed = False
        self._silence_s = self._patience_s = silence_s  # none in a call that heard nothing for so long, until it does
        self._begin()
        self._look(start_s)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, in order; both are pickled, so they are values and open nothing.

        Raises:
            Exception: The first error of ``function`` itself. That a worker or the cluster is lost is none.
        """
        results: dict[int, R] = {}
        begun: dict[int, tuple[int, T]] = {}
        said = False
        if not self._size:
            self._look(0)
        self._patience_s = self._silence_s
        for place, item in enumerate(items):
            while self._open and not begun and self._connection.poll():
                self._hear()  # late, and done here since
            while begun and not self._takes_more():
                self._collect(function, begun, results)
            if not said and self._takes_more():
                self._say(self._pickled.dumps(functools.partial(_work, function, self._num_threads)))
                said = True
            if not self._takes_more():
                results[place] = function(item)
                continue
            number = next(self._numbers)
            begun[number] = (place, item)
            self._open.add(number)
            self._say((number, self._pickled.dumps(item)))
        while begun:
            self._collect(function, begun, results)
        return [results[place] for place in sorted(results)]

    def close(self) -> None:
        """Leave the cluster; end one that was started."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.send(None)
        end(self._driver, GOODBYE_S)
        self._connection.close()

    def _collect(self, function: Callable[[T], R], begun: dict[int, tuple[int, T]], results: dict[int, R]) -> None:
        if self._size and not self._connection.poll(self._patience_s):
            if not self._told_silent:
                log.warning(
                    "the Ray cluster is silent engine=%s for_s=%.0f next=what it doesn't answer is done here",
                    self._address,
                    self._patience_s,
                )
            self._told_silent, self._patience_s = True, 0.0
            place, item = begun.pop(min(begun))
            results[place] = function(item)
            return
        number, done = self._hear() if self._size else (None, b"")
        if not self._size:  # the cluster is gone: each is done here
            results.update((place, function(item)) for place, item in begun.values())
            begun.clear()
        elif number in begun:
            place, item = begun.pop(number)
            if isinstance(done, bytes):
                results[place] = self._pickled.loads(done)
            else:
                log.warning("work lost error=%s next=done in this process", done)
                results[place] = function(item)

    def _takes_more(self) -> bool:
        """Whether to give the cluster more: not while a call hears nothing of it, nor while it has what it holds."""
        return bool(self._size and self._patience_s) and len(self._open) <= 2 * self._size

    def _begin(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a driver that is frozen is lost, like one that ended
                ours.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", *divmod(int(1e6 * self._silence_s), 10**6)))
        with theirs:
            command = child_command(
                "replayfleet.federation.service.cluster.driver",
                str(theirs.fileno()),
                *self._command,
                program=sys.argv[0],  # Ray's workers may import what lies beside it
            )
            self._driver = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # as here, for workers too
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # Ray's last words are its whole log
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def _look(self, timeout_s: float | None) -> None:
        """Hear from a driver that was begun whether there is a cluster."""
        try:
            said = self._connection.recv() if self._connection.poll(timeout_s) else "it isn't there yet"
        except (EOFError, OSError):
            self._lose()
            return
        if isinstance(said, int):
            log.info("Ray cluster found engine=%s workers=%d", self._address, said)
            self._size, self._told = said, False
        else:
            self._tell(said)

    def _say(self, message: object) -> None:
        try:
            self._connection.send(message)
        except BlockingIOError:
            self._lose("its process is frozen")
        except OSError:
            self._lose()

    def _hear(self) -> Any:
        try:
            said = self._connection.recv()
        except BlockingIOError:
            return self._lose("its process is frozen")
        except (EOFError, OSError):
            return self._lose()
        self._open.discard(said[0])
        self._told_silent, self._patience_s = False, self._silence_s  # its tasks are long
        return said

    def _lose(self, why: str = "") -> tuple[None, bytes]:
        """Begin another driver in place of one that ended, and wait for nothing; returns an answer to nothing."""
        self._size, self._told_silent = 0, False
        self._open.clear()
        self._tell(why or ending(self._driver, 1.0))
        end(self._driver, 0.0)
        if not self._closed:
            with contextlib.suppress(OSError):  # the next look finds out
                self._begin()
        return None, b""

    def _tell(self, why: str) -> None:
        if not self._told:
            log.warning(
                "no Ray cluster engine=%s error=%s next=work is done in this process until there is one",
                self._address,
                why,
            )
        self._told = True


def _work(function: Callable[[T], R], num_threads: int, item: T) -> R:
    prepare_torch(num_threads)
    return function(item)


@contextlib.contextmanager
def engine(text: str, num_threads: int, num_workers: int | None = None) -> Iterator[RayEngine | None]:
    """Provide what does the work; None: this process does.

    Raises:
        SettingsError: As ``RayEngine``.
    """
    if text == HERE:
        yield None
        return
    with contextlib.closing(RayEngine(text, num_threads, num_workers)) as made:
        yield made
