"""The client's end of one serving process. Axes: B images, C channels, H height, W width."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.serving.area import Area, memory_file
from replayfleet.edge_client.serving.fork_server import Start
from replayfleet.edge_client.serving.messages import (
    MAX_PACKET_BYTES,
    Answered,
    Failed,
    FromWorker,
    Load,
    Loaded,
    Refused,
    Run,
    ToWorker,
    from_worker,
    packet,
)
from replayfleet.edge_client.serving.proc import anonymous_bytes, is_starved
from replayfleet.edge_client.serving.slot import ModelLost
from replayfleet.federation.children import child_command, child_environment, end, ending
from replayfleet.federation.errors import UNREADABLE, ArtefactRejected, Reason

WORKER_COMMAND = child_command("replayfleet.edge_client.serving.worker")

NUM_LANES = 2
"""Callers at a time: frames, and beside them whoever measures, compares or checks."""
STARVED_FACTOR = 10
"""A process that wants to run and isn't let may take so many times longer before it counts as hung."""

_GOODBYE_S = 2.0

T = TypeVar("T", bound=FromWorker)


def anew(command: Sequence[str] = WORKER_COMMAND) -> Start:
    """Return what starts a process of its own with ``command``; its file descriptors follow as arguments."""

    def start(fds: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [*command, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=fds,
        )

    return start


class ServingProcess:
    """One process that serves one model. Thread-safe once it is loaded.

    Args:
        job: which model.
        start: starts the process.
        load_timeout_s: for starting, loading and warming up.

    Raises:
        ModelLost: It died or hung while it loaded.
        ArtefactRejected: It refuses the model.
        OSError: It can't be started, or finds no memory for the model.
    """

    def __init__(self, job: Load, start: Start | None = None, load_timeout_s: float = 120.0) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(NUM_LANES)]
        memories: list[int] = []
        try:
            memories.extend(memory_file() for _ in pairs)
            lanes = [fd for (_, their), memory in zip(pairs, memories, strict=True) for fd in (their.fileno(), memory)]
            self._process = (start or anew())([theirs.fileno(), *lanes])
        except OSError:
            _close([self._link, *(ours for ours, _ in pairs)], memories)
            raise
        finally:
            _close([theirs, *(their for _, their in pairs)], [])
        self.pid = self._process.pid
        self._sockets = [self._link, *(ours for ours, _ in pairs)]
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        try:
            loaded = self._load(job, load_timeout_s)
            self.runs_on, self.first_s = loaded.runs_on, loaded.first_s
            for (ours, _), memory in zip(pairs, memories, strict=True):
                self._lanes.put(_Lane(ours, Area(memory, job.image_shape, loaded.output_shape)))
        except BaseException:
            self.kill()
            raise
        finally:
            _close([], memories)

    @property
    def memory_bytes(self) -> int | None:
        """What it alone occupies now; None where that can't be told."""
        return anonymous_bytes(self.pid)

    def run(self, images: NDArray[np.float32], timeout_s: float) -> NDArray[np.float32]:
        """Return the outputs (B, ...) of images (B, C, H, W) float32; larger batches go in pieces.

        Args:
            images: B at least 1.
            timeout_s: for each piece.

        Raises:
            ModelLost: It died or hung; it is dead now.
            OSError: It finds no memory for them.
            ValueError: The images have another shape or type.
            RuntimeError: The model failed on these images.
        """
        lane = self._lanes.get()
        try:
            return lane.run(images, timeout_s, self.pid)
        except TimeoutError as late:
            self._process.kill()
            raise ModelLost(f"no answer within {timeout_s:.2g} s", hung=True) from late
        except OSError as gone:
            self._process.kill()
            raise ModelLost(ending(self._process, _GOODBYE_S)) from gone
        except MemoryError as none_left:
            raise OSError(errno.ENOMEM, str(none_left)) from none_left
        finally:
            self._lanes.put(lane)

    def close(self) -> None:
        """Let calls in progress end, then end the process. Idempotent."""
        deadline = time.monotonic() + _GOODBYE_S
        with contextlib.suppress(queue.Empty):
            for _ in range(NUM_LANES):
                self._lanes.get(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()
        for _ in range(NUM_LANES):
            self._lanes.put(_CLOSED)

    def kill(self) -> None:
        """End the process now. Idempotent."""
        end(self._process, 0.0)
        _close(self._sockets, [])

    def _load(self, job: Load, timeout_s: float) -> Loaded:
        try:
            answer = _ask(self._link, job, timeout_s, self.pid)
        except TimeoutError as late:
            raise ModelLost(f"it didn't load within {timeout_s:g} s", hung=True) from late
        except OSError as gone:
            raise ModelLost(f"{ending(self._process, _GOODBYE_S)} while it loaded") from gone
        if isinstance(answer, Refused):
            if answer.reason == Reason.BUSY.value:
                raise OSError(errno.ENOMEM, answer.detail)
            raise ArtefactRejected(Reason(answer.reason), answer.detail)
        if not isinstance(answer, Loaded):
            raise ModelLost(f"its process answered with {type(answer).__name__}")
        return answer


class _Lane:
    """One caller's way to the process."""

    def __init__(self, link: socket.socket, area: Area) -> None:
        self._link = link
        self._area = area

    def run(self, images: NDArray[np.float32], timeout_s: float, pid: int) -> NDArray[np.float32]:
        shape = self._area.images.shape[1:]
        if images.dtype != np.float32 or images.shape[1:] != shape or len(images) < 1:
            raise ValueError(f"images are {images.shape} {images.dtype}, expected (B, {shape}) float32 with B >= 1")
        capacity = self._area.capacity
        if len(images) <= capacity:
            return self._piece(images, timeout_s, pid)
        firsts = range(0, len(images), capacity)
        return np.concatenate([self._piece(images[first : first + capacity], timeout_s, pid) for first in firsts])

    def _piece(self, images: NDArray[np.float32], timeout_s: float, pid: int) -> NDArray[np.float32]:
        self._area.images[: len(images)] = images
        answer = _ask(self._link, Run(len(images)), timeout_s, pid)
        if isinstance(answer, Failed):
            raise (MemoryError if answer.no_memory else RuntimeError)(answer.detail)
        if not isinstance(answer, Answered):
            raise ConnectionError(f"its process answered with {type(answer).__name__}")
        outputs: NDArray[np.float32] = self._area.outputs[: len(images)].copy()
        return outputs


class _ClosedLane(_Lane):
    """Stands where a lane was, once its process was let go."""

    def __init__(self) -> None:
        pass

    def run(self, images: NDArray[np.float32], timeout_s: float, pid: int) -> NDArray[np.float32]:
        raise ConnectionError("its process was let go")


_CLOSED = _ClosedLane()


def _ask(link: socket.socket, question: ToWorker, timeout_s: float, pid: int) -> FromWorker:
    """Return the answer; OSError if there can't be one, TimeoutError (one of them) if it doesn't come in time."""
    link.send(packet(question))
    began = time.monotonic()
    while True:
        link.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            data = link.recv(MAX_PACKET_BYTES)
            break
        if time.monotonic() - began > STARVED_FACTOR * timeout_s or not is_starved(pid):
            link.settimeout(0.0)
            try:
                data = link.recv(MAX_PACKET_BYTES)  # it may have come while we looked
            except BlockingIOError:
                raise TimeoutError from None
            break
    if not data:
        raise ConnectionError("no more answers")
    try:
        return from_worker(data)
    except UNREADABLE as error:
        raise ConnectionError(f"unreadable answer: {error}") from error


def _close(sockets: Sequence[socket.socket], memories: Sequence[int]) -> None:
    for each in sockets:
        each.close()
    for memory in memories:
        os.close(memory)
