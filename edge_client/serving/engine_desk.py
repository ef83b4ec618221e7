"""Engines for the served model: taken from the cache, or built in the background while another runtime answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from replayfleet.edge_client.serving.messages import Load
from replayfleet.edge_client.serving.model import WorkerModel
from replayfleet.edge_client.serving.slot import ModelSlot, ServedModel
from replayfleet.export.engines.build import EngineBuild
from replayfleet.export.engines.cache import EngineCache
from replayfleet.export.engines.maker import EngineFailed, EngineMaker, artefact_digest
from replayfleet.export.engines.tensorrt import TENSORRT_MAKER, TensorRt
from replayfleet.export.running.filling import filled
from replayfleet.export.running.provider_options import BatchProfile
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.wire.protocol.tensors import decode_arrays
from replayfleet.federation.wire.transport.blob_store import DiskBlobStore

log = EventLogger(__name__)

ENGINES = "engines"
"""The cache's folder in a client's data dir."""

GIVE_UP_AFTER = 3
"""Engines in a row that couldn't be built or used: the fourth would cost as much, and end no better."""


class EngineDesk:
    """Gets the served model an engine, one at a time, on a thread of its own; serving waits for nothing here.

    Args:
        slot: what is served.
        cache: engines on disk; owned from now on, and cleaned at once.
        maker: the kind of engine.
        new_build: makes a build that hasn't begun.
        profile: batch sizes.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        slot: ModelSlot,
        cache: EngineCache,
        maker: EngineMaker,
        new_build: Callable[[], EngineBuild],
        *,
        profile: BatchProfile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slot, self._cache, self._maker, self._new_build = slot, cache, maker, new_build
        self._profile = profile or BatchProfile()
        self._clock = clock
        self._changed = threading.Condition()
        self._wanted: ServedModel | None = None
        self._stopping = False
        self._build: EngineBuild | None = None
        self._building: tuple[float, int, int] | None = None  # since when, at which part, of how many
        self._failures = 0
        self._said: set[str] = set()
        self._outcome = ""
        self._thread = threading.Thread(target=self._work, name="engines", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """One line for operators, such as ``building engine 3/11, 42 s``; empty while there is nothing to say."""
        building = self._building
        if building is None:
            return self._outcome
        began, part, of = building
        return f"building engine {part}/{of}, {self._clock() - began:.0f} s"

    def want(self, served: ServedModel) -> None:
        """Get this model an engine, now that it serves; a build for an older one is stopped. From any thread."""
        with self._changed:
            self._wanted = served
            if self._build is not None:
                self._build.stop("a newer model came")
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop building, for good. Idempotent."""
        with self._changed:
            self._stopping = True
            if self._build is not None:
                self._build.stop("the client stops")
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        try:
            for line in self._cache.clean():
                log.info("engine deleted", engine=line)
        except OSError as error:  # of a read-only disk: what is there may serve all the same
            log.warning("engines not cleaned up", reason=error)
        while (served := self._next()) is not None:
            if self._failures >= GIVE_UP_AFTER:
                continue
            self._outcome = ""
            try:
                self._serve(served)
                self._failures = 0
            except Exception as error:  # root of a thread: whatever it was, another runtime serves
                self._failed(served, error)
            finally:
                self._building = None

    def _next(self) -> ServedModel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._wanted is not None)
            served, self._wanted = self._wanted, None
            self._build = None if self._stopping else self._new_build()
            return None if self._stopping else served

    def _serve(self, served: ServedModel) -> None:
        model = served.model
        if not isinstance(model, WorkerModel):
            return
        graph, shape = _blobs(model.job)[0], tuple(model.job.image_shape)
        engine = self._engine(model.job)
        faster = model.elsewhere(self._maker.providers(graph, shape, engine, self._profile))
        serves = False
        try:
            serves = self._slot.upgrade(served.version, faster)
        finally:
            if not serves:
                faster.close()
        if serves:
            self._outcome = "engine serves"
            log.info("engine serves", version=served.version)

    def _engine(self, job: Load) -> Path:
        """Return the folder of a model's engine; builds it if need be, which takes minutes."""
        artefact = artefact_digest(job.graph, job.parameters)
        found = self._cache.find(artefact, self._profile)
        if found is not None:
            return found
        graph, parameters = _blobs(job)
        began = self._clock()
        self._building = began, 1, 1
        log.info("building engine", next="serving without it meanwhile")

        def progress(part: int, of: int) -> None:
            self._building = began, part, of

        assert self._build is not None
        with self._cache.workplace() as place:
            self._build.run(filled(graph, decode_arrays(parameters)), place, self._profile, progress)
            engine = self._cache.store(place, artefact, self._profile)
        log.info("engine built", build_s=round(self._clock() - began, 1), bytes=self._cache.size_bytes)
        return engine

    def _failed(self, served: ServedModel, error: Exception) -> None:
        """Say it once; a build that was stopped has failed nobody."""
        with self._changed:
            if self._stopping or self._wanted is not None:
                return
        why = str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
        self._failures += 1
        self._outcome = f"no engine: {why}"
        if self._failures == GIVE_UP_AFTER:
            log.warning("no more engines are built", reason=why, next="serving without until the next start")
        elif why not in self._said:
            log.warning("no engine", version=served.version, reason=why, next="serving without")
        self._said.add(why)


def open_desk(
    data_dir: Path, slot: ModelSlot, *, maker: EngineMaker | None = None, maker_path: str = TENSORRT_MAKER
) -> EngineDesk | None:
    """Return a client's desk, or None where its device can't have engines; says why, once.

    Args:
        data_dir: engines go into its folder ``engines``.
        slot: what is served.
        maker: the kind of engine; None takes TensorRT's.
        maker_path: the same, as the building process finds it.
    """
    made: EngineMaker = TensorRt() if maker is None else maker
    try:
        platform = made.platform()
    except EngineFailed as error:
        log.warning("no engines", reason=error, next="serving without")
        return None
    cache = EngineCache(data_dir / ENGINES, platform)
    return EngineDesk(slot, cache, made, lambda: EngineBuild(maker_path))


def no_engines(data_dir: Path, slot: ModelSlot) -> None:
    """Stand where ``open_desk`` would, on devices that serve without engines."""


def _blobs(job: Load) -> tuple[bytes, bytes]:
    blobs = DiskBlobStore(Path(job.blobs))
    return blobs.read(job.graph), blobs.read(job.parameters)
