"""The capture process. It can be killed.

It ends when its standard input does, so it never outlives its parent, and keeps one picture at most: the newest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from replayfleet.edge_client.cameras.live.kinds import build_camera
from replayfleet.edge_client.cameras.live.opencv import Complaints
from replayfleet.edge_client.cameras.live.worker_messages import (
    FromWorker,
    Lost,
    Ready,
    Taken,
    job_from_line,
    one_line,
    to_line,
)
from replayfleet.edge_client.flow import Camera, CameraError, Picture
from replayfleet.federation.children import private_stdout

_LAST_WORDS_S = 1.0
"""To let go of the camera in, after the parent closed the input."""

_MAX_COMPLAINTS = 65_536


class Desk:
    """Where wanted pictures are handed over; holds the newest that nobody wanted yet, and nothing else.

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

    def want(self) -> None:
        """Answer with the newest picture, now or as soon as there is one."""
        with self._changed:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                self._send(lost, None)
            elif self._newest is not None:
                picture, self._newest = self._newest, None
                self._hand_over(picture)
            else:
                self._wanted = True
                self._changed.notify_all()

    def offer(self, picture: Picture) -> None:
        """Hand a picture over, or keep it in place of the one before."""
        with self._changed:
            self._num_captured = picture.frame_id + 1
            if self._wanted:
                self._wanted = False
                self._hand_over(picture)
            else:
                self._newest = picture

    def lose(self, reason: str) -> None:
        """Say that the camera is lost, as the answer to what is wanted now or next."""
        with self._changed:
            self._newest = None
            lost = Lost(one_line(reason), self._num_captured)
            if self._wanted:
                self._wanted = False
                self._send(lost, None)
            else:
                self._lost = lost

    def wait_until_wanted(self) -> bool:
        """Block until a picture is wanted; False if none will be any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            return not self._closed

    def close(self) -> None:
        """Nothing is wanted any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _hand_over(self, picture: Picture) -> None:
        width, height = picture.size
        self._send(Taken(picture.frame_id, picture.captured_at, width, height), picture)


def serve(open_camera: Callable[[], Camera], desk: Desk, stop: threading.Event) -> None:
    """Read the camera whenever pictures are wanted; returns once the desk is closed."""
    camera: Camera | None = None
    while desk.wait_until_wanted():
        reason = "its stream ended"
        try:
            camera = camera or open_camera()
            for picture in camera.pictures(stop):
                desk.offer(picture)
        except CameraError as error:
            reason = str(error)
        except BrokenPipeError:
            return  # the parent is gone
        except Exception as error:  # root of the process; OpenCV's own errors share no useful class
            reason = f"{type(error).__name__}: {error}"
        desk.lose(reason)


def main() -> None:
    """Serve one camera until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle
    answers, complaints = private_stdout(), native_complaints()
    desk, stop = Desk(lambda message, picture: _say(answers, message, picture)), threading.Event()
    requests = sys.stdin.buffer
    job = job_from_line(requests.readline())
    _use_one_thread()
    threading.Thread(target=_listen, args=(requests, desk, stop), name="requests", daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        _say(answers, Ready(), None)
        serve(lambda: build_camera(job.kind, job.name, job.settings, complaints), desk, stop)


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


def _listen(requests: BinaryIO, desk: Desk, stop: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        for _ in requests:
            desk.want()
    if_it_hangs = threading.Timer(_LAST_WORDS_S, os._exit, args=(0,))
    if_it_hangs.daemon = True
    if_it_hangs.start()
    stop.set()
    desk.close()


def _use_one_thread() -> None:
    with contextlib.suppress(ImportError):  # opening says so
        import cv2

        cv2.setNumThreads(1)


def _say(answers: BinaryIO, message: FromWorker, picture: Picture | None) -> None:
    _write(answers, memoryview(to_line(message)))
    if picture is not None:
        _write(answers, np.ascontiguousarray(picture.pixels).data.cast("B"))


def _write(answers: BinaryIO, rest: memoryview) -> None:
    while rest:
        rest = rest[answers.write(rest) :]
