"""Child processes: where their code comes from, what is said between them and their parent, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import msgspec

from replayfleet.federation.errors import UNREADABLE

A = TypeVar("A")
T = TypeVar("T")

_learning = threading.Lock()


class Process(Protocol):
    """What we need of a child, as of ``subprocess.Popen``."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status; ``subprocess.TimeoutExpired`` if it runs on."""

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""


MAX_LINE_BYTES = 1 << 20
"""Of a child."""

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # here, not after a fork, when a lock may be held

_START = """import sys
sys.path[:] = [folder for folder in sys.path if folder] + [{root!r}]
from importlib import import_module
sys.argv[:2] = [{program!r}]
import_module({module!r}).main()"""


def child_command(module: str, *arguments: str, program: str = "") -> tuple[str, ...]:
    """Return the command that runs ``main()`` of one of our modules, and never a file of the current folder.

    ``python -m`` and ``python -c`` put the current folder first on ``sys.path``: a ``torch.py`` where an operator
    happens to start the client would be executed. ``-P`` needs Python 3.11, and ``-I`` ignores PYTHONPATH, which
    checkouts need. So the empty entry goes before anything but built-in modules is imported. The folder that this
    package was imported from comes last: it shadows nothing, and a child finds the package wherever its parent did.

    Args:
        module: whose ``main()`` to run; stands in the list of processes too.
        arguments: as ``sys.argv[1:]``.
        program: as ``sys.argv[0]``; the module's name if empty.
    """
    code = _START.format(root=str(Path(__file__).parents[2]), module=module, program=program or module)
    return (sys.executable, "-c", code, module, *arguments)


def child_environment() -> dict[str, str]:
    """Return ours, with idle OpenMP threads asleep: all children share the cores with whoever serves frames."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def end(process: Process, goodbye_s: float) -> None:
    """Wait ``goodbye_s`` for a process that was told to end, then kill it. Idempotent."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=goodbye_s)
    if process.poll() is None:
        process.kill()
        process.wait()


def ending(process: Process, wait_s: float) -> str:
    """Return why a process says nothing more; waits at most ``wait_s`` for its end."""
    try:
        code = process.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        return "its process closed its output"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit status {code}"


