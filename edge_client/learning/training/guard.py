"""Keeps the training process out of serving's way: last for cores and disk, bounded in memory, first to be killed.

Facts: Linux manual pages sched(7), setrlimit(2), proc_pid_oom_score_adj(5), prctl(2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from replayfleet.devices.budget import smaller_batch
from replayfleet.devices.memory import give_memory_back
from replayfleet.federation.errors import ReplayfleetError, is_out_of_memory
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

T = TypeVar("T")

NICENESS = 10
"""Serving frames and heartbeats come first."""

_BATCHES = frozenset({"batch_size", "gan_batch_size", "ddpm_batch_size"})
_SLACK_BYTES = 64 << 20
"""Stacks of threads and the like, which are reserved but hardly used."""


class OutOfMemory(ReplayfleetError):
    """Training needs more memory than it may have."""


def yield_to_serving(*, idle: bool) -> list[str]:
    """Let everything else go first, for this process and its threads so far; returns what the system refused.

    Call it before torch starts threads: they inherit it.

    Args:
        idle: take only what nobody else wants (SCHED_IDLE): whoever wakes up takes the core from training at once, and
            the kernel derives the same for its disk accesses. Where that is refused, and without, niceness remains.
    """
    wishes = (("niceness", _be_nice), *([("SCHED_IDLE", _be_idle)] if idle else []))
    refused = [_refusal(what, change, thread) for thread in _threads() for what, change in wishes]
    refused.append(_refusal("oom_score_adj", _be_killed_first, 0))
    return [reason for reason in dict.fromkeys(refused) if reason]


def bound_memory(max_bytes: int) -> None:
    """Let this process hold at most about ``max_bytes`` until ``lift_bound``; beyond, allocations fail.

    The bound is RLIMIT_DATA, which counts writable private memory: torch reserves far more address space than it ever
    uses, so RLIMIT_AS would bound the wrong thing. It is moved by what this process has reserved but never touched.
    Libraries' files aren't counted: whoever else has them loaded shares them.

    Raises:
        OutOfMemory: The process holds more already.
    """
    try:
        import resource

        if _status_bytes("RssAnon") >= max_bytes:
            give_memory_back()  # what the job before took waits for this one
        reserved, held = (_status_bytes(name) for name in ("VmData", "RssAnon"))
    except (ImportError, OSError, ValueError):
        return  # not Linux
    if held >= max_bytes:
        raise OutOfMemory(
            f"training may hold {max_bytes >> 20} MB, but its process holds {held >> 20} MB before it begins; "
            "the round is not trained"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = reserved + max_bytes - held + _SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def lift_bound() -> None:
    """Let this process hold what it needs again, as for saying what went wrong."""
    with contextlib.suppress(ImportError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def within_memory(
    work: Callable[[Any], T],
    method: Any,
    max_batch_size: int | None,
    max_bytes: int | None = None,
    bound: Callable[[int], None] = bound_memory,
) -> tuple[T, int | None]:
    """Return (what ``work`` makes with ``method``, the batch size that memory sufficed for; None for the method's own).

    When memory runs out, it is done again from the start with half the batch: work is a function of its arguments.

    Args:
        work: called with the method, its batches perhaps made smaller.
        method: as the fleet agreed.
        max_batch_size: what sufficed earlier; None if the method's own did.
        max_bytes: that this process may hold while ``work`` runs; None for all that there is.
        bound: sees to that; what it bounded on the host is lifted afterwards.

    Raises:
        OutOfMemory: The process holds more already, or it doesn't suffice for a small batch either.
    """
    while True:
        sized = with_batches_of(method, max_batch_size)
        if max_bytes is not None:
            bound(max_bytes)
        try:
            try:
                return work(sized), max_batch_size
            finally:
                lift_bound()  # what follows needs memory too
        except Exception as error:  # of torch, ONNX Runtime or Python
            if not is_out_of_memory(error):
                raise
            largest = max(_batch_sizes(sized).values(), default=1)
            max_batch_size = smaller_batch(largest)
            if max_batch_size is None:
                raise OutOfMemory(
                    f"memory doesn't suffice for training, with batches of {largest} ({error}); "
                    "the round is not trained"
                ) from None
            log.warning("memory doesn't suffice", batch_size=largest, next=f"batches of {max_batch_size}")
        # The error is gone here, and with it what its frames held.
        give_memory_back()


def with_batches_of(method: Any, max_batch_size: int | None) -> Any:
    """Return ``method`` with batches of at most so many samples."""
    if max_batch_size is None:
        return method
    return dataclasses.replace(method, **{n: min(size, max_batch_size) for n, size in _batch_sizes(method).items()})


def _batch_sizes(method: Any) -> dict[str, int]:
    """The sizes of the batches that a method trains with, by setting."""
    unused = "gan_batch_size" if getattr(method, "sub_generator", "") == "ddpm" else "ddpm_batch_size"
    names = _BATCHES & {field.name for field in dataclasses.fields(method)}
    return {name: getattr(method, name) for name in sorted(names - {unused})}


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]


def _refusal(what: str, change: Callable[[int], None], thread: int) -> str:
    try:
        change(thread)
    except ProcessLookupError:
        return ""  # the thread has ended
    except OSError as error:
        return f"{what}: {error}"
    return ""


def _be_killed_first(_thread: int) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _be_nice(thread: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _be_idle(thread: int) -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"no {name} in /proc/self/status")
