"""What the process that talks to CARLA and its parent say to each other; nothing is pickled.

To the process, on its standard input: one line with the job; the end of the input asks it to stop. From the process,
on its standard output: lines of JSON, each ``Shot`` followed by ``height * width * 3`` bytes of RGB.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Boxes, Picture

MAX_LINE_BYTES = 1 << 20
MAX_SIDE = 8192


class Job(msgspec.Struct, frozen=True):
    """Which drive.

    Attributes:
        name: of the camera.
        settings: of ``CarlaSettings``.
    """

    name: str
    settings: dict[str, Any]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The simulation moved on by a frame."""


class Shot(msgspec.Struct, frozen=True, tag="shot"):
    """A picture without its pixels; see ``Picture``."""

    frame_id: int
    captured_at: float
    width: int
    height: int
    place: str
    corners: list[tuple[float, float, float, float]]
    class_ids: list[int]


class Line(msgspec.Struct, frozen=True, tag="log"):
    """A line for the parent's log."""

    level: str
    event: str
    fields: dict[str, str]


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The last message: why the drive ended, unless it was asked to."""

    reason: str


Message: TypeAlias = Beat | Shot | Line | Lost

_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Beat | Shot | Line | Lost)


def to_line(message: Job | Message) -> bytes:
    """Return one line."""
    return msgspec.json.encode(message) + b"\n"


def from_line(line: bytes) -> Message:
    """Return what a line says.

    Raises:
        msgspec.MsgspecError: It isn't a message.
    """
    return _DECODER.decode(line)


def shot_of(picture: Picture) -> Shot:
    """Return what goes before a picture's pixels."""
    boxes = picture.boxes if picture.boxes is not None else Boxes.none()
    width, height = picture.size
    return Shot(
        picture.frame_id,
        picture.captured_at,
        width,
        height,
        picture.place,
        [(float(a), float(b), float(c), float(d)) for a, b, c, d in boxes.corners],
        boxes.class_ids.tolist(),
    )


def picture_of(shot: Shot, pixels: bytes, camera: str, first_id: int) -> Picture:
    """Return the picture of a shot, numbered from ``first_id``.

    Raises:
        ValueError: Boxes and classes, or sizes and pixels, don't fit.
    """
    corners: NDArray[np.float32] = np.array(shot.corners, dtype=np.float32).reshape(-1, 4)
    boxes = Boxes(corners, np.array(shot.class_ids, dtype=np.int64))
    image = np.frombuffer(pixels, dtype=np.uint8).reshape(shot.height, shot.width, 3)
    return Picture(camera, first_id + shot.frame_id, image, shot.captured_at, boxes, shot.place)
