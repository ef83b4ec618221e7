"""What all cameras that OpenCV reads have in common: the loop that grabs, stamps, checks and converts.

Axes: H height, W width. OpenCV is imported inside functions only: on a Jetson it comes with the board.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Protocol, TypeAlias

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from replayfleet.edge_client.flow import CameraError, Picture
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.settings import check_settings
from replayfleet.federation.streams.files.picture_files import MAX_SIDE

Timeout: TypeAlias = Annotated[float, Meta(gt=0, le=60)]
"""Seconds."""

Complaints: TypeAlias = Callable[[], str]
"""What native libraries wrote to standard error since the last call."""

_DECODER_ERROR = re.compile(r"\[(?:mjpeg|h264|hevc|av1|libdav1d|mpeg4|mpeg2video|vp8|vp9)\w* @ \w+\] (?P<what>.+)")
UNCONVERTED = re.compile(r"\[swscaler @ \w+\] (?P<what>Cannot .+)")
"""What is said of a picture that was decoded and can't be made RGB: OpenCV from 4.13 on gives what its memory held."""

_LIBRARY_ERROR = re.compile(r"\[\w+ @ \w+\] (?P<what>.+)")


class Capture(Protocol):
    """The part of ``cv2.VideoCapture`` that is used."""

    def isOpened(self) -> bool: ...  # noqa: N802 - OpenCV's name

    def grab(self) -> bool: ...

    def retrieve(self) -> tuple[bool, Any]: ...

    def get(self, prop: int) -> float: ...

    def set(self, prop: int, value: float) -> bool: ...

    def release(self) -> None: ...


class CaptureLoop:
    """Reads one camera; frame ids go on rising when it is opened again.

    Args:
        name: of the camera, for its pictures.
        open_capture: returns a new capture, opened or not; asked whenever reading begins.
        read_timeout_s: so long may a decoder produce nothing but damaged pictures.
        complaints: FFMPEG's decoders fill what they can't decode with whatever an earlier picture left in memory, and
            say so on standard error only. A picture that came with such a complaint is thrown away.
        hidden: leaves out of a reason what must stand in no log.
    """

    def __init__(
        self,
        name: str,
        open_capture: Callable[[], Capture],
        read_timeout_s: float,
        complaints: Complaints = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        hidden: Callable[[str], str] = lambda reason: reason,
    ) -> None:
        self._name = name
        self._open_capture = open_capture
        self._read_timeout_s = read_timeout_s
        self._complaints = complaints
        self._clock = clock
        self._hidden = hidden
        self._next_id = 0

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set.

        Raises:
            CameraError: It can't be opened, a picture can't be read, or is larger than ``MAX_SIDE``.
        """
        self._complaints()
        capture = self._open_capture()
        try:
            if not capture.isOpened():
                raise CameraError(f"it can't be opened{because(self._complaints())}; `edge-client doctor` looks closer")
            self._complaints()
            yield from self._read(capture, stop)
        except CameraError as error:
            raise CameraError(self._hidden(str(error))) from None
        finally:
            capture.release()

    def _read(self, capture: Capture, stop: threading.Event) -> Iterator[Picture]:
        good_at, early = self._clock(), ""
        while not stop.is_set():
            before = self._clock()
            if not capture.grab():
                silent_s = self._clock() - before
                what = "its stream ended" if silent_s < self._read_timeout_s else f"it was silent for {silent_s:.1f} s"
                raise CameraError(what + because(early + self._complaints()))
            captured_at = self._clock()
            frame_id = self._next_id
            self._next_id += 1
            damage, early = _DECODER_ERROR.search(early + self._complaints()), ""
            if damage is None:
                pixels = _retrieved(capture)
                early = self._complaints()  # a decoder of several threads is ahead: it speaks of the next picture
                damage = UNCONVERTED.search(early)
            if damage is None:
                good_at = captured_at
                yield Picture(self._name, frame_id, pixels, captured_at)
            elif captured_at - good_at > self._read_timeout_s:
                raise CameraError(f"it sends damaged pictures only ({damage['what']})")


class OpenCvSettings:
    """What settings of all cameras have in common that OpenCV reads."""

    __slots__ = ()
    class_names: ClassVar[tuple[str, ...]] = ()
    process_per_loss: ClassVar[bool] = False
    goodbye_s: ClassVar[float] = 1.0
    read_timeout_s: float

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self) -> None:
        """Raise SettingsError if this machine's OpenCV can't read such a camera; says what to install."""
        require_opencv()

    def open(self) -> Capture:
        """Return a new capture, opened or not."""
        raise NotImplementedError

    def hidden(self, reason: str) -> str:
        """Return why it can't deliver, without credentials."""
        return reason


