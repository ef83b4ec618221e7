"""A model that a process of its own runs: started when it is asked, started again when it died, replaced on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.serving.fork_server import IS_POSSIBLE, ForkServer, Start
from replayfleet.edge_client.serving.messages import Load, Provider, comparable
from replayfleet.edge_client.serving.process import ServingProcess, anew
from replayfleet.edge_client.serving.slot import Model, ModelLost
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.transport.blob_store import FileLook

log = EventLogger(__name__)

PATIENCE_S = 0.7
"""A model that is silent for longer hangs; a slow one gets ``_PACES`` times its own time."""

CPU: tuple[Provider, ...] = ("CPUExecutionProvider",)

_PACES = 10
_GROUP = 8
"""Images for which that time is granted once."""


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """How serving processes are run.

    Attributes:
        command: runs one; None forks those on the CPU from a process that has imported what they need.
        load_timeout_s: for starting, loading and warming up.
        patience_s: how long a model may be silent.
    """

    command: tuple[str, ...] | None = None
    load_timeout_s: float = 120.0
    patience_s: float = PATIENCE_S


class WorkerModel:
    """Implements ``model_slot.Model`` and ``model_slot.Held``; nothing runs before the first call. Thread-safe.

    Args:
        job: which model.
        rules: how it is run.
        clock: ``time.monotonic``.
        forks: where processes on the CPU are forked; None starts all anew.
    """

    def __init__(
        self,
        job: Load,
        rules: WorkerRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        forks: ForkServer | None = None,
    ) -> None:
        self.job = job
        self._forks = forks
        self._rules = rules or WorkerRules()
        self._clock = clock
        self._changing = threading.Lock()
        self._starting = threading.Lock()
        self._process: ServingProcess | None = None
        self._closed = False
        self._pace_s = 0.0
        self._backoff = Backoff(0.25, 5.0)
        self._not_before = float("-inf")
        self._refusal = ""  # why none was started last, or none that lived until it had loaded
        self.num_deaths = 0

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    @property
    def memory_bytes(self) -> int | None:
        process = self._process
        return None if process is None else process.memory_bytes

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the outputs (B, ...) of images (B, C, H, W).

        Raises:
            ModelLost: The process died or hung; the next call starts another, after a while if it keeps dying.
            OSError: The machine starts none, with no memory left, say, or it died as it loaded; a later call tries
                again, after a while. Or the process finds no memory for the images.
            ArtefactRejected: A new process refuses the model.
            RuntimeError: The model failed on these images.
        """
        while True:
            process = self._running()
            groups = -(-len(images) // _GROUP)
            began = self._clock()
            try:
                outputs = process.run(images, groups * max(self._rules.patience_s, _PACES * self._pace_s))
            except ModelLost as error:
                if self._lost(process, error):
                    raise
                continue  # it was let go for another one while we waited
            took_s = (self._clock() - began) / groups
            self._pace_s = min(self._pace_s, took_s)
            self._backoff.reset()
            return outputs

    def recycle(self, prove: Callable[[Model], object]) -> None:
        """Let a fresh process take over between two calls; whatever ``prove`` or loading raises leaves the old one."""
        fresh = self._start()
        try:
            prove(lambda images: fresh.run(images, self._rules.load_timeout_s))
        except BaseException:
            fresh.kill()
            raise
        with self._changing:
            old, self._process = (fresh, self._process) if self._closed else (self._process, fresh)
        if old is not None:
            old.close()

    def rest(self) -> None:
        """End the process after the calls in progress; the next call starts another."""
        with self._changing:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process after the calls in progress, for good. Idempotent."""
        with self._changing:
            self._closed = True
        self.rest()

    def elsewhere(self, providers: tuple[Provider, ...]) -> WorkerModel:
        """Return the same model on other execution providers, for ``ModelSlot.upgrade``."""
        return WorkerModel(
            msgspec.structs.replace(self.job, providers=providers), self._rules, self._clock, self._forks
        )

    def _running(self) -> ServingProcess:
        process = self._process
        if process is not None:
            return process
        with self._starting:
            with self._changing:
                if self._closed:
                    raise ModelLost("its process was let go")
                if self._process is not None:
                    return self._process
                if self._clock() < self._not_before:
                    if self._refusal:
                        raise OSError(self._refusal)
                    raise ModelLost(f"its process died {self._backoff.attempts} times")
            try:
                fresh = self._start()  # without the lock: who lets the model go waits for nobody's loading
            except (OSError, ModelLost) as error:  # each try may cost a second of a core: not every frame makes one
                self._refusal, self._not_before = str(error), self._clock() + self._backoff.next_s()
                raise
            self._refusal = ""
            self._adopt(fresh)
        return fresh

    def _adopt(self, fresh: ServingProcess) -> None:
        with self._changing:
            if not self._closed:
                self._process, self._pace_s = fresh, fresh.first_s
                return
        fresh.kill()
        raise ModelLost("its process was let go")

    def _start(self) -> ServingProcess:
        start: Start = anew() if self._rules.command is None else anew(self._rules.command)
        if self._forks is not None and self.job.providers == CPU:
            start = self._forks.start
        job, self.job = self.job, msgspec.structs.replace(self.job, verified={})  # the disk may spoil it later
        return ServingProcess(job, start, self._rules.load_timeout_s)

    def _lost(self, process: ServingProcess, error: ModelLost) -> bool:
        """Note a death; False if ``process`` had been replaced."""
        with self._changing:
            if self._process is not process:
                return self._closed
            self._process = None
            self.num_deaths += 1
            delay_s = self._backoff.next_s()
            self._not_before = self._clock() + (delay_s if self._backoff.attempts > 1 else 0.0)
        process.kill()
        log.warning("serving process lost", pid=process.pid, reason=error)
        return True


class Workers:
    """Makes the models of one client.

    Args:
        blobs: root of its blob store.
        num_threads: of one inference.
        providers: execution providers; the first was proved.
        rules: how serving processes are run.
        verified: of the client's ``DiskBlobStore``; without, a model's first process reads and hashes its blobs again.
    """

    def __init__(
        self,
        blobs: Path,
        *,
        num_threads: int,
        providers: tuple[Provider, ...],
        rules: WorkerRules | None = None,
        verified: Callable[[Iterable[str]], dict[str, FileLook]] = lambda _: {},
    ) -> None:
        self._blobs = str(blobs)
        self._verified = verified
        self._num_threads = num_threads
        self._providers = providers
        self._rules = rules or WorkerRules()
        self._forks = ForkServer() if IS_POSSIBLE and self._rules.command is None else None

    def model(
        self, graph: str, parameters: str, image_shape: tuple[int, ...], facts: Mapping[str, str] | None = None
    ) -> WorkerModel:
        """Return the model of two blobs, by their digests; nothing runs yet. ``facts``: what the graph must say."""
        agreed = {key: comparable(fact) for key, fact in (facts or {}).items()}
        job = Load(
            self._blobs,
            graph,
            parameters,
            image_shape,
            self._num_threads,
            self._providers,
            agreed,
            self._verified((graph, parameters)),
        )
        return WorkerModel(job, self._rules, forks=self._forks)
