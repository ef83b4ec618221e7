"""Whether the clock is right: what the kernel says about it, and what a time server says.

The protocol itself never compares clocks of two machines; certificates, logs and signatures that expire do.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from replayfleet.edge_client.doctor.findings import Finding, failure, ok, skipped, warning

EARLIEST = datetime(2026, 11, 1, tzinfo=timezone.utc).timestamp()
"""This program is younger than that, so a clock before it is wrong."""

NTP_TIMEOUT_S = 2.0
MAX_SKEW_S = 2.0
BROKEN_SKEW_S = 300.0
"""From here on certificates that were just issued aren't valid yet."""

TO_UNIX_S = 2_208_988_800
"""From 1900, where NTP counts from, to 1970 (RFC 5905)."""

_UNSYNCHRONISED = 0x40
"""``STA_UNSYNC`` of adjtimex(2)."""
_TIMEX_BYTES = 256
_STATUS_AT, _MAX_ERROR_AT = 40, 24
"""Of ``status`` (int) and ``maxerror`` (long, microseconds) in ``struct timex`` on 64-bit Linux."""


@dataclass(frozen=True, slots=True)
class KernelClock:
    """What the kernel knows about its clock.

    Attributes:
        synchronised: whether something (chrony, systemd-timesyncd, ntpd, PTP) keeps it right.
        max_error_s: how wrong it may be at most; the kernel's own bound.
        source: where that was read.
    """

    synchronised: bool
    max_error_s: float | None
    source: str


def look_at_synchronisation(
    read: Callable[[], KernelClock | None] | None = None, now: Callable[[], float] = time.time
) -> list[Finding]:
    """Return whether something keeps the clock right."""
    check = "clock.synchronised"
    advice = "sudo timedatectl set-ntp true, or run chrony; a board without a battery begins in the past"
    shown = datetime.fromtimestamp(now(), tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if now() < EARLIEST:
        return [failure(check, f"it is {shown}, before this program was written", advice, time=shown)]
    clock = (read or kernel_clock)()
    if clock is None:
        return [skipped(check, f"it is {shown}; neither adjtimex nor timedatectl answers", time=shown)]
    facts = {"time": shown, "synchronised": clock.synchronised, "max_error_s": clock.max_error_s, "by": clock.source}
    if not clock.synchronised:
        return [warning(check, f"not synchronised ({clock.source}); it is {shown}", advice, **facts)]
    bound = f", within {1000 * clock.max_error_s:.0f} ms by its own bound" if clock.max_error_s is not None else ""
    return [ok(check, f"synchronised ({clock.source}){bound}; it is {shown}", **facts)]


def look_at_skew(server: tuple[str, int] | None, *, named: bool) -> list[Finding]:
    """Return how far this clock is from a time server's.

    Args:
        server: host and port; None: there is nobody to ask.
        named: whether the operator named it, or it is only the broker's host, which need not know the time.
    """
    check = "clock.skew"
    ask = "name a time server with --ntp HOST to measure it"
    if server is None:
        return [skipped(check, "not measured: nobody to ask; MQTT tells no time", ask)]
    host, port = server
    try:
        skew_s, uncertain_s = measure_skew(host, port)
    except (OSError, ValueError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else str(error)
        text = f"not measured: {host} gives no time over NTP, port {port} ({reason})"
        if named:
            return [failure(check, text, "check the name, and that UDP gets through")]
        return [skipped(check, f"{text}, and MQTT tells none", ask)]
    found = f"{1000 * skew_s:+.0f} ms to {host}, give or take {1000 * uncertain_s:.0f} ms (NTP, one exchange)"
    facts = {"skew_s": round(skew_s, 6), "uncertain_s": round(uncertain_s, 6), "server": host, "by": "ntp"}
    advice = "one of the two clocks is wrong: synchronise both with the same time server"
    if abs(skew_s) - uncertain_s > BROKEN_SKEW_S:
        return [failure(check, found, advice, **facts)]
    if abs(skew_s) - uncertain_s > MAX_SKEW_S:
        return [warning(check, found, advice, **facts)]
    return [ok(check, found, **facts)]


def measure_skew(host: str, port: int, timeout_s: float = NTP_TIMEOUT_S) -> tuple[float, float]:
    """Return (how many seconds this clock is ahead, by how much that may be wrong), after one exchange of SNTP.

    Raises:
        OSError: No answer.
        ValueError: An answer that is none, or of a server that doesn't know the time itself.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    token = secrets.token_bytes(8)  # in place of our time, which is nobody's business
    request = bytes([0x23]) + bytes(39) + token  # version 4, a client
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(timeout_s)
        sock.connect(address)
        sent_at, began = time.time(), time.monotonic()
        sock.send(request)
        answer = sock.recv(512)
        took_s = time.monotonic() - began
    if len(answer) < 48 or answer[24:32] != token:
        raise ValueError("what came back is no answer to this question")
    mode, stratum, leap = answer[0] & 7, answer[1], answer[0] >> 6
    if mode != 4 or not 0 < stratum < 16 or leap == 3:
        raise ValueError("the server isn't synchronised itself")
    received_at, answered_at = (_unix_time(answer[at : at + 8]) for at in (32, 40))
    offset_s = ((received_at - sent_at) + (answered_at - (sent_at + took_s))) / 2  # RFC 5905, section 8
    return -offset_s, max(0.0, took_s - (answered_at - received_at)) / 2


def kernel_clock() -> KernelClock | None:
    """Ask adjtimex(2), else timedatectl; None if neither answers."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: change nothing
    libc = ctypes.CDLL(None)
    if hasattr(libc, "adjtimex") and ctypes.sizeof(ctypes.c_long) == 8 and libc.adjtimex(buffer) >= 0:
        status = struct.unpack_from("=i", buffer, _STATUS_AT)[0]
        max_error_s = struct.unpack_from("=q", buffer, _MAX_ERROR_AT)[0] / 1e6
        return KernelClock(not status & _UNSYNCHRONISED, max_error_s, "adjtimex")
    command = shutil.which("timedatectl")
    if command is None:
        return None
    done = subprocess.run(  # noqa: S603
        [command, "show", "-p", "NTPSynchronized", "--value"],
        capture_output=True,
        text=True,
        timeout=5,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    answer = done.stdout.strip()
    return KernelClock(answer == "yes", None, "timedatectl") if answer in {"yes", "no"} else None


def _unix_time(ntp: bytes) -> float:
    seconds: int
    fraction: int
    seconds, fraction = struct.unpack(">II", ntp)
    era_s = 0 if seconds & 1 << 31 else 1 << 32  # RFC 4330, section 3: after February 2036 it counts from 0 again
    return float(seconds + era_s - TO_UNIX_S) + fraction / (1 << 32)
