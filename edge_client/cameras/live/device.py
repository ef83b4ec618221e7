"""A camera at this machine: ``camera://0`` or ``camera:///dev/video0``, read through V4L2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from replayfleet.edge_client.cameras.live.opencv import (
    Capture,
    OpenCvSettings,
    Timeout,
    has_backend,
    open_with,
)
from replayfleet.edge_client.flow import MAX_FRAME_RATE_HZ
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.files.picture_files import MAX_SIDE


@dataclass(frozen=True, slots=True)
class DeviceCameraSettings(OpenCvSettings):
    """Which device, and what it is asked for; it may answer with the nearest that it can do.

    Attributes:
        place: a number, or a path below ``/dev``; ``/dev/v4l/by-id/...`` survives replugging.
        width: pixels; 0 leaves it to the camera, as with all others.
        height: pixels.
        rate: pictures per second.
        pixel_format: four characters, for example ``MJPG``, without which many USB cameras are slow at large sizes.
        open_timeout_s: so long it may take to open and give its first picture.
        read_timeout_s: so long it may be silent.
    """

    scheme: ClassVar[str] = "camera"

    place: str = "0"
    width: Annotated[int, Meta(ge=0, le=MAX_SIDE)] = 0
    height: Annotated[int, Meta(ge=0, le=MAX_SIDE)] = 0
    rate: Annotated[float, Meta(ge=0, le=MAX_FRAME_RATE_HZ)] = 0.0
    pixel_format: str = ""
    open_timeout_s: Timeout = 2.5
    read_timeout_s: Timeout = 2.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d{1,3}|/dev/\S+", self.place):
            raise SettingsError(
                f"source: {self.place!r} is no camera; expected a number (camera://0) or a device (camera:///dev/video0)"
            )
        if len(self.pixel_format) not in (0, 4) or not self.pixel_format.isascii():
            raise SettingsError(f"source: pixel_format is {self.pixel_format!r}, expected four characters, as in MJPG")
        OpenCvSettings.__post_init__(self)

    def describe(self) -> str:
        return f"camera://{self.place}"

    def open(self) -> Capture:
        import cv2

        place = int(self.place) if self.place.isdigit() else self.place
        capture = open_with(place, "V4L2" if has_backend("V4L2") else "ANY")
        properties = (
            (cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*self.pixel_format) if self.pixel_format else 0),
            (cv2.CAP_PROP_FRAME_WIDTH, self.width),
            (cv2.CAP_PROP_FRAME_HEIGHT, self.height),
            (cv2.CAP_PROP_FPS, self.rate),
            (cv2.CAP_PROP_BUFFERSIZE, 1),
        )
        for key, value in properties:
            if value and capture.isOpened():
                capture.set(key, value)
        return capture
