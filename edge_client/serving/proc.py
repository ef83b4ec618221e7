"""What Linux tells of a process under ``/proc``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal, TypeAlias

_PROC = Path("/proc")
_SAMPLE_S = 0.05
_MIN_SHARE = 0.5

Progress: TypeAlias = Literal["works", "still", "starved"]
"""A process and its children use the processor; neither use nor want it; want it and aren't given it."""


def anonymous_bytes(pid: int) -> int | None:
    """Return the memory that a process alone occupies (``RssAnon``: heaps, not libraries); None if it can't be told."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("RssAnon:")), None)
    return None if found is None else 1024 * int(found)


def is_starved(pid: int) -> bool:
    """Whether a process wants to run and gets less than half a core; takes 50 ms, or longer where we get none either.

    Tells a model that others leave no time from one that hangs: the latter sleeps, or computes all the time.
    """
    try:
        before, began = _cpu_s(pid), time.monotonic()
        time.sleep(_SAMPLE_S)
        return _wants_to_run(pid) and _cpu_s(pid) - before < _MIN_SHARE * (time.monotonic() - began)
    except (OSError, IndexError, ValueError):
        return False


def progress_since(pid: int, cpu_s: float | None, at_most_s: float) -> tuple[Progress, float | None]:
    """Say what a process has made of its time since it had used ``cpu_s`` of the processor, and what it has used.

    Args:
        pid: which.
        cpu_s: what it had used; None if that isn't known, and then it works.
        at_most_s: what a thread that only looks at a clock uses meanwhile.

    Returns:
        That; ``works`` and None where it can't be told.
    """
    try:
        family = _family(pid)
        used = sum(_cpu_s(one) for one in family)
        if cpu_s is None or abs(used - cpu_s) > at_most_s:
            return "works", used
        return "starved" if any(_wants_to_run(one) for one in family) else "still", used
    except (OSError, IndexError, ValueError):
        return "works", None


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    tasks = (_PROC / str(pid) / "task").iterdir()
    children = (int(child) for task in tasks for child in (task / "children").read_text(encoding="ascii").split())
    return [pid, *(one for child in children for one in _family(child))]


def _fields(path: Path) -> list[str]:
    """Return the fields of a ``stat`` file from the third on, the state; the second, the name, may hold anything."""
    return path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def _cpu_s(pid: int) -> float:
    fields = _fields(_PROC / str(pid) / "stat")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wants_to_run(pid: int) -> bool:
    return any(_fields(task / "stat")[0] == "R" for task in (_PROC / str(pid) / "task").iterdir())
