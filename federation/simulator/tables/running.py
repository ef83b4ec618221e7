"""Runs of a table as processes of their own, a few at a time: one that fails or is killed harms no other."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from replayfleet.federation.children import child_command, die_with_parent
from replayfleet.federation.paths import RESULT
from replayfleet.federation.service.words import count_of, duration
from replayfleet.federation.simulator.exit_codes import UNFINISHED
from replayfleet.federation.simulator.run_spec import FROM_STDIN
from replayfleet.federation.simulator.tables.estimate import Work, seconds_left
from replayfleet.federation.simulator.tables.plan import PlannedRun, read_json

LOG = "log.txt"

_POLL_S = 0.2
_REPORT_S = 60.0
_STOP_S = 10.0


class Process(Protocol):
    """A run that was begun, as ``subprocess.Popen`` has it."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""


Launch = Callable[[PlannedRun], Process]


def launch_process(run: PlannedRun) -> Process:
    """Begin a run, which gets what to do as JSON; what it prints goes to ``log.txt`` in its folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / LOG).open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            child_command("replayfleet.federation.simulator.cli", FROM_STDIN, program="fleet-sim"),
            stdout=log,
            stderr=log,
            stdin=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # a child that is gone is found by poll
        stdin.write(run.spec.encode())
    return process


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended without a result.

    Attributes:
        run: which.
        reason: the last line that it printed.
    """

    run: PlannedRun
    reason: str


@dataclass(slots=True)
class _Running:
    run: PlannedRun
    process: Process
    started: float
    first_round: int


@dataclass(slots=True)
class Runner:
    """Runs what is missing.

    Attributes:
        runs: what to run, in this order, each with a folder of its own.
        num_jobs: processes at a time.
        launch: begins a run.
        minutes: after which no run begins, and running ones stop with their round; None never.
        earlier: the work of finished runs, for the estimate.
        show: takes a line for the operator.
        clock: seconds, rising.
        sleep: waits so many seconds.
    """

    runs: Sequence[PlannedRun]
    num_jobs: int
    launch: Launch
    minutes: float | None = None
    earlier: Sequence[Work] = ()
    show: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    unfinished: list[PlannedRun] = field(default_factory=list)
    """Runs that the minutes ended or kept from beginning; the same again goes on with them."""
    _failures: list[Failure] = field(default_factory=list)
    _done: list[Work] = field(default_factory=list)

    def run_all(self) -> list[Failure]:
        """Run everything; returns what failed. An interruption ends all processes; they can be resumed."""
        waiting, running = list(self.runs), list[_Running]()
        started = reported = self.clock()
        ends = math.inf if self.minutes is None else started + 60 * self.minutes
        try:
            with _terminated_like_interrupted():
                while waiting or running:
                    if self.clock() >= ends:
                        self.unfinished += waiting
                        waiting = []
                    while waiting and len(running) < self.num_jobs:
                        running.append(self._begin(waiting.pop(0), ends))
                    ended = [entry for entry in running if entry.process.poll() is not None]
                    running = [entry for entry in running if entry not in ended]
                    for entry in ended:
                        self._end(entry)
                    if ended or self.clock() - reported >= _REPORT_S:
                        reported = self.clock()
                        self.show(self._line(reported - started, running, waiting))
                    elif running:
                        self.sleep(_POLL_S)
        finally:
            for entry in running:
                entry.process.terminate()
            for entry in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    entry.process.wait(timeout=_STOP_S)
        return self._failures

    def _begin(self, run: PlannedRun, ends: float) -> _Running:
        self.show(f"begins: {run.name}")
        now = self.clock()
        limited = run
        if not math.isinf(ends):
            limited = replace(run, spec=replace(run.spec, minutes=max(0.0, (ends - now) / 60)))
        return _Running(run, self.launch(limited), now, _num_rounds_done(run.folder))

    def _end(self, entry: _Running) -> None:
        code, took = entry.process.poll(), self.clock() - entry.started
        if code == 0 and (entry.run.folder / RESULT).exists():
            self._done.append(self._work_done(entry))
            average = 100 * read_json(entry.run.folder / RESULT, _Outcome).summary["average_accuracy"]
            self.show(f"finished: {entry.run.name}, average accuracy {average:.2f} %, {duration(took)}")
            return
        if code == UNFINISHED and self.minutes is not None:
            self.unfinished.append(entry.run)
            self.show(f"stopped: {entry.run.name}, {_progress(entry.run)}")
            return
        killed = f"killed by signal {-code}" if code is not None and code < 0 else ""
        reason = killed or _last_line(entry.run.folder / LOG) or f"exit code {code}"
        self._failures.append(Failure(entry.run, reason))
        self.show(f"FAILED: {entry.run.name}: {reason} (all of it: {entry.run.folder / LOG})")

    def estimate(self) -> str:
        """Return how long everything will take, for people."""
        left = seconds_left(self.earlier, [], [self._work_left(run) for run in self.runs], self.num_jobs)
        return "time not known before the first round" if left is None else f"about {duration(left)}"

    def _line(self, elapsed: float, running: Sequence[_Running], waiting: Sequence[PlannedRun]) -> str:
        num_failed = len(self._failures)
        num_done = len(self.runs) - len(running) - len(waiting) - len(self.unfinished) - num_failed
        rounds = ", ".join(f"{entry.run.name} {_progress(entry.run)}" for entry in running)
        left = seconds_left(
            [*self.earlier, *self._done, *(self._work_done(entry) for entry in running)],
            [self._work_left(entry.run) for entry in running],
            [self._work_left(run) for run in waiting],
            self.num_jobs,
        )
        parts = [f"{num_done} of {count_of(len(self.runs), 'run')} done after {duration(elapsed)}"]
        if num_failed:
            parts.append(f"{num_failed} failed")
        if running:
            parts.append(rounds)
        if running or waiting:
            parts.append("time left not known yet" if left is None else f"about {duration(left)} left")
        return "; ".join(parts)

    def _work_done(self, entry: _Running) -> Work:
        num_rounds = _num_rounds_done(entry.run.folder) - entry.first_round
        seconds = self.clock() - entry.started
        return Work(speed_class(entry.run), max(0, num_rounds) * entry.run.num_clients, seconds)

    def _work_left(self, run: PlannedRun) -> Work:
        return Work(speed_class(run), max(0, run.num_rounds - _num_rounds_done(run.folder)) * run.num_clients)


class _Timed(msgspec.Struct, frozen=True):
    round_s: float


class _Outcome(msgspec.Struct, frozen=True):
    """What a runner reads of a result."""

    rounds: list[_Timed]
    summary: dict[str, float] = {}


def earlier_work(runs: Sequence[PlannedRun]) -> list[Work]:
    """Return what finished runs took.

    Raises:
        SettingsError: A result can't be read.
    """
    works = []
    for run in runs:
        rounds = read_json(run.folder / RESULT, _Outcome).rounds
        seconds = sum(record.round_s for record in rounds)
        works.append(Work(speed_class(run), len(rounds) * run.num_clients, seconds))
    return works


def speed_class(run: PlannedRun) -> str:
    """Runs of one method on one data set take about as long per client and round."""
    return f"{run.spec.method}/{run.spec.dataset}"


def _progress(run: PlannedRun) -> str:
    return f"round {_num_rounds_done(run.folder)} of {run.num_rounds}"


def _num_rounds_done(folder: Path) -> int:
    return sum(1 for _ in (folder / "state").glob("round-*.json"))


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that no process is left behind."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
