"""A live camera in a process of its own: killed when it hangs, tried again when it is lost, never in anybody's way."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from replayfleet.edge_client.cameras.live.reconnect import News, Reconnect, Story, Watchdog
from replayfleet.edge_client.cameras.live.wire import WORKER_COMMAND, Alive, CameraJob, Lost, Ready, Said, WorkerProcess
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.service.logs import EventLogger, redact

log = EventLogger(__name__)

_LOOK_S = 0.1
"""Between looks at ``stop`` while nothing arrives."""


class LiveSettings(Protocol):
    """What settings of a camera offer that is read in a process of its own; a dataclass of values that JSON knows."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    scheme: ClassVar[str]
    class_names: ClassVar[tuple[str, ...]]
    process_per_loss: ClassVar[bool]

    @property
    def open_timeout_s(self) -> float: ...
    @property
    def read_timeout_s(self) -> float: ...
    @property
    def goodbye_s(self) -> float: ...

    def check(self) -> None:
        """Raise SettingsError if this machine can't read such a camera; says what to install."""

    def describe(self) -> str:
        """One line for logs, without passwords."""


@dataclass(frozen=True, slots=True)
class CameraCounts:
    """What became of a camera's pictures: captured = delivered + dropped, at any time.

    Attributes:
        num_captured: pictures up to the last one that was delivered, or to a loss.
        num_delivered: pictures that were yielded.
        num_dropped: pictures that a newer one replaced before anybody asked, or that couldn't be decoded.
        num_lost: times the camera was lost.
    """

    num_captured: int = 0
    num_delivered: int = 0
    num_dropped: int = 0
    num_lost: int = 0


class SupervisedCamera:
    """Implements ``Camera``.

    Args:
        settings: of the camera.
        name: within its client.
        command: runs the capture process.

    Raises:
        SettingsError: This machine can't read such a camera; says what to install.
    """

    live = True

    def __init__(
        self,
        settings: LiveSettings,
        name: str,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings.check()
        self.name = name
        self.class_names = settings.class_names
        self._settings = settings
        self._job = CameraJob(settings.scheme, name, dataclasses.asdict(settings), settings.goodbye_s)
        self._command = tuple(command)
        self._clock = clock
        self._reconnect = Reconnect(random.Random())  # noqa: S311 - jitter
        self._story = Story()
        self._num_captured = self._num_delivered = 0
        self._worker: WorkerProcess | None = None
        self._first_id = 0  # of the process, which counts from 0
        self._watchdog = Watchdog(settings.open_timeout_s, settings.read_timeout_s)

    @property
    def counts(self) -> CameraCounts:
        """The counts so far; safe to read from another thread."""
        delivered, captured = self._num_delivered, self._num_captured
        return CameraCounts(captured, delivered, captured - delivered, self._story.num_lost)

    @property
    def trouble(self) -> str:
        """Why it gives nothing, as far as is known; empty while it does. Safe to read from another thread."""
        return self._story.trouble

    @property
    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.pid

    def describe(self) -> str:
        return self._settings.describe()

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield the newest picture whenever one is asked for, until ``stop`` is set.

        What the camera takes in between is counted as dropped. A camera that can't deliver ends nothing: it is tried
        again until it can.
        """
        try:
            expect = self._watchdog.starting
            while not stop.is_set():
                try:
                    if self._worker is None:
                        self._worker, self._first_id = WorkerProcess(self._job, self._command), self._num_captured
                        expect = self._watchdog.starting
                    expect(self._clock())
                    answer = self._next(self._worker, stop)
                except (CameraError, OSError) as error:
                    self._end(kill=True)
                    answer = Lost(str(error), 0)
                if isinstance(answer, Picture):
                    expect = self._watchdog.reading
                    yield self._delivered(answer)
                elif answer is not None and not stop.is_set():
                    expect = self._watchdog.opening
                    self._lost(answer)
                    stop.wait(self._reconnect.failed())
        finally:
            self._end()

    def _next(self, worker: WorkerProcess, stop: threading.Event) -> Picture | Lost | None:
        """Return the newest picture, or why there is none; None once ``stop`` is set.

        Raises:
            CameraError: The process hung, died or lied.
        """
        worker.want()
        while not stop.is_set():
            answer = worker.receive(_LOOK_S)
            if isinstance(answer, Lost):
                return answer
            if isinstance(answer, Picture):
                if self._first_id + answer.frame_id < self._num_captured:
                    raise CameraError("its process sent a picture twice")
                return answer
            if isinstance(answer, Ready):
                self._watchdog.opening(self._clock())
            elif isinstance(answer, Alive):
                self._watchdog.reading(self._clock())
            elif isinstance(answer, Said):
                (log.warning if answer.is_warning else log.info)(answer.event, **{**answer.fields, "camera": self.name})
            reason = self._watchdog.overdue(self._clock())
            if reason is not None:
                raise CameraError(reason)
        return None

    def _delivered(self, picture: Picture) -> Picture:
        now = self._clock()
        frame_id = self._first_id + picture.frame_id
        self._num_captured, self._num_delivered = frame_id + 1, self._num_delivered + 1
        self._reconnect.delivered(now)
        self._tell(self._story.picture(picture.size, now))
        return dataclasses.replace(picture, frame_id=frame_id)

    def _lost(self, lost: Lost) -> None:
        self._num_captured = max(self._num_captured, self._first_id + lost.num_captured)
        self._tell(self._story.lost(redact(lost.reason), self._clock()))
        if self._settings.process_per_loss:
            self._end()

    def _tell(self, news: News | None) -> None:
        if news is not None:
            write = log.warning if news.event == "camera lost" else log.info
            write(news.event, camera=self.name, source=self.describe(), **news.fields)

    def _end(self, *, kill: bool = False) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.close(kill=kill)
