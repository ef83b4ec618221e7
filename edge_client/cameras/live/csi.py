"""A camera at a Jetson's ribbon connector: ``csi://0``, through NVIDIA's Argus and GStreamer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from replayfleet.edge_client.cameras.live.opencv import (
    Capture,
    OpenCvSettings,
    Timeout,
    open_with,
    require_gstreamer,
)
from replayfleet.federation.streams.files.picture_files import MAX_SIDE

TO_BGR = "nvvidconv{flip} ! video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR"
"""From the video memory to what OpenCV takes."""

NEWEST = "appsink drop=true max-buffers=1 sync=false"
"""What isn't fetched in time makes room for the next."""


@dataclass(frozen=True, slots=True)
class CsiCameraSettings(OpenCvSettings):
    """Which sensor, in which of its modes.

    Attributes:
        sensor: index of the sensor.
        width: pixels; 1 to ``MAX_SIDE``, must be one of the sensor's modes or smaller.
        height: pixels.
        rate: pictures per second.
        flip: nvvidconv's ``flip-method``, 0 to 7; 2 turns by 180 degrees.
        open_timeout_s: so long it may take to open and give its first picture.
        read_timeout_s: so long it may be silent.
    """

    scheme: ClassVar[str] = "csi"

    sensor: Annotated[int, Meta(ge=0, le=15)] = 0
    width: Annotated[int, Meta(ge=1, le=MAX_SIDE)] = 1280
    height: Annotated[int, Meta(ge=1, le=MAX_SIDE)] = 720
    rate: Annotated[int, Meta(ge=1, le=1000)] = 30
    flip: Annotated[int, Meta(ge=0, le=7)] = 0
    open_timeout_s: Timeout = 4.0
    read_timeout_s: Timeout = 2.0

    def check(self) -> None:
        require_gstreamer(self.describe())

    def describe(self) -> str:
        return f"csi://{self.sensor}"

    def open(self) -> Capture:
        self.check()
        return open_with(csi_pipeline(self), "GSTREAMER")


def csi_pipeline(settings: CsiCameraSettings) -> str:
    """Return the GStreamer pipeline that OpenCV is given."""
    mode = f"width={settings.width},height={settings.height},framerate={settings.rate}/1,format=NV12"
    convert = TO_BGR.format(flip=f" flip-method={settings.flip}")
    return f"nvarguscamerasrc sensor-id={settings.sensor} ! video/x-raw(memory:NVMM),{mode} ! {convert} ! {NEWEST}"
