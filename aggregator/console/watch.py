"""What the console knows now, looked at anew at most once a second, and only while somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from replayfleet.aggregator.console.facts import Fleet, fleet_alive, fleet_on_disk
from replayfleet.aggregator.console.story import Story
from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.verbs import VerbRefused

LOOK_EVERY_S = 1.0

_T = TypeVar("_T")


class Watch:
    """The newest facts; safe across threads.

    Args:
        folder: data dir of the aggregator.
        clock: seconds; never runs backwards.

    Attributes:
        control: plans and does verbs on the running loop.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._wall_clock = time.time
        self._alive = False
        self.control = LocalControl(folder)
        self._lock = threading.Lock()
        self._story = Story(folder)
        self._looked_at = float("-inf")
        self._fleet: Fleet | None = None
        self._number = 0

    def read(self, what: Callable[[Fleet, Story, int], _T]) -> _T:
        """Return what ``what`` makes of the facts and their number, which rises whenever they change.

        Raises:
            SettingsError: The data dir can't be read.
        """
        with self._lock:
            now = self._clock()
            if self._fleet is None or now - self._looked_at >= LOOK_EVERY_S:
                told = self._story.follow()
                fleet = self._look()
                if told or fleet != self._fleet:
                    self._fleet, self._number = fleet, self._number + 1
                self._looked_at = now
            return what(self._fleet, self._story, self._number)

    def look_again(self) -> None:
        """Something was done: the next read looks, however short ago the last one was."""
        with self._lock:
            self._looked_at = float("-inf")

    def _look(self) -> Fleet:
        """Ask the loop; what it never tells, and all if it doesn't run, is on its disk."""
        try:
            view = self.control.look()
        except ConnectionError:
            self._alive = False
            return fleet_on_disk(self.folder, self._story)
        except VerbRefused as error:
            last = self._fleet or fleet_on_disk(self.folder, self._story)
            return replace(last, notices=(f"The aggregator doesn't answer: {error}",))
        if self._fleet is None or not self._alive:
            self._fleet, self._alive = fleet_on_disk(self.folder, self._story), True
        return fleet_alive(view, self._fleet, self._story, self._wall_clock())

    def number(self) -> int:
        """The facts' number."""
        return self.read(lambda fleet, story, number: number)
