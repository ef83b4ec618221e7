"""A fleet of a demo from its start to its end: its journal is read, shown and held against the time that is left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.scripts.demo.command import interrupted
from replayfleet.scripts.demo.processes import Child, Children
from replayfleet.scripts.demo.table import event_line, live_view
from replayfleet.scripts.fleet.record import FleetRecord, JournalTail
from replayfleet.scripts.words import clock

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a demo may take.

    Attributes:
        started: ``time.monotonic()`` at its start.
        seconds: from then on.
        smaller: the options that ask for less, and a verb.
    """

    started: float
    seconds: float
    smaller: str = "--fast asks"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


class Watch:
    """Follows one aggregator's journal while its processes run.

    Args:
        journal: the aggregator's ``events.jsonl``; it needn't be there yet.
        children: the fleet's processes, and none of another fleet.
        console: the terminal, or whatever standard output is.
        limit: when to give up.
        note: a line about what else goes on, asked for at every look.
    """

    def __init__(
        self, journal: Path, children: Children, console: Console, limit: Limit, note: Callable[[], str] = lambda: ""
    ) -> None:
        self.record = FleetRecord()
        self._tail = JournalTail(journal)
        self._children = children
        self._console = console
        self._limit = limit
        self._note = note
        self._show: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show a live table within this block, if there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._show = lambda: live.update(
                live_view(self.record, elapsed_s=self._limit.elapsed_s, note=self._note()), refresh=True
            )
            yield
        self._show = lambda: None

    def wait_for(
        self,
        awaited: Sequence[Child],
        *,
        may_end: Sequence[Child],
        beside: Sequence[Child] = (),
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until all of ``awaited`` have ended (True) or ``until`` says that it is enough (False).

        Args:
            awaited: processes.
            may_end: those that may end once the run is finished.
            beside: those that may end at any time.
            until: asked at every look.

        Raises:
            ChildFailed: A process ended before its time, or failed.
            ReplayfleetError: The time is up.
            KeyboardInterrupt: Somebody stops the demo.
        """
        while any(child.process.poll() is None for child in awaited):
            self._look()
            self._children.check([*may_end, *beside] if self.record.finished else beside)
            if until():
                return False
            if self._limit.elapsed_s > self._limit.seconds:
                raise ReplayfleetError(
                    f"{self._limit.seconds:.0f} s are over ({self._where()}); everything is ended, the logs are in "
                    f"{self._children.logs}; --time-limit-s allows more, {self._limit.smaller} for less"
                )
            time.sleep(POLL_S)
        self._look()
        self._children.check([*may_end, *beside])
        return True

    def _look(self) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        for event in self._tail.new_events():
            self.record.add(event)
            line = event_line(event, self.record)
            if line and not self._console.is_terminal:
                self._console.print(f"{clock(self._limit.elapsed_s):>5}  {line}", soft_wrap=True)
        self._show()

    def _where(self) -> str:
        current = self.record.current
        return "no round was opened" if current is None else f"round {current.index} of {self.record.num_rounds}"


def seconds_from_now(seconds: float) -> Callable[[], bool]:
    """Return what says whether so many seconds are over."""
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline
