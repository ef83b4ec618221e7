"""Keeps a console running beside the aggregator; whatever becomes of it, the aggregator goes on."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

from replayfleet.federation.children import child_command, child_environment, die_with_parent, end, ending
from replayfleet.federation.service.logs import EventLogger

AGAIN_S = 10.0
GOODBYE_S = 3.0

_log = EventLogger("aggregator")


class ConsoleBeside:
    """A console's process, started again whenever it ends; a context.

    Args:
        arguments: of ``aggregator console``.
        again_s: so long after.
    """

    def __init__(self, arguments: Sequence[str], again_s: float = AGAIN_S) -> None:
        self._command = child_command("replayfleet.aggregator.console.command", *arguments)
        self._again_s = again_s
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the child with the thread that started it, so one thread does so for as long as it lives.
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def __enter__(self) -> ConsoleBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if (process := self._process) is not None:
            process.terminate()
        self._thread.join(GOODBYE_S + 1)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    self._command,
                    stdin=subprocess.DEVNULL,
                    env=child_environment(),
                    # Before its first instruction: an aggregator may be killed while its console imports. With SIGKILL,
                    # for one that stands still ends at no other; it keeps nothing.
                    preexec_fn=die_with_parent,
                ) as process:
                    self._process = process
                    while process.poll() is None and not self._over.wait(0.2):
                        pass
                    if self._over.is_set():
                        process.terminate()
                        end(process, GOODBYE_S)
                        return
                reason = ending(process, 0)
            except OSError as error:  # no process is to be had
                reason = str(error)
            _log.warning("console ended", reason=reason, again_in_s=self._again_s)
            self._over.wait(self._again_s)
