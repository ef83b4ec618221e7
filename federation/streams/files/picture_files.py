"""PNG and JPEG files: pictures at their own size, and images of a set, decoded when somebody asks for their pixels.

Axes: N images, H height, W width, C channels. Needs OpenCV, imported on first use.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from os import SEEK_CUR, SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError, is_out_of_memory
from replayfleet.federation.paths import open_regular, read_regular
from replayfleet.federation.streams.labelled_images import LazyImages
from replayfleet.federation.streams.resizing import resized

SUFFIXES = (".png", ".jpg", ".jpeg")
MAX_PICTURE_BYTES = 32 * 2**20
MAX_SIDE = 8192
"""Pixels. A picture that claims to be wider or higher is garbage, and no memory is asked for it."""

_TAIL_BYTES = 1024
"""Where the end is looked for first; telephones write a film behind some pictures."""

_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""First two bytes of JPEG and PNG -> what stands near the end of a complete file; decoders pass over its absence."""

_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of segments that hold the picture's size."""

_MAX_SEGMENTS = 1000
"""Before the one with the size."""


def read_picture(path: Path) -> NDArray[np.uint8]:
    """Return a file's picture as (H, W, 3) uint8, RGB.

    Raises:
        SettingsError: It can't be read, is larger than ``MAX_PICTURE_BYTES`` or ``MAX_SIDE``, or is no complete PNG or
            JPEG.
    """
    try:
        with open_regular(path) as file:
            encoded = file.read(MAX_PICTURE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"picture {path} can't be read: {error.strerror or error}") from error
    if len(encoded) > MAX_PICTURE_BYTES:
        raise SettingsError(f"picture {path} is larger than {MAX_PICTURE_BYTES} bytes, the most that is read")
    try:
        return pixels_of(encoded)
    except ValueError as error:
        raise SettingsError(f"picture {path} is {error}") from error


def decode(encoded: bytes, name: str, size: int, channels: int, *, crop: bool = False) -> NDArray[np.uint8]:
    """Return the image as (size, size, channels) uint8, RGB or grey, as ``resized`` makes it on devices.

    An oblong image is squeezed; with ``crop`` only the square in its middle is taken.

    Raises:
        SettingsError: The bytes are no complete image or a huge one, or OpenCV isn't installed.
    """
    try:
        pixels = pixels_of(encoded, grey=channels == 1)
    except ValueError as error:
        raise SettingsError(f"image {name} is {error}; fetch it again, or take it out of the set") from error
    height, width = pixels.shape[:2]
    if crop:
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        pixels = pixels[top : top + side, left : left + side]
    return resized(pixels, size).reshape(size, size, channels)


def pixels_of(encoded: bytes, *, grey: bool = False) -> NDArray[np.uint8]:
    """Return (H, W, 3) uint8, RGB, or with ``grey`` (H, W).

    Raises:
        ValueError: What ``flaw_of`` says, or it can't be decoded; the end of the sentence "this picture is ...".
        MemoryError: There is none left for it, which says nothing of the picture.
    """
    cv2 = require_opencv()
    flaw = flaw_of(io.BytesIO(encoded))
    if flaw:
        raise ValueError(flaw)
    try:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR)
    except cv2.error as error:  # more pixels than OpenCV takes, for example
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        pixels = None
    if pixels is None:
        raise ValueError(f"damaged: {len(encoded)} bytes that can't be decoded")
    return np.asarray(pixels if grey else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def flaw_of(file: BinaryIO) -> str:
    """Return why this is no picture that is read, as far as its head and its end say; nothing if it seems to be one."""
    end = _ENDS.get(file.read(2))
    file.seek(0)
    size = _size_in_head(file)
    head_bytes, num_bytes = file.tell(), file.seek(0, SEEK_END)
    places = (max(head_bytes, num_bytes - _TAIL_BYTES), head_bytes)  # before stands a thumbnail, with an end of its own
    if end is None or size is None or not any(end in _rest(file, at) for at in places):
        return f"damaged: {num_bytes} bytes that are no complete PNG or JPEG"
    if max(size) > MAX_SIDE:
        return f"too large: {size[0]} x {size[1]} pixels; at most {MAX_SIDE} a side are read"
    return ""


def _rest(file: BinaryIO, first: int) -> bytes:
    file.seek(first)
    return file.read()


def flaw_in(path: Path) -> str:
    """Return what ``flaw_of`` says of a file, or that it is larger than ``MAX_PICTURE_BYTES``.

    Raises:
        SettingsError: It can't be read, which may pass: without it a resumed run would be another one.
    """
    try:
        with open_regular(path) as file:
            if file.seek(0, SEEK_END) > MAX_PICTURE_BYTES:
                return f"too large: more than {MAX_PICTURE_BYTES} bytes"
            file.seek(0)
            return flaw_of(file)
    except OSError as error:
        raise SettingsError(f"picture {path} can't be read: {error.strerror or error}") from error


def encoded_images(
    names: Sequence[str], read: Callable[[int], bytes], size: int, channels: int, *, crop: bool = False
) -> LazyImages:
    """Return images that stay encoded until they are taken.

    Args:
        names: what each is called in error messages.
        read: index -> its PNG or JPEG.
        size: side in pixels.
        channels: 1 or 3.
        crop: as of ``decode``.
    """

    def decoded(index: int) -> list[tuple[int, NDArray[np.uint8]]]:
        try:
            encoded = read(index)
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise SettingsError(f"image {names[index]} can't be read ({error}); fetch the set again") from error
        return [(index, decode(encoded, names[index], size, channels, crop=crop))]

    return LazyImages((len(names), size, size, channels), decoded, names)


def from_files(paths: Sequence[Path], size: int, channels: int, *, crop: bool = False) -> LazyImages:
    """Return the images in these files."""
    names = [str(path) for path in paths]
    return encoded_images(names, lambda index: read_regular(paths[index]), size, channels, crop=crop)


def from_zip(archive: zipfile.ZipFile, members: Sequence[str], size: int, channels: int) -> LazyImages:
    """Return the images in these members, read in place; every read checks the member's CRC."""
    names = [f"{member} in {archive.filename}" for member in members]
    return encoded_images(names, lambda index: archive.read(members[index]), size, channels)


def picture_size(path: Path) -> tuple[int, int]:
    """Return a file's (width, height) in pixels from its head alone, without decoding it.

    Raises:
        SettingsError: It can't be read, or is no PNG or JPEG.
    """
    try:
        with open_regular(path) as file:
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

    def by_value(path: Path) -> tuple[list[tuple[int, str]], str]:
        words = re.split(r"(\d+)", path.name)
        return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], path.name

    return sorted(files, key=by_value)


def require_opencv() -> Any:
    """Return the module ``cv2``.

    Raises:
        SettingsError: It isn't installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise SettingsError(
            "pictures and the synthetic street need OpenCV; install it: pip install opencv-python-headless"
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
