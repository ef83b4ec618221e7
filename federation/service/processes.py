"""Child processes: their environment, their end, and how it reads in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any, TypeAlias

Process: TypeAlias = "subprocess.Popen[Any]"


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
