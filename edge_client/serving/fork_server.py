"""A process that has imported what a model needs, and forks itself for each: a start costs 10 ms in place of 250.

Every model still has a process of its own. The fork server loads none, so nothing of a model reaches another one.
It runs on the CPU alone: what drivers of accelerators keep doesn't survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

from replayfleet.devices.memory import HUGE_PAGES
from replayfleet.federation.children import Process, child_command, child_environment, end

COMMAND = child_command("replayfleet.edge_client.serving.fork_server")
START_S = 60.0
"""For importing ONNX Runtime on a slow board that is busy."""
MAX_FDS = 8
IS_POSSIBLE = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
_PID = struct.Struct("=i")
_STATUS = struct.Struct("=i")


Start = Callable[[Sequence[int]], Process]
"""Starts a process that gets these file descriptors: a control socket, then a socket and a memory for each lane."""


class Forked:
    """A process that a fork server made. Not our child: a descriptor of it stands for it, so no other one is ever hit.

    Args:
        pid: its process ID.
        descriptor: from pidfd_open(2).
        told: where the fork server says how it ended.
    """

    def __init__(self, pid: int, descriptor: int, told: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor
        self._told = told
        self._ending = threading.Lock()
        weakref.finalize(self, os.close, descriptor)
        weakref.finalize(self, told.close)

    def poll(self) -> int | None:
        """Return its exit status as ``subprocess.Popen`` does; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status; the end of a fork server takes that of its children along: they count as killed.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if self.returncode is None and not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        with self._ending:
            if self.returncode is None:
                self._told.settimeout(1.0)
                with contextlib.suppress(OSError):
                    said = self._told.recv(_STATUS.size)
                    self.returncode = _STATUS.unpack(said)[0] if len(said) == _STATUS.size else None
                if self.returncode is None:
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class ForkServer:
    """The client's end: started with the first model, again if it died, ended with the client. Thread-safe.

    Args:
        command: what to run; the file descriptor of its socket follows.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize | None = None  # type: ignore[type-arg]  # of Python 3.10's stubs

    def start(self, fds: Sequence[int]) -> Forked:
        """Fork a process that gets these file descriptors.

        Raises:
            OSError: The fork server can't be started, or forks nothing.
        """
        with self._lock:
            try:
                return self._fork(self._running(), fds)
            except OSError:
                self._end()  # one that died meanwhile, or hangs, has a successor
                return self._fork(self._running(), fds)

    def _fork(self, link: socket.socket, fds: Sequence[int]) -> Forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(link, [b"fork"], [theirs.fileno(), *fds])
            ours.settimeout(START_S)
            said, found, _, _ = socket.recv_fds(ours, _PID.size, 1)
            if len(said) != _PID.size or len(found) != 1:
                raise ConnectionError("the fork server forks nothing")
        except BaseException:
            ours.close()
            raise
        return Forked(_PID.unpack(said)[0], found[0], ours)

    def _running(self) -> socket.socket:
        if self._link is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # threads don't survive a fork
                    env={"OPENBLAS_NUM_THREADS": "1", **HUGE_PAGES, **child_environment()},
                    pass_fds=[theirs.fileno()],
                )
            self._link = ours
            self._ending = weakref.finalize(self, _end, ours, self._process)
        return self._link

    def _end(self) -> None:
        if self._ending is not None:
            self._ending()
        self._link = self._process = self._ending = None


def _end(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    link.close()
    end(process, 0.5)


def main(serve: Callable[[Sequence[int]], object] | None = None) -> None:
    """Fork at the client's word until its end of the socket closes; models that run then end by themselves."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    from replayfleet.edge_client.serving import worker

    worker.prepare()
    gc.collect()
    gc.freeze()  # collections of the children then leave the pages of all this shared
    control = socket.socket(fileno=int(sys.argv[1]))
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> its number, where to tell its end
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                _reap(descriptor, *running.pop(descriptor))
                continue
            data, fds, _, _ = socket.recv_fds(control, 16, MAX_FDS)
            if not data:
                os._exit(0)
            told = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                _be_a_worker(
                    serve or worker.serve, fds[1:], [control, told, *(each for _, each in running.values())], [*running]
                )
            _close(fds[1:])
            descriptor = os.pidfd_open(pid)
            running[descriptor] = (pid, told)
            poll.register(descriptor, select.POLLIN)
            with contextlib.suppress(OSError):  # the client is gone
                socket.send_fds(told, [_PID.pack(pid)], [descriptor])


def _reap(descriptor: int, pid: int, told: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    with told, contextlib.suppress(OSError):
        told.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))


def _be_a_worker(
    serve: Callable[[Sequence[int]], object],
    fds: Sequence[int],
    sockets: Sequence[socket.socket],
    others: Sequence[int],
) -> NoReturn:
    status = 1
    try:
        for each in sockets:
            each.close()
        _close(others)
        serve(fds)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
