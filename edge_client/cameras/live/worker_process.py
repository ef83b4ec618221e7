"""The parent's end of a capture process. Axes: H height, W width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.live.worker_messages import (
    MAX_LINE_BYTES,
    WANTED,
    CameraJob,
    Lost,
    Ready,
    Taken,
    message_from_line,
    one_line,
    to_line,
)
from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.children import child_command, child_environment, end, ending

WORKER_COMMAND = child_command("replayfleet.edge_client.cameras.live.worker")

Answer: TypeAlias = Ready | Lost | Picture

_PIPE_BYTES = 1 << 20
_GOODBYE_S = 1.5


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
            stderr=subprocess.DEVNULL,
            env=child_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._name = job.name
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
        """Of the process."""
        return self._process.pid

    def want(self) -> None:
        """Ask for a picture; one answer follows."""
        self._write(WANTED)

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next answer; None if it isn't complete within ``timeout_s``.

        Raises:
            CameraError: The process ended, or sent what it never should.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if not self._readable.poll(max(0.0, 1000 * left_s)):
                return None
            answer = self._read_pixels() if self._head is not None else self._read_line()
            if answer is not None:
                return answer

    def close(self, *, kill: bool = False) -> None:
        """End the process and wait for it; unless ``kill``, it may let go of its camera first. Idempotent."""
        for stream in (self._input, self._output):
            with contextlib.suppress(OSError):
                stream.close()
        end(self._process, 0.0 if kill else _GOODBYE_S)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # reading says what became of it
            self._input.write(data)
            self._input.flush()

    def _read_line(self) -> Answer | None:
        piece = os.read(self._fd, MAX_LINE_BYTES)
        if not piece:
            raise CameraError(ending(self._process, _GOODBYE_S))
        self._line += piece
        line, newline, rest = self._line.partition(b"\n")
        if not newline:
            if len(line) >= MAX_LINE_BYTES:
                raise CameraError("its process sent a line without an end")
            return None
        try:
            message = message_from_line(bytes(line))
        except msgspec.MsgspecError as error:
            raise CameraError(f"its process sent an unreadable line ({one_line(str(error))})") from error
        if not isinstance(message, Taken):
            self._line = rest
            return message
        self._line = bytearray()
        self._expect(message, rest)
        return self._complete()

    def _expect(self, head: Taken, begun: bytearray) -> None:
        self._head = head
        self._pixels = np.empty((head.height, head.width, 3), np.uint8)
        self._rest = self._pixels.data.cast("B")
        if len(begun) > len(self._rest):
            raise CameraError("its process sent more than one picture")
        self._rest[: len(begun)] = begun
        self._rest = self._rest[len(begun) :]

    def _read_pixels(self) -> Picture | None:
        num_bytes = os.readv(self._fd, [self._rest])
        if num_bytes == 0:
            raise CameraError(ending(self._process, _GOODBYE_S))
        self._rest = self._rest[num_bytes:]
        return self._complete()

    def _complete(self) -> Picture | None:
        if self._rest or self._head is None:
            return None
        head, self._head = self._head, None
        if not head.captured_at <= time.monotonic():
            raise CameraError("its process sent a picture from the future")
        pixels, self._pixels = self._pixels, np.empty((0, 0, 3), np.uint8)
        return Picture(self._name, head.frame_id, pixels, head.captured_at)
