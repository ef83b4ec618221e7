"""What the console knows now, looked at anew at most once a second, and only while somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from replayfleet.aggregator.console.facts import Fleet, fleet_alive, fleet_on_disk
from replayfleet.aggregator.console.samples import Held, held
from replayfleet.aggregator.console.story import Story
from replayfleet.aggregator.control.caller import LocalControl
from replayfleet.aggregator.control.membership import Plan
from replayfleet.aggregator.control.verbs import Verb, VerbRefused
from replayfleet.aggregator.control.view import FleetView
from replayfleet.federation.errors import ReplayfleetError

LOOK_EVERY_S = 1.0
GRACE_S = 0.05
"""So long a page waits for newer facts than those of a moment ago: a loop in the middle of a round may be busy."""
OLD_S, PATIENCE_S = 5.0, 2.0
"""Facts that are older are waited for, so long."""
_BUSY = "The aggregator hasn't answered for a while: this is what it said last."

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
        self._something = threading.Condition()
        self._story = Story(folder)
        self._looked_at = float("-inf")
        self._looking: threading.Thread | None = None
        self._fleet: Fleet | None = None
        self._problem: Exception | None = None
        self._number = 0
        self._held = Held()

    def read(self, what: Callable[[Fleet, Story, int], _T]) -> _T:
        """Return what ``what`` makes of the facts and their number, which rises whenever they change.

        Raises:
            SettingsError: The data dir can't be read.
        """
        with self._something:
            before = self._looked_at
            age_s = self._clock() - before
            if age_s >= LOOK_EVERY_S:
                if self._looking is None:
                    self._looking = threading.Thread(target=self._look, name="look", daemon=True)
                    self._looking.start()
                patience = None if self._fleet is None else GRACE_S if age_s < OLD_S else PATIENCE_S
                self._something.wait_for(lambda: self._looked_at != before, patience)
            if self._problem is not None:
                raise self._problem
            assert self._fleet is not None
            if self._looked_at == before and age_s >= OLD_S and _BUSY not in self._fleet.notices:
                self._fleet, self._number = replace(self._fleet, notices=(_BUSY,)), self._number + 1
            return what(self._fleet, self._story, self._number)

    def changed(self) -> None:
        """Pages would be others now, though the facts are the same."""
        with self._something:
            self._number += 1

    def do(self, verb: Verb, who: str, agreed: str = "") -> Plan:
        """Do a verb; the next read looks, however short ago the last one was. Raises as ``control.do``."""
        try:
            return self.control.do(verb, who, agreed)
        finally:
            with self._something:
                self._something.wait_for(lambda: self._looking is None, PATIENCE_S)  # that look may not have seen it
                self._looked_at = float("-inf")

    def _look(self) -> None:
        """Ask the loop, while pages show what was known; then follow the journal."""
        found: FleetView | ReplayfleetError | None = None
        try:
            found = self.control.look()
        except ConnectionError:
            pass
        except ReplayfleetError as error:
            found = error
        with self._something:
            try:
                told, fleet = self._story.follow(), self._made_of(found)
                if self._fleet is None or fleet.round != self._fleet.round:
                    self._held = held(self.folder)
                fleet = replace(fleet, held=self._held)
                if told or fleet != self._fleet:
                    self._fleet, self._number = fleet, self._number + 1
                self._problem = None
            except (ReplayfleetError, OSError) as error:
                self._problem = error
            finally:
                self._looked_at, self._looking = self._clock(), None
                self._something.notify_all()

    def _made_of(self, found: FleetView | ReplayfleetError | None) -> Fleet:
        """Return the facts; what the loop never tells, and all if it doesn't run, is on its disk."""
        if found is None:
            self._alive = False
            return fleet_on_disk(self.folder, self._story)
        if isinstance(found, VerbRefused):
            last = self._fleet or fleet_on_disk(self.folder, self._story)
            return replace(last, notices=(f"The aggregator doesn't answer: {found}",))
        if isinstance(found, ReplayfleetError):
            raise found
        if self._fleet is None or not self._alive:
            self._fleet, self._alive = fleet_on_disk(self.folder, self._story), True
        return fleet_alive(found, self._fleet, self._story, self._wall_clock())

    def number(self) -> int:
        """The facts' number."""
        return self.read(lambda fleet, story, number: number)
