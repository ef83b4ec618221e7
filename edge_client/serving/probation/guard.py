"""Watches the served model beside the frames: its probation, and the memory of its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from replayfleet.edge_client.flow import Answers, Inputs, View
from replayfleet.edge_client.serving.memory_watch import MemoryWatch
from replayfleet.edge_client.serving.model import WorkerModel
from replayfleet.edge_client.serving.probation.comparison import Compared
from replayfleet.edge_client.serving.probation.probation import Probation, ProbationRules
from replayfleet.edge_client.serving.slot import ModelLost, ModelSlot, ServedModel
from replayfleet.federation.errors import ArtefactRejected, Reason
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

_LOOK_S = 0.5
"""Between looks while no picture comes."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A picture that the served model answered.

    Attributes:
        served: the model.
        view: what made inputs of the picture and answers of the outputs.
        inputs: at least one.
        answers: what the model said.
        took_s: seconds that it needed.
    """

    served: ServedModel
    view: View
    inputs: Inputs
    answers: Answers
    took_s: float


class Guard:
    """A thread that asks, compares and checks, so that frames never wait for it.

    Args:
        slot: whose active model is watched.
        rules: of probation.
        memory: decides when a process has grown too much.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        slot: ModelSlot,
        rules: ProbationRules | None = None,
        memory: MemoryWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot = slot
        self._rules = rules or ProbationRules()
        self._memory = memory or MemoryWatch()
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: Answered | None = None
        self._num_answered = 0
        self._stopped = False
        self._probation: Probation | None = None
        self._uncompared = -1  # the version whose predecessor failed last: one line for many pictures
        self._thread: threading.Thread | None = None
        self.num_recycles = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def saw(self, answered: Answered) -> None:
        """Take an answered picture; called on the serving thread. Only the newest waits to be looked at."""
        if self._slot.on_probation is not answered.served:
            return
        with self._changed:
            if self._newest is not None and self._newest.served.version != answered.served.version:
                self._num_answered = 0
            self._newest = answered
            self._num_answered += 1
            self._changed.notify_all()

    def tick(self, now: float) -> None:
        """Do what is due; called by the thread, or by a test."""
        with self._changed:
            newest, num_answered = self._newest, self._num_answered
            self._newest, self._num_answered = None, 0
        served = self._slot.on_probation
        if served is not None:
            self._on_probation(served, newest, num_answered, now)
        self._watch_memory(now)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._newest is None:
                    self._changed.wait(timeout=_LOOK_S)
                if self._stopped:
                    return
            try:
                self.tick(self._clock())
            except Exception:  # root of a thread
                log.exception("guard failed", next="going on")
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, timeout=self._rules.compare_every_s)

    def _on_probation(self, served: ServedModel, answered: Answered | None, num_answered: int, now: float) -> None:
        probation = self._probation
        if probation is None or probation.version != served.version:
            self._probation = probation = Probation(served.version, now, self._rules)
            log.info("probation began", version=served.version)
        if answered is not None and answered.served.version == served.version:
            probation.answered(num_answered)
            if probation.compares(now):
                self._compare(probation, answered, now)
        failure = self._golden_vector(served, probation) if probation.checks(now) else None
        failure = failure or probation.verdict()
        if failure is not None:
            self._slot.roll_back(served.version, *failure)
        elif probation.passed(now) and self._slot.confirm(served.version):
            log.info("probation passed", version=served.version)

    def _compare(self, probation: Probation, answered: Answered, now: float) -> None:
        """Ask the predecessor the same, in its own process."""
        previous = self._slot.previous
        if previous is None:
            return
        began = time.perf_counter()
        try:
            outputs = previous.model(answered.inputs.images)
            took_s = time.perf_counter() - began
            before = answered.view.answers(outputs, answered.inputs)
        except Exception as error:  # it is the predecessor that failed: nothing to compare with
            if self._uncompared != probation.version:
                log.warning("not compared", version=probation.version, before=previous.version, error=error)
            self._uncompared = probation.version
            return
        probation.compared(Compared(answered.answers, before, answered.took_s, took_s), now)

    def _golden_vector(self, served: ServedModel, probation: Probation) -> tuple[Reason, str] | None:
        """Ask the process that serves; what it answered at its probe it must answer still."""
        probation.starved = False
        try:
            served.prove(served.model)
        except ModelLost as lost:
            return (Reason.HUNG if lost.hung else Reason.CRASHED), str(lost)
        except ArtefactRejected as wrong:
            return wrong.reason, wrong.detail
        except OSError:  # no process or no memory is to be had, which may be no model's doing
            probation.starved = True
        except Exception as error:  # runtimes share no exception class
            return Reason.FAILING, f"{type(error).__name__}: {error}"
        return None

    def _watch_memory(self, now: float) -> None:
        served = self._slot.active
        if served is None or not isinstance(served.model, WorkerModel) or not self._memory.due(now):
            return
        model = served.model
        growth_bytes = self._memory.excess(model.pid, model.memory_bytes, now)
        if growth_bytes is None:
            return
        try:
            model.recycle(served.prove)
        except Exception as error:  # of the fresh process: the grown one still serves
            log.warning("serving process not recycled", version=served.version, reason=error)
            return
        self.num_recycles += 1
        log.info("serving process recycled", version=served.version, grown_bytes=growth_bytes, pid=model.pid)


def serving_status(slot: ModelSlot, guard: Guard) -> dict[str, int | None]:
    """Return what operators see of the serving process; safe to call from another thread."""
    served, trial = slot.active, slot.on_probation
    model = None if served is None else served.model
    worker = model if isinstance(model, WorkerModel) else None
    return {
        "probation_version": None if trial is None else trial.version,
        "rollbacks": slot.num_rollbacks,
        "recycles": guard.num_recycles,
        "serving_pid": None if worker is None else worker.pid,
        "serving_memory_bytes": None if worker is None else worker.memory_bytes,
    }
