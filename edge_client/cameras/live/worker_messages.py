"""What a capture process and its parent say to each other; nothing is pickled.

To the process, on its standard input: one line with the camera, then one empty line for every picture that is wanted.
From the process, on its standard output: one line ``Ready``, then for every empty line one answer: ``Taken`` and
``height * width * 3`` bytes of RGB after it, or ``Lost``. A camera is opened when a picture is wanted, and after
``Lost`` when the next one is. So at most one picture is ever on its way, and it is the newest there was when it was
asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from replayfleet.edge_client.cameras.live.opencv import MAX_SIDE

MAX_LINE_BYTES = 4096
MAX_REASON = 300
"""Characters."""

WANTED = b"\n"

Side: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]


class CameraJob(msgspec.Struct, frozen=True):
    """Which camera to read; its settings may hold a password, so they stand on no command line.

    Attributes:
        kind: a key of ``LIVE_CAMERAS``.
        name: of the camera.
        settings: field -> value.
    """

    kind: str
    name: str
    settings: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The head of a picture; fields as in ``Picture``, ids counted from 0 by each process."""

    frame_id: Annotated[int, msgspec.Meta(ge=0)]
    captured_at: float
    width: Side
    height: Side


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The camera can't deliver.

    Attributes:
        reason: one line.
        num_captured: pictures that this process knows to have been captured so far, wanted or not.
    """

    reason: str
    num_captured: Annotated[int, msgspec.Meta(ge=0)]


FromWorker: TypeAlias = Ready | Taken | Lost

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_job_decoder = msgspec.json.Decoder(CameraJob)


def to_line(message: CameraJob | FromWorker) -> bytes:
    """Return one line, newline included."""
    return _encoder.encode(message) + b"\n"


def job_from_line(line: bytes) -> CameraJob:
    """Return what the parent wrote."""
    return _job_decoder.decode(line)


def message_from_line(line: bytes) -> FromWorker:
    """Return what the process wrote; msgspec.MsgspecError if it is none of it."""
    return _decoder.decode(line)


def one_line(text: str) -> str:
    """Return ``text`` as a reason."""
    return " ".join(text.split())[:MAX_REASON]
