from __future__ import annotations

import _thread
import signal
import threading

import pytest

from replayfleet.federation.service.signals import stopped_by_signals


class Interrupted(threading.Event):
    """An event during whose setting, while its lock is held, the same signal comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.again = threading.Lock(), True

    def set(self) -> None:
        assert self.lock.acquire(timeout=60), "the second signal waits for the first, which waits for it"
        if self.again:
            self.again = False
            signal.raise_signal(signal.SIGTERM)
        super().set()
        self.lock.release()


def test_a_second_signal_within_the_first_hangs_nothing() -> None:
    stop = Interrupted()
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(60)


def test_where_no_thread_can_be_started_a_signal_stops_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback in the middle of the loop: no goodbye, for which the model on probation was blamed."""

    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none_left)
    stop = threading.Event()
    with stopped_by_signals(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()


def test_a_terminal_that_is_closed_stops_as_ctrl_c_does_and_nohup_keeps_it_from_that() -> None:
    """It was no goodbye: two terminals closed while a model was on probation sent it away."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, stops in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, handler)
            stop = threading.Event()
            with stopped_by_signals(stop):
                signal.raise_signal(signal.SIGHUP)
                assert stop.wait(60 if stops else 0) is stops
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
