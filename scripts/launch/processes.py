"""Children: started through their command lines, watched, and ended by their ids, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from replayfleet.federation.children import child_command, die_with_parent
from replayfleet.federation.errors import ReplayfleetError

TAIL_LINES = 15
_COMMANDS = {
    "aggregator": "replayfleet.aggregator.cli",
    "edge-client": "replayfleet.edge_client.cli",
    "fleet-sim": "replayfleet.federation.simulator.cli",
}
"""Our commands, and where their ``main()`` is."""
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

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None


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

    def __exit__(self, *_: object) -> None:
        self.end_all()

    def start(self, name: str, command: Sequence[str], *, niceness: int = 0) -> Child:
        """Start a program.

        Args:
            name: of the log.
            command: one of our commands, or the path of any program, and its arguments.
            niceness: how far it steps back for the others.
        """
        nice = ["nice", "-n", str(niceness)] if niceness and shutil.which("nice") else []
        program, *arguments = command
        if program in _COMMANDS:  # so that it is found wherever we were, and whatever lies in the current folder
            arguments = [*child_command(_COMMANDS[program], *arguments, program=program)]
        else:
            arguments = [program, *arguments]
        path = self.logs / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*nice, *arguments],
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

    def ended(self) -> list[Child]:
        """Return those that have ended by now."""
        return [child for child in self._children if child.is_over]

    def check(self, may_end: Sequence[Child] = (), ended: Sequence[Child] | None = None) -> None:
        """Raise ChildFailed if a process failed, or ended although it isn't one of ``may_end``.

        Args:
            may_end: those that may.
            ended: looked at instead of those that have ended by now.
        """
        for child in self.ended() if ended is None else ended:
            code = child.process.returncode
            if code != 0 or child not in may_end:
                how = f"ended with exit code {code}"
                if code < 0:
                    known = signal.Signals if -code in set(signal.Signals) else None
                    how = f"was ended by {known(-code).name if known else f'signal {-code}'}"
                raise ChildFailed(
                    f"{child.name} {how} before the demo was done; its log is {child.log}", tail(child.log)
                )

    def kill(self, child: Child) -> None:
        """End a process and all that it started with SIGKILL; nobody misses it afterwards."""
        self._children.remove(child)
        _signal_group(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def end_all(self) -> None:
        """End what still runs, politely first. Idempotent; a second Ctrl-C doesn't interrupt it."""
        running = [child for child in self._children if not child.is_over]
        for child in self._children:
            if child.process.returncode:
                _signal_group(child.process.pid, signal.SIGKILL)  # what a crashed process left behind
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for child in running:
                _signal_group(child.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            for child in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                if not child.is_over:
                    _signal_group(child.process.pid, signal.SIGKILL)
                    child.process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        self._children.clear()


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
