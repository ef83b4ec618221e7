"""What a capture process and its parent say to each other, and the parent's end of it; nothing is pickled.

To the process, on its standard input: one line with the camera, then one empty line for every picture that is wanted.
From the process, on its standard output, lines of JSON: ``Ready`` once, then for every wish one answer: ``Taken`` and
``height * width * 3`` bytes of RGB after it, or ``Lost``. While a wish is open, ``Alive`` and ``Said`` may come before.
A camera is opened when a picture is wanted, and after ``Lost`` when the next one is. So at most one picture is ever on
its way, and it is the newest there was when it was asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes, CameraError, Picture
from replayfleet.federation.children import child_command, child_environment, end, ending

MAX_SIDE = 8192
"""Pixels. A picture that claims to be wider or higher is garbage, and no memory is asked for it."""

MAX_LINE_BYTES = 1 << 20
MAX_REASON = 300
"""Characters."""

WORKER_COMMAND = child_command("replayfleet.edge_client.cameras.live.worker")

_WANTED = b"\n"
_PIPE_BYTES = 1 << 20
_LAST_WORDS_S = 0.5
"""Beyond what the process itself takes to let go of its camera."""

Side: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]


class CameraJob(msgspec.Struct, frozen=True):
    """Which camera to read; its settings may hold a password, so they stand on no command line.

    Attributes:
        scheme: a key of ``CAMERAS``.
        name: of the camera.
        settings: field -> value.
        goodbye_s: that the process may take to let go of the camera.
    """

    scheme: str
    name: str
    settings: dict[str, Any]
    goodbye_s: float = 1.0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The camera works on, although no picture is due."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A line for the parent's log."""

    is_warning: bool
    event: str
    fields: dict[str, str]


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The head of a picture; fields as in ``Picture`` and ``Boxes``, ids counted from 0 by each process."""

    frame_id: Annotated[int, msgspec.Meta(ge=0)]
    captured_at: float
    width: Side
    height: Side
    place: str = ""
    corners: list[tuple[float, float, float, float]] | None = None
    class_ids: list[int] = []


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The camera can't deliver.

    Attributes:
        reason: one line.
        num_captured: pictures that this process knows to have been captured so far, wanted or not.
    """

    reason: str
    num_captured: Annotated[int, msgspec.Meta(ge=0)]


FromWorker: TypeAlias = Ready | Alive | Said | Taken | Lost
Answer: TypeAlias = Ready | Alive | Said | Lost | Picture

_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


def to_line(message: CameraJob | FromWorker) -> bytes:
    """Return one line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def one_line(text: str) -> str:
    """Return ``text`` as a reason."""
    return " ".join(text.split())[:MAX_REASON]


class WorkerProcess:
    """One capture process. Whatever it sends is checked before memory is asked for.

    Args:
        job: which camera.
        command: what to run.

    Raises:
        OSError: It can't be started.
    """

    def __init__(self, job: CameraJob, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._name = job.name
        self._goodbye_s = job.goodbye_s + _LAST_WORDS_S
        self._fd = self._output.fileno()
        os.set_blocking(self._fd, False)
        with contextlib.suppress(OSError):  # a user's quota of large pipes is used up: smaller ones do
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._line = bytearray()
        self._head: Taken | None = None
        self._pixels: NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)
        self._rest = memoryview(b"")
        self._write(to_line(job))

    @property
    def pid(self) -> int:
        return self._process.pid

    def want(self) -> None:
        """Ask for a picture; one answer follows."""
        self._write(_WANTED)

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next message; None if it isn't complete within ``timeout_s``.

        Raises:
            CameraError: The process ended, or sent what it never should.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._picture() if self._head is not None else self._message()
            if answer is not None:
                return answer
            if not self._readable.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                return None
            if self._head is not None:
                num_bytes = os.readv(self._fd, [self._rest])  # into the picture itself: it may be large
                self._rest = self._rest[num_bytes:]
            else:
                piece = os.read(self._fd, MAX_LINE_BYTES)
                self._line += piece
                num_bytes = len(piece)
            if num_bytes == 0:
                raise CameraError(ending(self._process, self._goodbye_s))

    def close(self, *, kill: bool = False) -> None:
        """End the process and wait for it; unless ``kill``, it may let go of its camera first. Idempotent."""
        for stream in (self._input, self._output):
            with contextlib.suppress(OSError):
                stream.close()
        end(self._process, 0.0 if kill else self._goodbye_s)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # reading says what became of it
            self._input.write(data)
            self._input.flush()

    def _message(self) -> Answer | None:
        line, newline, rest = self._line.partition(b"\n")
        if not newline:
            if len(line) >= MAX_LINE_BYTES:
                raise CameraError("its process sent a line without an end")
            return None
        try:
            message = _decoder.decode(bytes(line))
        except msgspec.MsgspecError as error:
            raise CameraError(f"its process sent an unreadable line ({one_line(str(error))})") from error
        if not isinstance(message, Taken):
            self._line = rest
            return message
        self._line = bytearray()
        self._head = message
        self._pixels = np.empty((message.height, message.width, 3), np.uint8)
        self._rest = self._pixels.data.cast("B")
        if len(rest) > len(self._rest):
            raise CameraError("its process sent more than one picture")
        self._rest[: len(rest)] = rest
        self._rest = self._rest[len(rest) :]
        return self._picture()

    def _picture(self) -> Picture | None:
        head = self._head
        if self._rest or head is None:
            return None
        self._head = None
        if not head.captured_at <= time.monotonic():
            raise CameraError("its process sent a picture from the future")
        boxes = None
        if head.corners is not None:
            corners = np.array(head.corners, np.float32).reshape(-1, 4)
            try:
                boxes = Boxes(corners, np.array(head.class_ids, np.int64))
            except ValueError as error:
                raise CameraError(f"its process sent boxes that are none ({error})") from error
        pixels, self._pixels = self._pixels, np.empty((0, 0, 3), np.uint8)
        return Picture(self._name, head.frame_id, pixels, head.captured_at, boxes, head.place)
