"""The capture process, which can be killed: it reads one camera, and keeps one picture at most, the newest.

It ends when its standard input does, so it never outlives its parent for long.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np

from replayfleet.edge_client.cameras.kinds import CAMERAS
from replayfleet.edge_client.cameras.live.opencv import Complaints
from replayfleet.edge_client.cameras.live.wire import (
    Alive,
    CameraJob,
    FromWorker,
    Lost,
    Ready,
    Said,
    Taken,
    one_line,
)
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.children import Parent
from replayfleet.federation.service.signals import stopped_by_signals

_MAX_COMPLAINTS = 65_536
_MAX_LINES = 100


class TakesPictures(Protocol):
    """What is read here of a camera."""

    def pictures(self, stop: threading.Event) -> Iterator[Picture]: ...


class Desk:
    """Where wanted pictures are handed over; holds the newest that nobody wanted yet, and a few lines for the log.

    Args:
        send: writes an answer; blocks until the parent has taken it. Never called by two threads at once.
    """

    def __init__(self, send: Callable[[FromWorker, Picture | None], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._newest: Picture | None = None
        self._lost: Lost | None = None
        self._num_captured = 0
        self._lines: collections.deque[Said] = collections.deque(maxlen=_MAX_LINES)

    def want(self) -> None:
        """Answer with the newest picture, now or as soon as there is one."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._answer()

    def offer(self, picture: Picture) -> None:
        """Hand a picture over, or keep it in place of the one before."""
        with self._changed:
            self._num_captured, self._newest = picture.frame_id + 1, picture
            self._answer()

    def lose(self, reason: str) -> None:
        """Say that the camera is lost, as the answer to what is wanted now or next."""
        with self._changed:
            self._newest, self._lost = None, Lost(one_line(reason), self._num_captured)
            self._answer()

    def alive(self) -> None:
        """Say that the camera works on, if somebody waits for a picture."""
        with self._changed:
            if self._wanted:
                self._send(Alive(), None)

    def say(self, line: Said) -> None:
        """Keep a line of the log until the next wish; the oldest make way."""
        self._lines.append(line)

    def wait_until_wanted(self) -> bool:
        """Block until a picture is wanted; False if none will be any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            return not self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _answer(self) -> None:
        if not self._wanted:
            return
        while self._lines:
            self._send(self._lines.popleft(), None)
        picture, lost = self._newest, self._lost
        if lost is not None:
            self._wanted, self._lost = False, None
            self._send(lost, None)
        elif picture is not None:
            self._wanted, self._newest = False, None
            self._send(_head(picture), picture)


def _head(picture: Picture) -> Taken:
    width, height = picture.size
    if picture.boxes is None:
        return Taken(picture.frame_id, picture.captured_at, width, height, picture.place)
    corners = [(left, top, right, bottom) for left, top, right, bottom in picture.boxes.corners.tolist()]
    class_ids = picture.boxes.class_ids.tolist()
    return Taken(picture.frame_id, picture.captured_at, width, height, picture.place, corners, class_ids)


class _Lines(logging.Handler):
    def __init__(self, desk: Desk) -> None:
        super().__init__(logging.INFO)
        self._desk = desk

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: str(value) for key, value in getattr(record, "fields", {}).items()}
        self._desk.say(Said(record.levelno >= logging.WARNING, record.getMessage(), fields))


def serve(open_camera: Callable[[], TakesPictures], desk: Desk, stop: threading.Event) -> None:
    """Read the camera whenever pictures are wanted; returns once the desk is closed."""
    camera: TakesPictures | None = None
    while desk.wait_until_wanted():
        reason = "its stream ended"
        try:
            camera = camera or open_camera()
            with contextlib.closing(camera.pictures(stop)) as pictures:  # type: ignore[type-var]
                for picture in pictures:
                    desk.offer(picture)
        except CameraError as error:
            reason = str(error)
        except BrokenPipeError:
            return  # the parent is gone
        except Exception as error:  # root of the process; OpenCV's own errors share no useful class
            reason = f"{type(error).__name__}: {error}"
        if stop.is_set():
            return
        desk.lose(reason)


def main() -> None:
    """Serve one camera until standard input ends."""
    parent = Parent(outlived=True)  # it puts a simulator's settings back first
    desk, stop = Desk(lambda message, picture: _say(parent, message, picture)), threading.Event()
    logging.basicConfig(handlers=[_Lines(desk)], level=logging.INFO, force=True)
    job = parent.hear(CameraJob)
    if job is None:
        return
    goodbye_s = job.goodbye_s
    with contextlib.suppress(ImportError):  # opening says so
        import cv2

        cv2.setNumThreads(1)

    def listen() -> None:
        with contextlib.suppress(BrokenPipeError):
            for _ in sys.stdin.buffer:
                desk.want()
        if_it_hangs = threading.Timer(goodbye_s, os._exit, args=(0,))
        if_it_hangs.daemon = True
        if_it_hangs.start()
        stop.set()
        desk.close()

    def open_camera() -> TakesPictures:
        kind = CAMERAS[job.scheme]
        settings = msgspec.convert(job.settings, kind.settings())
        camera: TakesPictures = kind.camera()(settings, job.name, native_complaints, desk.alive)
        return camera

    with contextlib.suppress(BrokenPipeError), stopped_by_signals(stop):
        parent.say(Ready())
        threading.Thread(target=listen, name="requests", daemon=True).start()
        serve(open_camera, desk, stop)
    os._exit(0)  # threads of drivers and simulators must not keep the process alive


def native_complaints() -> Complaints:
    """Take over standard error and return what reads it; what nobody reads is dropped beyond a pipe's size."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    os.dup2(writing, 2)
    os.close(writing)

    def read() -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(reading, _MAX_COMPLAINTS).decode(errors="replace")
        return ""

    return read


def _say(parent: Parent, message: FromWorker, picture: Picture | None) -> None:
    parent.say(message, b"" if picture is None else np.ascontiguousarray(picture.pixels).data.cast("B"))
