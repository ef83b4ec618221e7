"""Child processes: where their code comes from, how they end with their parent, and how that reads in a log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

Process: TypeAlias = "subprocess.Popen[Any]"

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


def private_stdout() -> BinaryIO:
    """In a child: keep standard output for answers; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return answers
