from __future__ import annotations

import errno
import threading

import pytest

from replayfleet.aggregator.console.beside import ConsoleBeside


def test_a_console_for_which_no_process_is_to_be_had_is_begun_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, again = list[object](), threading.Event()

    def refused(*command: object, **_options: object) -> None:
        tries.append(command)
        if len(tries) > 2:
            again.set()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    with ConsoleBeside((), again_s=0.01):
        assert again.wait(60)
