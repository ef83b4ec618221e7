"""Local training from the client's side: one job at a time, in a process of its own that is replaced when it dies."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from replayfleet.devices.memory import give_memory_back
from replayfleet.edge_client.learning.training.job import (
    IDLE,
    AnyJob,
    Chose,
    FromTrainer,
    TrainCourse,
    TrainDone,
    TrainerReady,
    TrainFailed,
    TrainJob,
)
from replayfleet.edge_client.serving.proc import Progress, progress_since
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.children import MAX_LINE_BYTES, Child, ChildEnded, ChildLost, child_command, end
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.words import count_of

log = EventLogger(__name__)

MAX_ATTEMPTS = 5
"""Deaths of the process during one round, after which that round is given up."""

IDLE_S = 10.0
"""A process without a job ends after this: torch takes up to 400 MB, four times as much as all else."""
SOON_S = 60.0
"""Where the next job came so soon after the last one, the process waits for it: to import torch again takes two seconds
of the processor, as much as many a round."""

HANGS_S = 300.0
"""A process with a job that has used next to no processor for so long, and wants none, won't go on."""
STARVES_S, SHARES_S = 30.0, 600.0
"""One that wants the processor and has been given next to none for so long is replaced; those that start within so long
take a share beside others."""
_LOOK_EVERY_S, _IDLE_SHARE = 5.0, 0.01

TRAINER_COMMAND = child_command("replayfleet.edge_client.learning.training.trainer")


@dataclass(frozen=True, slots=True)
class TrainerExited:
    """The process is gone; ``code`` as of ``subprocess.Popen.returncode``, ``pid`` of which one."""

    pid: int
    code: int


TrainerEvent: TypeAlias = FromTrainer | TrainerExited


class Trainer(Protocol):
    """What ``LocalTraining`` needs of a process."""

    pid: int

    def submit(self, job: AnyJob) -> None:
        """Hand over a job; a process that died meanwhile is reported by its exit event."""

    def pause(self) -> None:
        """Let the process stand still."""

    def resume(self) -> None:
        """Let it go on."""

    def progress(self) -> Progress:
        """What the process has made of the time since the last call."""

    def kill(self) -> None:
        """End the process without a word; its exit is reported as any other."""

    def stop(self) -> None:
        """End the process and wait for it, also a paused one. Idempotent."""


