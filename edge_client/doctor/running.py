"""Runs each check in a process of its own: one that hangs is killed, one that crashes takes nothing along.

Drivers and native libraries do both.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

import msgspec

from replayfleet.edge_client.doctor.findings import Finding, failure
from replayfleet.federation.service.logs import redact

REAP_S = 2.0
"""A killed process that hangs in the kernel isn't waited for any longer."""

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at.

    Attributes:
        name: of the finding, if the check can't make one itself.
        look: returns findings; runs in a child process.
        timeout_s: it is killed after that.
    """

    name: str
    look: Callable[[], Sequence[Finding]]
    timeout_s: float = 20.0


def run_check(check: Check) -> list[Finding]:
    """Return a check's findings, or one failure that says how it ended."""
    readable, writable = os.pipe()
    with tempfile.TemporaryFile() as noise:
        pid = os.fork()
        if pid == 0:
            os.close(readable)
            _child(check, writable, noise)
        os.close(writable)
        try:
            data = _read(readable, time.monotonic() + check.timeout_s)
        finally:
            os.close(readable)
        if data is None:
            os.kill(pid, signal.SIGKILL)
            _reap(pid)
            return [failure(check.name, f"no answer in {check.timeout_s:.0f} s", "whatever it looks at hangs")]
        status = _reap(pid)
        if status is None or not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 0 or not data:
            return [failure(check.name, _ending(status, noise), "report this, with the line above")]
    return msgspec.json.decode(data, type=list[Finding])


def _child(check: Check, writable: int, noise: IO[bytes]) -> NoReturn:
    """Look, write what was found, and end without the parent's clean-up."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123  # no path of ours
            os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):  # native libraries print whatever they like
            os.dup2(noise.fileno(), stream)
        sys.stdout = sys.stderr = os.fdopen(os.dup(noise.fileno()), "w", buffering=1)
        data = msgspec.json.encode(check.look())
        while data:
            data = data[os.write(writable, data) :]
        code = 0
    except BaseException:  # the last words of a process, which its parent shows
        with contextlib.suppress(Exception):
            os.write(noise.fileno(), traceback.format_exc().encode())
    finally:
        os._exit(code)


def _read(readable: int, deadline: float) -> bytes | None:
    """Return everything until the other end closes; None if that takes too long."""
    data = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([readable], [], [], left_s)[0]:
            break
        chunk = os.read(readable, _CHUNK)
        if not chunk:
            return data
        data += chunk
    return None


def _reap(pid: int) -> int | None:
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


def _ending(status: int | None, noise: IO[bytes]) -> str:
    noise.seek(0)
    said = noise.read().decode(errors="replace").strip().rpartition("\n")[2][-300:]
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        end = f"the check was ended by {signal.Signals(number).name}"
    else:
        end = "the check failed"
    return redact(f"{end}: {said}" if said else end)
