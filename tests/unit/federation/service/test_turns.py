from __future__ import annotations

import threading
import time

from replayfleet.federation.service.turns import CountedStop


def test_every_look_counts() -> None:
    stop = CountedStop()
    assert not stop.is_set()
    assert not stop.wait(0.01)
    assert stop.turns == 2


def test_a_long_wait_counts_while_it_lasts_and_ends_at_once() -> None:
    stop = CountedStop()
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: (stop.wait(60.0), ended.set()), daemon=True)
    waiting.start()
    while stop.turns < 2:
        time.sleep(0.05)
    stop.set()
    assert ended.wait(30.0)
    assert stop.wait(60.0)
    assert stop.wait()


def test_a_wait_is_as_long_as_asked_for() -> None:
    began = time.monotonic()
    assert not CountedStop().wait(1.2)
    assert time.monotonic() - began >= 1.2
    assert not CountedStop().wait(-1.0)
