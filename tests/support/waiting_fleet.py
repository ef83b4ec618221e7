"""A fleet whose round waits for its third client, and whose aggregator's loop a thread turns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.mortal_verbs import listens
from support.tiny_fleet import TinyFleet

from tests.support.waiting import until


@contextlib.contextmanager
def waiting_fleet(folder: Path, **rules: Any) -> Iterator[TinyFleet]:
    """Run one; its aggregator's data dir is ``folder / "aggregator"``, ``rules`` are of ``RoundRules``."""
    made = TinyFleet(folder, **rules)
    made.clients["cam-3"].dies_in = 0
    made.run(until=lambda: len(made.rounds.accepted) == 2)
    made.kill_aggregator()
    stop = threading.Event()
    serving = threading.Thread(target=lambda: made.new_service().run(stop))
    serving.start()
    until(lambda: listens(folder / "aggregator"))
    try:
        yield made
    finally:
        stop.set()
        serving.join()
