"""Pictures to predictions, the whole time: while the client trains, and while a model is swapped.

A thread per camera keeps that camera's newest picture (of a recording: the next one), and one thread answers them in
turn. Nothing queues, what was skipped is counted, and a camera that is lost stops nobody else.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from replayfleet.edge_client.flow import Camera, CameraError, Picture, Shown
from replayfleet.edge_client.frames.answerer import Answerer, FrameCounts
from replayfleet.federation.backoff import Backoff
from replayfleet.federation.errors import is_out_of_memory, told
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.turns import CountedStop

log = EventLogger(__name__)

_RETRY_MAX_S = 2.0
"""Longest pause before a lost camera is tried again."""

_SLACK_S = 1.0
"""Clocks of two threads may be read in any order; a clock of another kind is years away."""

MAX_PLACE = 255
"""Characters of a place's name: a report, which no message could hold, would end the client."""

_HANGS_S = 30.0
"""A camera that gives no picture looks at its stop signal meanwhile, unless its own code or a driver hangs."""


class _Lane:
    """One camera's place in the loop."""

    def __init__(self, camera: Camera) -> None:
        self.camera = camera
        self.waiting: Picture | None = None
        self.error = ""
        self.ended = False
        self.stop = CountedStop()
        self.given = 0
        self._newest_id, self._shift = -1, 0
        self._seen = (0, 0), math.inf

    def begins_anew(self) -> None:
        """Its next picture may have any ``frame_id``: a camera that comes back may count from 0."""
        self._shift = -1

    def numbered(self, picture: Picture) -> Picture:
        """Return a picture whose ``frame_id`` no earlier one of this camera has.

        Raises:
            ValueError: It doesn't rise.
        """
        if self._shift < 0:
            self._shift = max(0, self._newest_id + 1 - picture.frame_id)
        number = picture.frame_id + self._shift
        if not self._newest_id < number < 2**63:
            raise ValueError(
                f"frame_id is {picture.frame_id} after {self._newest_id - self._shift}, expected to rise, below 2**63"
            )
        self._newest_id = number
        return dataclasses.replace(picture, frame_id=number) if self._shift else picture

    def problem(self, now: float) -> str:
        """Why it gives nothing; empty if it does, or has nothing to give."""
        if self.error:
            return self.error
        if trouble := str(getattr(self.camera, "trouble", "")):
            return trouble
        did, since = (self.given, self.stop.turns), self._seen[1]
        if did != self._seen[0] or since > now or self.ended:
            self._seen = did, now
            return ""
        return "" if now - since < _HANGS_S else f"hangs for {now - since:.0f} s: it neither gives a picture nor ends"