def capture_loop(
    settings: OpenCvSettings, name: str, take_stderr: Callable[[], Complaints], alive: Callable[[], None]
) -> CaptureLoop:
    """Return what takes such a camera's pictures, in the capture process."""
    return CaptureLoop(name, settings.open, settings.read_timeout_s, take_stderr(), hidden=settings.hidden)


def open_with(source: str | int, backend: str, parameters: dict[str, float] | None = None) -> Capture:
    """Return ``cv2.VideoCapture`` of ``source``.

    Args:
        source: file, address, pipeline or index.
        backend: OpenCV's constant without ``CAP_``.
        parameters: constant without ``CAP_PROP_`` -> value, applied while opening; those unknown to an older OpenCV are
            left out.
    """
    cv2 = _cv2()
    known = {name: value for name, value in (parameters or {}).items() if hasattr(cv2, f"CAP_PROP_{name}")}
    flat = [int(number) for name, value in known.items() for number in (getattr(cv2, f"CAP_PROP_{name}"), value)]
    capture: Capture = cv2.VideoCapture(source, getattr(cv2, f"CAP_{backend}"), flat)
    return capture


def has_backend(backend: str) -> bool:
    """Whether this OpenCV was built with it; ``getBackends()`` lists some that it lacks."""
    cv2 = _cv2()
    return bool(cv2.videoio_registry.hasBackend(getattr(cv2, f"CAP_{backend}")))


def require_opencv() -> None:
    """Raise SettingsError unless OpenCV is installed."""
    if importlib.util.find_spec("cv2") is None:
        raise SettingsError(
            "cameras are read with OpenCV, which isn't installed; install opencv-python-headless, "
            "or on a Jetson JetPack's own (apt install python3-opencv)"
        )


def require_gstreamer(what: str) -> None:
    """Raise SettingsError unless OpenCV is installed and can run GStreamer pipelines."""
    require_opencv()
    if not has_backend("GSTREAMER"):
        raise SettingsError(
            f"{what} needs an OpenCV with GStreamer, which this one ({_cv2().__version__}) lacks, as all from PyPI do; "
            "on a Jetson uninstall opencv-python and opencv-python-headless and use JetPack's own: "
            "apt install python3-opencv, and a virtual environment made with --system-site-packages"
        )


def _retrieved(capture: Capture) -> NDArray[np.uint8]:
    cv2 = _cv2()
    width, height = capture.get(cv2.CAP_PROP_FRAME_WIDTH), capture.get(cv2.CAP_PROP_FRAME_HEIGHT)
    if not (width <= MAX_SIDE and height <= MAX_SIDE):
        raise CameraError(f"its pictures are {width:g}x{height:g}, expected at most {MAX_SIDE}x{MAX_SIDE}")
    good, bgr = capture.retrieve()
    if not good or bgr is None:
        raise CameraError("it gave a picture that can't be decoded")
    if bgr.ndim != 3 or bgr.shape[2] != 3 or bgr.dtype != np.uint8 or max(bgr.shape) > MAX_SIDE:
        raise CameraError(f"it gave {bgr.dtype} {bgr.shape}, expected (H, W, 3) uint8 in colour, at most {MAX_SIDE}")
    rgb: NDArray[np.uint8] = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
    return rgb


def because(complaints: str) -> str:
    """Return the last reason among them in brackets; nothing if there is none."""
    found = _LIBRARY_ERROR.findall(complaints)
    return f" ({found[-1].strip()})" if found else ""


def _cv2() -> Any:
    import cv2

    return cv2