class TrainerProcess:
    """One child process; events arrive on a thread of its own.

    Args:
        on_event: called on that thread; it may only enqueue.
        idle: whether it takes only what nobody else on the machine wants; else it is merely nice.
        command: what to run.
    """

    def __init__(
        self, on_event: Callable[[TrainerEvent], None], idle: bool = False, command: Sequence[str] = TRAINER_COMMAND
    ) -> None:
        self._on_event = on_event
        # A job of some hundred classes is longer than the 64 KiB of a pipe, and the process may be stopped: who submits
        # is the client's loop, which waits for nobody.
        self._child: Child[FromTrainer] = Child(
            (*command, *([IDLE] if idle else [])), FromTrainer, input_bytes=MAX_LINE_BYTES
        )
        self.pid = self._child.pid
        self._cpu_s: float | None = None
        self._thread = threading.Thread(target=self._listen, name="trainer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left; what nobody hears isn't to go on
            self._child.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def submit(self, job: AnyJob) -> None:
        """Write the job to the process."""
        self._child.send(job)

    def pause(self) -> None:
        """Send SIGSTOP: it holds nothing that others wait for."""
        self._child.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._child.process.send_signal(signal.SIGCONT)

    def progress(self) -> Progress:
        """Look at its time on the processor, and its children's."""
        progress, self._cpu_s = progress_since(self.pid, self._cpu_s, _IDLE_SHARE * _LOOK_EVERY_S)
        return progress

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.process.kill()

    def stop(self) -> None:
        """Close its input, which ends it at once, also in the middle of a job."""
        self._child.end_input()
        self.resume()
        end(self._child.process, 5.0)
        self._thread.join(timeout=5)

    def _listen(self) -> None:
        with contextlib.suppress(ChildEnded):
            while True:
                self._hear()
        self._child.process.wait()
        self._on_event(TrainerExited(self.pid, self._child.close()))

    def _hear(self) -> None:
        try:
            heard = self._child.receive()
        except ChildEnded:
            raise
        except ChildLost as lost:
            log.warning("unreadable line from the training process", error=lost)
        else:
            assert heard is not None  # it waits without end
            self._on_event(heard[0])


class LocalTraining:
    """Keeps a training process and at most one job; decisions with ``now``, no waiting.

    Args:
        spawn: starts a process; told whether it takes only what nobody else wants, or no more than its share.
        backoff: delays between restarts.
        max_attempts: deaths after which a round is given up.

    Attributes:
        job: in work, or None.
        course: what the budget makes of it, or made of the one before; None until it is known.
        problem: why the latest round wasn't trained; empty if it was, or is in work.
        num_restarts: processes that died, each of which another one replaces.
        num_shortened: rounds that were trained in part.
    """

    def __init__(
        self, spawn: Callable[[bool], Trainer], backoff: Backoff | None = None, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        self._spawn = spawn
        self._backoff = backoff or Backoff()
        self._max_attempts = max_attempts
        self._trainer: Trainer | None = None
        self._ready = False
        self._restart_at: float | None = None
        self._deaths = 0
        self._deadline_at: float | None = None
        self._paused = False
        self._idle = True
        self._shares_until = 0.0
        self._progress: Progress = "works"
        self._lasts_s = self._look_at = 0.0
        self._idle_since: float | None = None
        self._ended_at: float | None = None
        self._patience_s = IDLE_S
        self.job: AnyJob | None = None
        self.course: TrainCourse | None = None
        self.problem = ""
        self.num_restarts = 0
        self.num_shortened = 0

    @property
    def round(self) -> int | None:
        return None if self.job is None else self.job.manifest.round

    @property
    def pid(self) -> int | None:
        return None if self._trainer is None else self._trainer.pid

    def start(self, now: float = 0.0) -> None:
        """Start the process, so that it has imported torch when the first round opens; if it can't be, try again."""
        if self._trainer is not None or self._restart_at is not None:
            return
        self._ready, self._idle = False, now >= self._shares_until
        try:
            self._trainer = self._spawn(self._idle)
        except OSError as error:  # no memory, process or descriptor is left, which may pass
            delay_s = self._backoff.next_s()
            self._restart_at = now + delay_s
            log.warning("training process can't be started", reason=error, again_in_s=delay_s)

    def begin(self, job: AnyJob, now: float = 0.0, deadline_at: float | None = None) -> None:
        """Train a round, or choose what to serve after it.

        Args:
            job: the round, or the choice; a round's ``left_s`` is filled in whenever a process gets it.
            now: the present.
            deadline_at: when it must be done, on the same clock; None for no deadline.

        Raises:
            ValueError: Another one is in work.
        """
        if self.job is not None:
            raise ValueError(f"round {self.round} is in work, round {job.manifest.round} must wait")
        self.job, self._deadline_at = job, deadline_at
        if isinstance(job, TrainJob):
            self.course, self.problem = None, ""
        self._deaths, self._lasts_s = 0, 0.0
        if self._ended_at is not None:
            apart_s = now - self._ended_at
            self._patience_s = max(IDLE_S, 2 * apart_s) if apart_s <= SOON_S else IDLE_S
        self.start(now)
        if self._ready:
            self._submit(now)

    def follow(self, deadline_at: float | None) -> None:
        """Take a deadline that was moved, for a job that waits for its process; one in work keeps to its own."""
        self._deadline_at = deadline_at

    def handle(self, event: TrainerEvent, now: float) -> TrainDone | TrainFailed | Chose | None:
        """Take an event; returns the end of the job, once."""
        if isinstance(event, TrainerReady):
            self._ready = True
            self._idle_since = now
            self._submit(now)
            return None
        if isinstance(event, TrainerExited):
            return self._exited(event, now)
        if self.job is None or event.round != self.round:
            return None
        if isinstance(event, TrainCourse):
            self._heard(event)
            return None
        if isinstance(self.job, TrainJob):
            self._ended_at, self.problem = now, event.error if isinstance(event, TrainFailed) else ""
        self.job, self._idle_since = None, now
        self._backoff.reset()
        return event

    def tick(self, now: float) -> None:
        """Start the process again when its back-off is over; end one that has been idle for long, or that hangs."""
        self._end_if_it_gets_nowhere(now)
        idle_since = self._idle_since if self._ready and self.job is None else None
        if idle_since is not None and now - idle_since >= self._patience_s:
            self.stop()
            give_memory_back()  # what our own half of the round took; now it may be long until the next
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self.start(now)

    def pause(self, *, paused: bool) -> None:
        """Let the process stand still, or go on; one without a job always goes on."""
        paused = paused and self.job is not None
        if self._trainer is None or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._trainer.pause()
        else:
            self._trainer.resume()

    def stop(self) -> None:
        """End the process; a job in work is lost, what was committed stays."""
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            self._ready, self._paused = False, False
            trainer.stop()

    def _end_if_it_gets_nowhere(self, now: float) -> None:
        if self._trainer is None or self.job is None or self._paused or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        before, self._progress = self._progress, self._trainer.progress()
        self._lasts_s = self._lasts_s + _LOOK_EVERY_S if self._progress == before else 0.0
        if self._progress == "still" and self._lasts_s >= HANGS_S:
            log.warning("training process hangs", pid=self._trainer.pid, round=self.round, next="another one trains")
        elif self._progress == "starved" and self._lasts_s >= STARVES_S and self._idle:
            self._shares_until = now + SHARES_S
            log.warning(
                "others leave training no processor",
                pid=self._trainer.pid,
                round=self.round,
                next="it begins anew and takes a small share",
            )
        else:
            return
        self._lasts_s = 0.0
        self._trainer.kill()

    def _submit(self, now: float) -> None:
        if self.job is None or self._trainer is None:
            return
        job, left_s = self.job, None if self._deadline_at is None else max(0.0, self._deadline_at - now)
        self._trainer.submit(msgspec.structs.replace(job, left_s=left_s) if isinstance(job, TrainJob) else job)

    def _heard(self, course: TrainCourse) -> None:
        """Note what becomes of the round, and say so where it isn't all of it."""
        before, self.course = self.course, course
        short = course.is_short or course.lost or not course.in_time
        self.num_shortened += short and course.done
        if short and (before is None or course.text() != before.text()):
            log.info("training shortened", round=course.round, course=course.text())

    def _exited(self, event: TrainerExited, now: float) -> TrainFailed | None:
        if self._trainer is None or event.pid != self._trainer.pid:
            return None
        self._trainer, self._ready, self._paused = None, False, False
        delay_s = self._backoff.next_s()
        self._restart_at = now + delay_s
        self._deaths += 1
        self.num_restarts += 1
        log.warning("training process died", code=event.code, round=self.round, restart_in_s=delay_s)
        if self.job is None or self._deaths < self._max_attempts:
            return None
        failed = TrainFailed(self.job.manifest.round, f"the training process died {count_of(self._deaths, 'time')}")
        if isinstance(self.job, TrainJob):
            self.problem = failed.error
        self.job = None
        return failed
