"""The demo's children: started through their command lines, watched, and ended by their ids, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from replayfleet.federation.children import die_with_parent
from replayfleet.federation.errors import ReplayfleetError, SettingsError

TAIL_LINES = 15
_STOP_TIMEOUT_S = 10.0
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""A fleet on two cores: processes that spin while they wait for their own threads would stop each other."""


class ChildFailed(ReplayfleetError):
    """A process of the demo ended before its time; the message is followed by the end of its log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True, slots=True)
class Child:
    """One process; it leads a process group of its own, so a Ctrl-C reaches only us."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; kill it and its group when that doesn't come."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def failure(self) -> ChildFailed:
        """Say how it ended."""
        code = self.process.returncode
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return ChildFailed(f"{self.name} {how} before the demo was done; its log is {self.log}", tail(self.log))


class Children:
    """Starts processes and ends those that still run when the block is left.

    Args:
        logs: folder for one log per process.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end_all()

    def start(self, name: str, command: Sequence[str], *, niceness: int = 0) -> Child:
        """Start a console script of this environment.

        Args:
            name: of the log.
            command: the script's name and its arguments.
            niceness: how far it steps back for the others.

        Raises:
            SettingsError: The script isn't installed.
        """
        nice = ["nice", "-n", str(niceness)] if niceness and shutil.which("nice") else []
        path = self.logs / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*nice, script(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        child = Child(name, process, path)
        self._children.append(child)
        return child

    def check(self, may_end: Sequence[Child] = ()) -> None:
        """Raise ChildFailed if a process failed, or ended although it isn't one of ``may_end``."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and (code != 0 or child not in may_end):
                raise child.failure()

    def kill(self, child: Child) -> None:
        """End a process and all that it started with SIGKILL; nobody misses it afterwards."""
        self._children.remove(child)
        _signal_group(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def end_all(self) -> None:
        """End what still runs, politely first. Idempotent; a second Ctrl-C doesn't interrupt it."""
        running = [child for child in self._children if child.process.poll() is None]
        for child in self._children:
            if child.process.returncode:
                _signal_group(child.process.pid, signal.SIGKILL)  # what a crashed process left behind
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for child in running:
                _signal_group(child.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            for child in running:
                child.wait(max(0.0, deadline - time.monotonic()))
        finally:
            signal.signal(signal.SIGINT, before)
        self._children.clear()


def script(name: str) -> str:
    """Return the path of a console script of this environment.

    Raises:
        SettingsError: It isn't there.
    """
    folder = sysconfig.get_path("scripts")
    found = shutil.which(name, path=folder)
    if found is None:
        raise SettingsError(f"{name} is not in {folder}; install the project with `make setup`, or pip install -e .")
    return found


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return a child's environment: one thread per process, output at once."""
    return {**inherited, **_ONE_THREAD, "PYTHONUNBUFFERED": "1"}


def tail(path: Path, num_lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, or a word that it is empty."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"({path} can't be read: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(the log is empty)"


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
