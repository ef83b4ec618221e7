"""A live camera in a process of its own: killed when it hangs, tried again when it is lost, never in anybody's way."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from replayfleet.edge_client.cameras.live.kinds import LIVE_CAMERAS, LiveSettings, kind_of
from replayfleet.edge_client.cameras.live.reconnect import News, Reconnect, Story, Watchdog
from replayfleet.edge_client.cameras.live.worker_messages import CameraJob, Lost, Ready
from replayfleet.edge_client.cameras.live.worker_process import WORKER_COMMAND, WorkerProcess
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.service.logs import EventLogger, redact

log = EventLogger(__name__)

_LOOK_S = 0.1
"""Between looks at ``stop`` while nothing arrives."""


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
    """Implements ``Camera`` for those of ``LIVE_CAMERAS``.

    Args:
        settings: of the camera.
        name: within its client.
        command: runs the capture process.
        clock: ``time.monotonic``.

    Raises:
        SettingsError: This machine's OpenCV can't read such a camera; says what to install.
    """

    live = True
    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        settings: LiveSettings,
        name: str,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        kind = kind_of(settings)
        camera = LIVE_CAMERAS[kind][1](settings, name)
        camera.check()
        self.name = name
        self._description = camera.describe()
        self._job = CameraJob(kind, name, dataclasses.asdict(settings))
        self._command = tuple(command)
        self._clock = clock
        self._timeouts = settings.open_timeout_s, settings.read_timeout_s
        self._reconnect = Reconnect(random.Random())  # noqa: S311 - jitter
        self._story = Story()
        self._before = self._num_captured = self._num_delivered = 0
        self.pid: int | None = None
        """Of the capture process; None while there is none."""

    @property
    def counts(self) -> CameraCounts:
        """The counts so far; safe to read from another thread."""
        delivered, captured = self._num_delivered, self._num_captured
        return CameraCounts(captured, delivered, captured - delivered, self._story.num_lost)

    @property
    def delivers(self) -> bool:
        """Whether the camera is there, as far as is known; safe to read from another thread."""
        return self._story.delivers

    def describe(self) -> str:
        """One line for logs, without passwords."""
        return self._description

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield the newest picture whenever one is asked for, until ``stop`` is set.

        What the camera takes in between is counted as dropped. A camera that can't deliver ends nothing: it is tried
        again until it can.
        """
        try:
            yield from self._supervise(stop)
        finally:
            self.pid = None

    def _supervise(self, stop: threading.Event) -> Iterator[Picture]:
        self._before = self._num_captured
        with _Link(self._job, self._command, Watchdog(*self._timeouts), self._clock) as link:
            while not stop.is_set():
                try:
                    answer = link.next(stop)
                except CameraError as error:
                    answer = Lost(str(error), 0)
                self.pid = link.pid
                if isinstance(answer, Picture):
                    yield self._delivered(answer)
                elif answer is not None:
                    self._lost(answer)
                    stop.wait(self._reconnect.failed())
                if link.pid is None:
                    self._before = self._num_captured  # the next process counts from 0 again

    def _delivered(self, picture: Picture) -> Picture:
        now = self._clock()
        frame_id = self._before + picture.frame_id
        self._num_captured, self._num_delivered = frame_id + 1, self._num_delivered + 1
        self._reconnect.delivered(now)
        self._tell(self._story.picture(picture.size, now))
        return dataclasses.replace(picture, frame_id=frame_id)

    def _lost(self, lost: Lost) -> None:
        self._num_captured = max(self._num_captured, self._before + lost.num_captured)
        self._tell(self._story.lost(redact(lost.reason), self._clock()))

    def _tell(self, news: News | None) -> None:
        if news is not None:
            write = log.warning if news.event == "camera lost" else log.info
            write(news.event, camera=self.name, source=self._description, **news.fields)


class _Link:
    """The capture process, started when there is none; a context manager that leaves none behind."""

    def __init__(self, job: CameraJob, command: Sequence[str], watchdog: Watchdog, clock: Callable[[], float]) -> None:
        self._job = job
        self._command = command
        self._watchdog = watchdog
        self._clock = clock
        self._worker: WorkerProcess | None = None
        self._await = watchdog.starting
        self._newest_id = -1

    def __enter__(self) -> _Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kill=False)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._worker is None else self._worker.pid

    def next(self, stop: threading.Event) -> Picture | Lost | None:
        """Return the newest picture, or why there is none; None once ``stop`` is set.

        Raises:
            CameraError: The process hung, died or lied, and is gone.
        """
        try:
            worker = self._worker or self._start()
            self._await(self._clock())
            worker.want()
            while not stop.is_set():
                answer = worker.receive(_LOOK_S)
                if isinstance(answer, Ready):
                    self._watchdog.opening(self._clock())
                elif answer is not None:
                    return self._heard(answer)
                reason = self._watchdog.overdue(self._clock())
                if reason is not None:
                    raise CameraError(reason)
        except (CameraError, OSError) as error:
            self._end(kill=True)
            raise CameraError(str(error)) from error
        return None

    def _start(self) -> WorkerProcess:
        self._await = self._watchdog.starting
        self._newest_id = -1
        self._worker = WorkerProcess(self._job, self._command)
        return self._worker

    def _heard(self, answer: Picture | Lost) -> Picture | Lost:
        """Check an answer, and note what the watchdog is to wait for next."""
        if isinstance(answer, Lost):
            self._await = self._watchdog.opening
            return answer
        if answer.frame_id <= self._newest_id:
            raise CameraError("its process sent a picture twice")
        self._newest_id = answer.frame_id
        self._await = self._watchdog.reading
        return answer

    def _end(self, *, kill: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.close(kill=kill)
