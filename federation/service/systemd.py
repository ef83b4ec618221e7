"""What systemd is told: starting, ready, what goes on, that every loop still turns, stopping.

Datagrams of ``KEY=value`` lines to ``$NOTIFY_SOCKET``, as in sd_notify(3) and sd_watchdog_enabled(3) of systemd. Where
nobody listens nothing is sent. The watchdog is fed by progress alone: a thread that fed it by the clock would go on
while the loops that matter hang.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping

from replayfleet.federation.service.logs import EventLogger

EXTEND_S = 60.0
"""How much more time to start is asked for, again and again while starting goes on."""

START_LIMIT_S = 1800.0
"""Longest time that a service asks for before its loops turn; a TensorRT engine on a small board takes ten minutes."""

_ASK_EVERY_S = 15.0
_STATUS_EVERY_S = 1.0
_USEC = 1_000_000

log = EventLogger(__name__)


class Notifier:
    """Sends datagrams to the service manager; never blocks and never fails the service.

    Args:
        address: a path, or ``@name`` for an abstract one; empty: nobody listens.
    """

    def __init__(self, address: str = "") -> None:
        self._address = ""
        self._failed = False
        if address and (address[0] not in "/@" or len(address) < 2):
            log.warning("service manager's socket can't be used", address=address, expected="a path or @name")
        elif address:
            self._address = f"\0{address[1:]}" if address[0] == "@" else address

    def __bool__(self) -> bool:
        return bool(self._address)

    def send(self, **fields: str | int) -> None:
        """Send one message; line breaks in values become spaces."""
        if not self._address:
            return
        text = "\n".join(f"{key}={' '.join(str(value).split())}" for key, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.setblocking(False)
                sending.sendto(text.encode(), self._address)
            self._failed = False
        except OSError as error:  # a full queue or a manager that restarts: the next message may get through
            if not self._failed:
                log.warning("service manager not reached", reason=error.strerror or error)
            self._failed = True


class Watchdog:
    """Says when a watchdog may be fed: every loop has turned since it was fed last. No clock, no I/O.

    Args:
        period_s: the service manager waits so long; it is fed about every half of that.
        now: seconds.
    """

    def __init__(self, period_s: float, now: float) -> None:
        self._period_s = period_s
        self._fed_at = now
        self._seen: dict[str, int] = {}
        self._told = False

    def due(self, turns: Mapping[str, int], now: float) -> bool:
        """Whether to feed now.

        Args:
            turns: loop -> a number that changes whenever the loop turns; a loop that isn't there isn't waited for.
            now: seconds.
        """
        if now - self._fed_at < self._period_s / 2:
            return False
        still = [name for name, count in turns.items() if self._seen.get(name) == count]
        if still:
            self._tell(still, now)
            return False
        self._seen = dict(turns)
        self._fed_at = now
        self._told = False
        return True

    def _tell(self, still: list[str], now: float) -> None:
        """One line in time before the service is ended, so that its log says why."""
        if not self._told and now - self._fed_at >= 0.8 * self._period_s:
            log.error("watchdog not fed", loops=", ".join(sorted(still)), next="the service manager restarts us")
            self._told = True


class ServiceManager:
    """One service's line to systemd.

    Args:
        notifier: where messages go.
        watchdog_s: ``WatchdogSec`` of the unit; 0: it has none.
    """

    def __init__(self, notifier: Notifier | None = None, watchdog_s: float = 0.0) -> None:
        self._notifier = notifier or Notifier()
        self._watchdog_s = watchdog_s
        self._watchdog: Watchdog | None = None
        self._started = threading.Event()
        self._ready = False
        self._status = ""
        self._status_at = float("-inf")

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> ServiceManager:
        """Return the manager that started this process; its variables are removed, so that children don't speak."""
        found = os.environ if environment is None else environment
        address = found.pop("NOTIFY_SOCKET", "")
        period, whose = found.pop("WATCHDOG_USEC", ""), found.pop("WATCHDOG_PID", "")
        ours = not whose or whose == str(os.getpid())
        watchdog_s = 0.0
        if ours and period:
            with contextlib.suppress(ValueError):
                watchdog_s = int(period) / _USEC
        return cls(Notifier(address), watchdog_s)

    @contextlib.contextmanager
    def busy(self, status: str, *, limit_s: float = START_LIMIT_S) -> Iterator[None]:
        """Feed the watchdog from a thread while a running service rebuilds itself, at most for ``limit_s``."""
        over = threading.Event()

        def feed() -> None:
            end = time.monotonic() + limit_s
            while not over.wait(1.0) and time.monotonic() < end:
                self._notifier.send(WATCHDOG=1)

        self._notifier.send(STATUS=status, WATCHDOG=1)
        feeding = threading.Thread(target=feed, name="watchdog", daemon=True)
        feeding.start()
        try:
            yield
        finally:
            over.set()
            feeding.join()

    def begin(self, status: str, *, limit_s: float = START_LIMIT_S) -> None:
        """Ask for more time, from a thread, until the first ``report``: what happens before may take minutes.

        Args:
            status: what happens now.
            limit_s: give up asking after so long; systemd then ends the start.
        """
        if not self._notifier:
            return
        self._notifier.send(STATUS=status, EXTEND_TIMEOUT_USEC=int(EXTEND_S * _USEC))
        threading.Thread(target=self._ask, args=(time.monotonic() + limit_s,), name="starting", daemon=True).start()

    def report(self, turns: Mapping[str, int], *, ready: bool, status: str, now: float) -> None:
        """Tell what a running service does; call it with every turn of the main loop.

        Before it is ready, progress asks for more time to start; afterwards, it feeds the watchdog.

        Args:
            turns: what ``Watchdog.due`` takes; the caller's own turns needn't be among them.
            ready: whether the service does what it is there for; said once, it stays.
            status: one line for ``systemctl status``.
            now: seconds of a clock that never runs backwards.
        """
        self._started.set()
        if not self._notifier:
            return
        if self._watchdog is None:
            self._watchdog = Watchdog(self._watchdog_s or EXTEND_S / 2, now)
        if ready and not self._ready:
            self._ready = True
            self._notifier.send(READY=1, STATUS=status)
            self._status, self._status_at = status, now
        if status != self._status and now - self._status_at >= _STATUS_EVERY_S:
            self._notifier.send(STATUS=status)
            self._status, self._status_at = status, now
        if self._watchdog.due(turns, now):
            self._feed()

    def stopping(self) -> None:
        """Tell that the service ends by itself or was asked to."""
        self._started.set()
        self._notifier.send(STOPPING=1, STATUS="stopping")

    def _feed(self) -> None:
        if not self._ready:
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(EXTEND_S * _USEC))
        elif self._watchdog_s:
            self._notifier.send(WATCHDOG=1)

    def _ask(self, until: float) -> None:
        while not self._started.wait(_ASK_EVERY_S) and time.monotonic() < until:
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(EXTEND_S * _USEC))
