"""A fleet from its start to its end: its journal is read, shown and held against the time that is left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service.words import clock
from replayfleet.federation.wire.transport.broker import PrivateBroker
from replayfleet.scripts.launch.command import interrupted
from replayfleet.scripts.launch.plan import Command, FleetPlan
from replayfleet.scripts.launch.processes import Child, Children
from replayfleet.scripts.launch.record import JOURNAL, FleetRecord, JournalTail
from replayfleet.scripts.launch.table import event_line, live_view

POLL_S = 0.25
_LINE_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How long all may take; ``smaller`` are the options that ask for less, and a verb."""

    started: float
    seconds: float
    smaller: str = "--fast asks"

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


class RunningFleet:
    """The processes of one fleet, which may be killed and started again while it is watched.

    Attributes:
        record: what the journal says so far.
        clients: those that run now.
        late: clients that didn't leave by themselves.

    Args:
        plan: what to run.
        broker: running.
        console: the terminal, or whatever standard output is.
        limit: when to give up.
        note: a line about what else goes on, asked for at every look.
    """

    def __init__(
        self,
        plan: FleetPlan,
        broker: PrivateBroker,
        console: Console,
        limit: Limit,
        note: Callable[[], str] = lambda: "",
    ) -> None:
        self.record = FleetRecord()
        self.clients: dict[str, Child] = {}
        self.late: list[str] = []
        self._plan = plan
        self._broker = broker
        self._console = console
        self._limit = limit
        self._note = note
        self._children = Children(plan.logs)
        self._journal = JournalTail(plan.data_dir / JOURNAL)
        self._client_url = broker.url
        self._show: Callable[[], None] = lambda: None

    def run(self, *, step: Callable[[], None] = lambda: None, enough: Callable[[], bool] = lambda: False) -> bool:
        """Run the fleet from its start to its end; whatever happens, none of its processes is left.

        Args:
            step: called at every look: what is to go wrong goes wrong here.
            enough: asked at every look until the aggregator is done; True ends the fleet before.

        Returns:
            Whether it came to its end by itself.

        Raises:
            ChildFailed: A process ended before its time, or failed.
            ReplayfleetError: The time is up.
            KeyboardInterrupt: Somebody stops it.
        """
        plan = self._plan
        with self._children, self._shown():
            if plan.line:
                self._client_url = f"mqtt://127.0.0.1:{self._start_line()}"
            aggregator = self._start("aggregator", [*plan.aggregator, "--broker", self._broker.url])
            for name in plan.clients:
                self.start_client(name)
            beside = [self._start(name, command, niceness=10) for name, command in plan.beside.items()]

            def wait(is_over: Callable[[], bool]) -> None:
                while not is_over():
                    self._look([aggregator, *self.clients.values()], beside)
                    step()
                    time.sleep(POLL_S)
                self._look([aggregator, *self.clients.values()], beside)

            stopped = False

            def aggregated() -> bool:
                nonlocal stopped
                stopped = not aggregator.is_over and enough()
                return stopped or aggregator.is_over

            wait(aggregated)
            if stopped:
                return False
            leave_at = time.monotonic() + plan.leave_s
            wait(lambda: all(child.is_over for child in self.clients.values()) or time.monotonic() > leave_at)
            self.late = [name for name, child in self.clients.items() if not child.is_over]
            wait(lambda: all(child.is_over for child in beside))
        return True

    def start_client(self, name: str, again: str = "") -> None:
        """Start a client with the data dir that it may have left; ``again`` is added to its log's name."""
        command = [*self._plan.clients[name], "--broker", self._client_url]
        self.clients[name] = self._start(f"{name}{again}", command)

    def kill_client(self, name: str) -> None:
        """End a client with SIGKILL."""
        self._children.kill(self.clients[name])

    def say(self, text: str) -> None:
        """Tell what happens, and when."""
        self._console.print(f"{clock(self._limit.elapsed_s):>5}  {text}", soft_wrap=True)

    def _start(self, name: str, command: Command, niceness: int = 0) -> Child:
        return self._children.start(f"{self._plan.prefix}{name}", command, niceness=niceness)

    def _start_line(self) -> int:
        """Start what stands between clients and broker, and return its port."""
        line = self._start("line", [*self._plan.line, "--to", self._broker.url.rpartition(":")[2]])
        deadline = time.monotonic() + _LINE_START_S
        while time.monotonic() < deadline:
            self._children.check()
            for text in line.log.read_text(encoding="utf-8").splitlines():
                if text.startswith("port "):
                    return int(text.removeprefix("port "))
            time.sleep(0.05)
        raise ReplayfleetError(f"the bad line did not start within {_LINE_START_S:.0f} s; its log is {line.log}")

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Show a live table within this block, if there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._show = lambda: live.update(
                live_view(self.record, elapsed_s=self._limit.elapsed_s, note=self._note()), refresh=True
            )
            yield

    def _look(self, fleet: list[Child], beside: list[Child]) -> None:
        """Take what is new: the fleet may end once its run is finished, what runs beside it at any time."""
        if interrupted.is_set():
            raise KeyboardInterrupt
        if self._broker.keep():
            self.say("broker: it was ended, and is started again")
        ended = self._children.ended()  # before their journal is read: what they wrote last is in it then
        for event in self._journal.new_events():
            self.record.add(event)
            line = event_line(event, self.record)
            if line and not self._console.is_terminal:
                self.say(line)
        self._show()
        self._children.check([*fleet, *beside] if self.record.finished else beside, ended)
        if self._limit.elapsed_s > self._limit.seconds:
            current = self.record.current
            where = "no round was opened" if current is None else f"round {current.index} of {self.record.num_rounds}"
            raise ReplayfleetError(
                f"{self._limit.seconds:.0f} s are over ({where}); everything is ended, the logs are in "
                f"{self._plan.logs}; --time-limit-s allows more, {self._limit.smaller} for less"
            )