class InferenceLoop:
    """The threads around an ``Answerer``.

    Args:
        cameras: whose pictures are served; their names differ.
        answerer: what answers them.
        on_shown: called on the serving thread with every picture and its prediction; must be quick.
        clock: seconds, rising.
    """

    def __init__(
        self,
        cameras: Sequence[Camera],
        answerer: Answerer,
        on_shown: Callable[[Shown], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._answerer = answerer
        self._on_shown = on_shown
        self._stop = CountedStop()
        self._changed = threading.Condition()
        self._lanes = tuple(_Lane(camera) for camera in cameras)
        self._turn = collections.deque(self._lanes)
        self._serving_error = ""
        self._watcher_fails = False
        self._capturing = [
            threading.Thread(target=self._capture, args=(lane,), name=f"capture-{lane.camera.name}", daemon=True)
            for lane in self._lanes
        ]
        self._serving = threading.Thread(target=self._serve, name="inference", daemon=True)

    def start(self) -> None:
        for thread in (*self._capturing, self._serving):
            thread.start()

    def stop(self) -> None:
        for signal in (self._stop, *(lane.stop for lane in self._lanes)):
            signal.set()
        with self._changed:
            self._changed.notify_all()
        for thread in (*self._capturing, self._serving):
            if thread.is_alive():
                thread.join(timeout=5)

    @property
    def counts(self) -> FrameCounts:
        return self._answerer.counts

    @property
    def error(self) -> str:
        """What is wrong now, for the health endpoint; empty while everything delivers or is back."""
        now = self._clock()
        found = {(name := lane.camera.name): lane.problem(now) or self._answerer.problem(name) for lane in self._lanes}
        problems = [f"{name}: {why}" for name, why in found.items() if why]
        return "; ".join([*problems, *([self._serving_error] if self._serving_error else [])])

    @property
    def ended(self) -> bool:
        """Whether every camera is a recording that was delivered and answered to its end."""
        with self._changed:
            return all(lane.ended and lane.waiting is None for lane in self._lanes)

    @property
    def turns(self) -> Mapping[str, int]:
        """What every thread has done so far, for a watchdog; a recording that ended has nothing left to do."""
        capturing = {f"capture {lane.camera.name}": lane.stop.turns for lane in self._lanes if not lane.ended}
        return {**capturing, "inference": self._stop.turns}

    def _capture(self, lane: _Lane) -> None:
        backoff = Backoff(0.25, _RETRY_MAX_S)
        while not lane.stop.is_set():
            try:
                lane.begins_anew()
                for given in lane.camera.pictures(lane.stop):
                    _check(lane.camera, given)
                    picture = lane.numbered(given)
                    lane.given += 1
                    if lane.error:
                        log.info("camera is back", camera=lane.camera.name)
                        lane.error = ""
                        backoff.reset()
                    self._put(lane, picture)
                if lane.camera.live and not lane.stop.is_set():
                    raise CameraError("its pictures ended, and those of a live camera go on")
                break
            except BaseException as error:  # root of a thread, exits too
                if not isinstance(error, CameraError) and not is_out_of_memory(error):
                    lane.error = told(error)  # this camera is done, the others go on
                    log.exception("camera failed", camera=lane.camera.name, next="it is tried again at the next start")
                    return
                if not lane.error:
                    log.warning("camera lost", camera=lane.camera.name, reason=error, next="trying again")
                lane.error = str(error) or type(error).__name__
                lane.stop.wait(backoff.next_s())
        if not lane.stop.is_set():
            log.info("recording ended", camera=lane.camera.name)
        lane.ended = True

    def _put(self, lane: _Lane, picture: Picture) -> None:
        with self._changed:
            while not lane.camera.live and lane.waiting is not None and not lane.stop.is_set():
                self._changed.wait(timeout=1.0)
            if not lane.camera.live and lane.waiting is not None:
                return  # stopped; the one that waits may still be answered
            lane.waiting = picture  # of a live camera the newest wins
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                picture = self._take()
                shown = None if picture is None else self._answerer.answer(picture)
                if shown is not None:
                    self._tell(shown)
        except Exception as error:  # root of a thread
            self._serving_error = f"{type(error).__name__}: {error}"
            log.exception("serving stopped")

    def _tell(self, shown: Shown) -> None:
        """Whoever watches may fail; serving goes on."""
        try:
            self._on_shown(shown)
            self._watcher_fails = False
        except Exception:
            if not self._watcher_fails:
                log.exception("picture not handed on", camera=shown.picture.camera, frame=shown.picture.frame_id)
            self._watcher_fails = True

    def _take(self) -> Picture | None:
        with self._changed:
            if not any(lane.waiting is not None for lane in self._lanes):
                self._changed.wait(timeout=1.0)
            lane = next((lane for lane in self._turn if lane.waiting is not None), None)
            if lane is None:
                return None
            self._turn.remove(lane)
            self._turn.append(lane)
            picture, lane.waiting = lane.waiting, None
            self._changed.notify_all()
            return picture


def _check(camera: Camera, picture: Picture) -> None:
    """Raise unless a camera gave a picture of its own, of this machine's past: what it isn't would end all serving."""
    given: object = picture
    if not isinstance(given, Picture):
        raise TypeError(f"it gave {given!r:.80}, expected a Picture")
    if type(picture.frame_id) is not int or not isinstance(picture.place, str):
        kind = type(picture.frame_id).__name__  # NumPy 1 writes its numbers as Python's
        raise TypeError(
            f"frame_id is {picture.frame_id!r:.80} ({kind}) and place {picture.place!r:.80}, expected int and str"
        )
    if len(picture.place) > MAX_PLACE:
        raise ValueError(f"place has {len(picture.place)} characters, expected at most {MAX_PLACE}")
    picture.place.encode()  # raises for what no message can hold, of a file's name that isn't UTF-8 say
    if picture.camera != camera.name:
        raise ValueError(f"its picture is of camera {picture.camera!r:.80}, not of {camera.name!r}")
    if not 0 <= picture.captured_at <= time.monotonic() + _SLACK_S:
        raise ValueError(f"captured_at is {picture.captured_at}, expected seconds of time.monotonic()")