def die_with_parent(sign: int = signal.SIGKILL) -> None:
    """In a child: have the kernel send ``sign`` when the parent dies, however that dies and whatever hangs here.

    Linux sends it when the *thread* that started the child ends, so that must live as long as its process.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, sign)


class ChildLost(Exception):
    """A child said what it never should; the text says what, as a reason for a log."""


class ChildEnded(ChildLost):
    """A child ended, or closed its output; the text says how."""


def decoder_of(says: type[A]) -> msgspec.json.Decoder[A]:
    """Return a decoder of JSON; threads may ask at once.

    msgspec (0.22) notes a type when it meets it first, and only then what its fields are: another thread that meets it
    meanwhile reads what isn't there yet, which ends the process. So decoders that threads use are made at import, or
    here.
    """
    with _learning:
        return msgspec.json.Decoder(says)


class Child(Generic[A]):
    """A child process. Both ends write lines of JSON; bytes may follow a line of the child. Nothing is pickled.

    Whatever the child says is checked before memory is asked for. One thread receives; any may send.

    Args:
        command: what to run.
        says: the type of what it says; bounds in it are checked.
        num_bytes: how many bytes follow a line.
        pipe_bytes: that the pipe should hold; 0 for the system's default.
        input_bytes: that the pipe to it should hold, where who sends may not wait for it; 0 for the system's default.
        errors: where its standard error goes; ours if None.
        environment: what it gets beside ours, which wins.

    Raises:
        OSError: It can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        says: Any,
        *,
        num_bytes: Callable[[A], int] = lambda said: 0,
        pipe_bytes: int = 0,
        input_bytes: int = 0,
        errors: IO[bytes] | int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**(environment or {}), **child_environment()},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self.pid = self.process.pid
        self._fd = self._output.fileno()
        os.set_blocking(self._fd, False)
        for fd, num_bytes_held in ((self._fd, pipe_bytes), (self._input.fileno(), input_bytes)):
            if num_bytes_held:
                with contextlib.suppress(OSError):  # a user's quota of large pipes is used up: smaller ones do
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, num_bytes_held)
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._decoder = decoder_of(says)
        self._num_bytes = num_bytes
        self._begun = bytearray()
        self._head: A | None = None
        self._bytes = bytearray()
        self._rest = memoryview(b"")

    def send(self, message: object) -> None:
        """Write a line; what became of a child that doesn't read it, ``receive`` says."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is gone, or we closed its input
            self._input.write(msgspec.json.encode(message) + b"\n")
            self._input.flush()

    def receive(self, timeout_s: float | None = None, goodbye_s: float = 2.0) -> tuple[A, bytearray] | None:
        """Return the next thing it says and the bytes that follow; None if it isn't complete within ``timeout_s``.

        Args:
            timeout_s: None waits without end.
            goodbye_s: to wait for the end of a child that says nothing more, so that its exit status is known.

        Raises:
            ChildEnded: There is nothing more to come.
            ChildLost: It said what it never should; what it says next can still be received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._head is None:
                self._begin()
            if self._head is not None and not self._rest:
                said, self._head = (self._head, self._bytes), None
                return said
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable.poll(None if left_s is None else 1000 * left_s):
                return None
            if self._head is not None:
                count = os.readv(self._fd, [self._rest])  # where it stays: it may be large
                self._rest = self._rest[count:]
            else:
                piece = os.read(self._fd, MAX_LINE_BYTES)
                self._begun += piece
                count = len(piece)
            if count == 0:
                raise ChildEnded(ending(self.process, goodbye_s))

    def end_input(self) -> None:
        """Tell it that nothing more comes, which ends it."""
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self, goodbye_s: float = 0.0) -> int:
        """End it and wait for it; it has ``goodbye_s`` to end by itself. Idempotent; returns its exit status."""
        self.end_input()
        with contextlib.suppress(OSError):
            self._output.close()
        end(self.process, goodbye_s)
        return int(self.process.returncode)

    def _begin(self) -> None:
        """Take a line from what was read, if there is one."""
        line, newline, rest = self._begun.partition(b"\n")
        if not newline:
            if len(line) >= MAX_LINE_BYTES:
                self._begun = bytearray()
                raise ChildLost("its process sent a line without an end")
            return
        self._begun = rest
        try:
            self._head = self._decoder.decode(line)
        except UNREADABLE as error:
            raise ChildLost(f"its process sent an unreadable line ({' '.join(str(error).split())[:300]})") from error
        self._bytes = bytearray(self._num_bytes(self._head))
        if self._bytes:
            if len(rest) > len(self._bytes):
                self._head, self._begun = None, bytearray()  # whatever follows, it isn't what was announced
                raise ChildLost("its process sent more than it announced")
            self._bytes[: len(rest)], self._begun = rest, bytearray()
        self._rest = memoryview(self._bytes)[len(rest) if self._bytes else 0 :]


class Parent:
    """In a child: its way to its parent, over the standard streams. What libraries print goes to standard error.

    Args:
        outlived: the child sees to its own end when its parent is gone; else the kernel kills it then, whatever it is
            busy with.
    """

    def __init__(self, *, outlived: bool = False) -> None:
        for sign in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a closed terminal are the parent's to handle
            signal.signal(sign, signal.SIG_IGN)
        if not outlived:
            die_with_parent()
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def hear(self, kind: type[T]) -> T | None:
        """Return the next line; None at the end of the input."""
        line = sys.stdin.buffer.readline()
        return msgspec.json.decode(line, type=kind) if line else None

    def say(self, message: object, following: bytes | memoryview = b"") -> None:
        """Write a line, and bytes after it; one thread at a time.

        Raises:
            BrokenPipeError: The parent is gone.
        """
        for part in (msgspec.json.encode(message) + b"\n", following):
            rest = memoryview(part)
            while rest:
                rest = rest[self._answers.write(rest) :]
