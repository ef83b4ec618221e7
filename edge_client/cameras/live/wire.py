"""What a capture process and its parent say to each other, and the parent's end of it; nothing is pickled.

To the process, on its standard input: one line with the camera, then ``null`` for every picture that is wanted.
From the process, on its standard output, lines of JSON: ``Ready`` once, then for every wish one answer: ``Taken`` and
``height * width * 3`` bytes of RGB after it, or ``Lost``. While a wish is open, ``Alive`` and ``Said`` may come before.
A camera is opened when a picture is wanted, and after ``Lost`` when the next one is. So at most one picture is ever on
its way, and it is the newest there was when it was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from replayfleet.edge_client.flow import Boxes, CameraError, Picture
from replayfleet.federation.children import Child, ChildLost, child_command
from replayfleet.federation.streams.files.picture_files import MAX_SIDE

MAX_REASON = 300
"""Characters."""

WORKER_COMMAND = child_command("replayfleet.edge_client.cameras.live.worker")

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
    class_ids: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]] = []


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
        self._child: Child[FromWorker] = Child(
            command,
            FromWorker,
            num_bytes=_num_bytes,
            pipe_bytes=_PIPE_BYTES,
            environment={"OMP_NUM_THREADS": "1"},  # arithmetic on boxes needs no second thread
        )
        self.pid = self._child.pid
        self._name = job.name
        self._goodbye_s = job.goodbye_s + _LAST_WORDS_S
        self._child.send(job)

    def want(self) -> None:
        """Ask for a picture; one answer follows."""
        self._child.send(None)

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next message; None if it isn't complete within ``timeout_s``.

        Raises:
            CameraError: The process ended, or sent what it never should.
        """
        try:
            heard = self._child.receive(timeout_s, self._goodbye_s)
        except ChildLost as lost:
            raise CameraError(str(lost)) from lost
        if heard is None:
            return None
        said, pixels = heard
        return self._picture(said, pixels) if isinstance(said, Taken) else said

    def close(self, *, kill: bool = False) -> None:
        """End the process and wait for it; unless ``kill``, it may let go of its camera first. Idempotent."""
        self._child.close(0.0 if kill else self._goodbye_s)

    def _picture(self, head: Taken, pixels: bytearray) -> Picture:
        if not head.captured_at <= time.monotonic():
            raise CameraError("its process sent a picture from the future")
        boxes = None
        if head.corners is not None:
            corners = np.array(head.corners, np.float32).reshape(-1, 4)
            try:
                boxes = Boxes(corners, np.array(head.class_ids, np.int64))
            except ValueError as error:
                raise CameraError(f"its process sent boxes that are none ({error})") from error
        image = np.frombuffer(pixels, np.uint8).reshape(head.height, head.width, 3)
        return Picture(self._name, head.frame_id, image, head.captured_at, boxes, head.place)


def _num_bytes(said: FromWorker) -> int:
    return 3 * said.width * said.height if isinstance(said, Taken) else 0
