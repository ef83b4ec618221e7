"""PNG and JPEG files at their own size. Needs OpenCV, imported on first use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import SettingsError

SUFFIXES = (".png", ".jpg", ".jpeg")
MAX_PICTURE_BYTES = 32 * 2**20
_TAIL_BYTES = 1024
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""First two bytes of JPEG and PNG -> what stands near the end of a complete file; decoders pass over its absence."""


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


def _by_value(path: Path) -> tuple[list[tuple[int, str]], str]:
    words = re.split(r"(\d+)", path.name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], path.name
