"""PNG and JPEG files at their own size. Needs OpenCV, imported on first use."""

from __future__ import annotations

import re
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError

SUFFIXES = (".png", ".jpg", ".jpeg")
MAX_PICTURE_BYTES = 32 * 2**20
_TAIL_BYTES = 1024
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""First two bytes of JPEG and PNG -> what stands near the end of a complete file; decoders pass over its absence."""

_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of segments that hold the picture's size."""

_MAX_SEGMENTS = 1000
"""Before the one with the size."""


def read_picture(path: Path) -> NDArray[np.uint8]:
    """Return a file's picture as (H, W, 3) uint8, RGB.

    Raises:
        SettingsError: It can't be read, is larger than ``MAX_PICTURE_BYTES``, or is no complete PNG or JPEG.
    """
    cv2 = require_opencv()
    try:
        with path.open("rb") as file:
            encoded = file.read(MAX_PICTURE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"picture {path} can't be read: {error.strerror or error}") from error
    if len(encoded) > MAX_PICTURE_BYTES:
        raise SettingsError(f"picture {path} is larger than {MAX_PICTURE_BYTES} bytes, the most that is read")
    end = _ENDS.get(encoded[:2])
    pixels = None
    if end is not None and end in encoded[-_TAIL_BYTES:]:
        try:
            pixels = cv2.imdecode(np.frombuffer(encoded, dtype=np.uint8), cv2.IMREAD_COLOR)
        except cv2.error:  # more pixels than OpenCV takes, for example
            pixels = None
    if pixels is None:
        raise SettingsError(f"picture {path} is damaged: {len(encoded)} bytes that are no complete PNG or JPEG")
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def picture_size(path: Path) -> tuple[int, int]:
    """Return a file's (width, height) in pixels from its head alone, without decoding it.

    Raises:
        SettingsError: It can't be read, or is no PNG or JPEG.
    """
    try:
        with path.open("rb") as file:
            size = _size_in_head(file)
    except OSError as error:
        raise SettingsError(f"picture {path} can't be read: {error.strerror or error}") from error
    if size is None:
        raise SettingsError(f"picture {path} is damaged: its head is not that of a PNG or JPEG")
    return size


def list_pictures(folder: Path) -> list[Path]:
    """Return a folder's pictures in the order of their names, numbers in names by value; hidden files stay out.

    Raises:
        SettingsError: The folder can't be listed.
    """
    try:
        files = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
    except OSError as error:
        raise SettingsError(f"folder {folder} can't be listed: {error.strerror or error}") from error
    return sorted(files, key=_by_value)


def require_opencv() -> Any:
    """Return the module ``cv2``.

    Raises:
        SettingsError: It isn't installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise SettingsError(
            "recordings and the synthetic street need OpenCV; install it: pip install opencv-python-headless"
        ) from error
    return cv2


def _size_in_head(file: BinaryIO) -> tuple[int, int] | None:
    """Return (width, height), or None if neither PNG nor JPEG begins here."""
    head = file.read(24)
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) == 24:
        return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    if head[:2] != b"\xff\xd8":
        return None
    file.seek(2)
    for _ in range(_MAX_SEGMENTS):
        segment = file.read(9)
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        if segment[1] in _FRAME_HEADERS:
            return int.from_bytes(segment[7:9], "big"), int.from_bytes(segment[5:7], "big")
        filler = segment[1] == 0xFF
        file.seek((1 if filler else 2 + int.from_bytes(segment[2:4], "big")) - len(segment), SEEK_CUR)
    return None


def _by_value(path: Path) -> tuple[list[tuple[int, str]], str]:
    words = re.split(r"(\d+)", path.name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], path.name
