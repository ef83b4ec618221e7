"""A camera in the network: ``rtsp://host/path``, through FFMPEG or, on a Jetson, its hardware decoder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from replayfleet.edge_client.cameras.live.csi import NEWEST, TO_BGR
from replayfleet.edge_client.cameras.live.opencv import (
    Capture,
    OpenCvSettings,
    Timeout,
    open_with,
    require_gstreamer,
    require_opencv,
)
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import redact

_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_SECRET = re.compile(r"(?i)(pass\w*?=|pwd=|token=)[^/?]*")


@dataclass(frozen=True, slots=True)
class RtspCameraSettings(OpenCvSettings):
    """Which stream, and how it is read.

    Attributes:
        url: ``rtsp://`` or ``rtsps://``, with user and password where the camera asks for them; it is never logged.
        transport: ``tcp``, or ``udp``, which loses packets where a network is busy.
        decoder: ``ffmpeg``, or ``nvv4l2``: a Jetson's hardware, through GStreamer.
        codec: ``h264`` or ``h265``; ``nvv4l2`` must know, ``ffmpeg`` sees for itself.
        latency_ms: the jitter buffer of ``nvv4l2``.
        threads: of ``ffmpeg``'s decoder; every thread more than one adds a frame of delay.
        open_timeout_s: so long it may take to connect and give its first picture, which begins with a key frame.
        read_timeout_s: so long it may be silent.
    """

    scheme: ClassVar[str] = "rtsp"

    url: str = field(repr=False)
    transport: Literal["tcp", "udp"] = "tcp"
    decoder: Literal["ffmpeg", "nvv4l2"] = "ffmpeg"
    codec: Literal["h264", "h265"] = "h264"
    latency_ms: Annotated[int, Meta(ge=0, le=10_000)] = 200
    threads: Annotated[int, Meta(ge=1, le=64)] = 1
    open_timeout_s: Timeout = 3.0
    read_timeout_s: Timeout = 2.0

    def __post_init__(self) -> None:
        if not _is_stream(self.url):
            raise SettingsError(
                "source: that is no RTSP address; expected rtsp://host/path without spaces or quotes, "
                "and in user and password %40 for @, %2F for /, %3F for ?, %23 for #"
            )
        OpenCvSettings.__post_init__(self)

    def check(self) -> None:
        if self.decoder == "nvv4l2":
            require_gstreamer(f"{self.describe()} with decoder=nvv4l2")
        else:
            require_opencv()

    def describe(self) -> str:
        return described(self.url)

    def hidden(self, reason: str) -> str:
        return redact(reason.replace(self.url, self.describe()))

    def open(self) -> Capture:
        """Connect.

        Through FFMPEG it sets an environment variable of this process meanwhile, unless the operator did: OpenCV has
        no other way to ask for TCP. So only one camera at a time may open in a process.
        """
        if self.decoder == "nvv4l2":
            self.check()
            return open_with(nvv4l2_pipeline(self), "GSTREAMER")
        parameters = {
            "OPEN_TIMEOUT_MSEC": 1000 * self.open_timeout_s,
            "READ_TIMEOUT_MSEC": 1000 * self.read_timeout_s,
            "N_THREADS": self.threads,
        }
        with _ffmpeg_options(self):
            return open_with(self.url, "FFMPEG", parameters)


def described(url: str) -> str:
    """Return a stream's address as it may stand in a log: without user, password, query, and secrets in its path."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2] + parts.path
    return _SECRET.sub(r"\1***", f"{parts.scheme}://{place}") + ("?***" if parts.query else "")


def nvv4l2_pipeline(settings: RtspCameraSettings) -> str:
    """Return the GStreamer pipeline that OpenCV is given."""
    source = f'rtspsrc location="{settings.url}" latency={settings.latency_ms} protocols={settings.transport}'
    decode = f"rtp{settings.codec}depay ! {settings.codec}parse ! nvv4l2decoder"
    return f"{source} ! {decode} ! {TO_BGR.format(flip='')} ! {NEWEST}"


@contextlib.contextmanager
def _ffmpeg_options(settings: RtspCameraSettings) -> Iterator[None]:
    if _OPTIONS in os.environ:
        yield
        return
    # Without fpsprobesize FFMPEG watches a stream for most of a second, and the pictures of that time come late.
    os.environ[_OPTIONS] = f"rtsp_transport;{settings.transport}|fpsprobesize;1"
    try:
        yield
    finally:
        del os.environ[_OPTIONS]


def _is_stream(url: str) -> bool:
    if re.search(r"[\s\"'\\\x00-\x1f]", url):
        return False
    try:
        parts = urlsplit(url)
        stray = "@" in parts.path + parts.query + parts.fragment  # of a password that isn't quoted
        return parts.scheme in ("rtsp", "rtsps") and bool(parts.hostname) and parts.port != 0 and not stray
    except ValueError:
        return False
