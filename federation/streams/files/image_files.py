"""Images that stay encoded (files of a folder, members of a zip) until somebody asks for their pixels.

Axes: N images, H height, W width, C channels. Decoding needs OpenCV or Pillow, imported on first use.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError

SUFFIXES = (".png", ".jpg", ".jpeg")

Decode: TypeAlias = Callable[[bytes, int, int, bool], "NDArray[np.uint8] | None"]
"""(encoded, side, channels, crop) -> (side, side, channels) uint8, or None if the bytes are no image.

An oblong image is squeezed into the square; with ``crop`` its ends are cut off instead.
"""

_TAIL_BYTES = 1024
_END_MARKERS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""First two bytes of JPEG and PNG -> what stands near the end of a complete file; decoders pass over its absence."""


class EncodedImages:
    """N images, decoded and resized when they are first taken, then kept as uint8.

    Attributes:
        names: what each image is called in error messages.
        shape: (N, H, W, C).
    """

    def __init__(
        self, names: Sequence[str], read: Callable[[int], bytes], size: int, channels: int, *, crop: bool = False
    ) -> None:
        self.names = names
        self.shape = (len(names), size, size, channels)
        self._read = read
        self._crop = crop
        self._pixels = np.zeros(self.shape, dtype=np.uint8)  # the system maps a page only once it is written
        self._decoded = np.zeros(len(names), dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images (len(indices), H, W, C) uint8.

        Raises:
            SettingsError: A file can't be read or is damaged, or no decoder is installed.
        """
        for index in np.unique(np.asarray(indices)[~self._decoded[indices]]).tolist():
            encoded, name = self._encoded(index), self.names[index]
            self._pixels[index] = decode(encoded, name, self.shape[1], self.shape[3], crop=self._crop)
            self._decoded[index] = True
        return self._pixels[indices]

    def _encoded(self, index: int) -> bytes:
        try:
            return self._read(index)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise SettingsError(f"image {self.names[index]} can't be read ({error}); fetch the set again") from error


def from_files(paths: Sequence[Path], size: int, channels: int, *, crop: bool = False) -> EncodedImages:
    """Return the images in these files."""
    names = [str(path) for path in paths]
    return EncodedImages(names, lambda index: paths[index].read_bytes(), size, channels, crop=crop)


def from_zip(archive: zipfile.ZipFile, members: Sequence[str], size: int, channels: int) -> EncodedImages:
    """Return the images in these members, read in place; every read checks the member's CRC."""
    names = [f"{member} in {archive.filename}" for member in members]
    return EncodedImages(names, lambda index: archive.read(members[index]), size, channels)


def decode(encoded: bytes, name: str, size: int, channels: int, *, crop: bool = False) -> NDArray[np.uint8]:
    """Return the image as (size, size, channels) uint8, RGB or grey, area-averaged when it is larger.

    An oblong image is squeezed; with ``crop`` only the square in its middle is taken.

    Raises:
        SettingsError: The bytes are no complete image, or neither OpenCV nor Pillow is installed.
    """
    end = _END_MARKERS.get(encoded[:2], b"")
    pixels = _decoder()(encoded, size, channels, crop) if end in encoded[-_TAIL_BYTES:] else None
    if pixels is None:
        raise SettingsError(
            f"image {name} is damaged: {len(encoded)} bytes that are no complete PNG or JPEG; fetch it again"
        )
    return pixels


def _decoder() -> Decode:
    for candidate in (_opencv, _pillow):
        decoder = candidate()
        if decoder is not None:
            return decoder
    raise SettingsError("PNG and JPEG files need OpenCV or Pillow; install one: pip install opencv-python-headless")


def _opencv() -> Decode | None:
    try:
        import cv2
    except ImportError:
        return None

    def decode_opencv(encoded: bytes, size: int, channels: int, crop: bool) -> NDArray[np.uint8] | None:
        flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR
        try:
            pixels = cv2.imdecode(np.frombuffer(encoded, dtype=np.uint8), flag)
        except cv2.error:
            return None
        if pixels is None:
            return None
        if crop:
            left, top, right, bottom = _middle(pixels.shape[1], pixels.shape[0])
            pixels = pixels[top:bottom, left:right]
        if pixels.shape[:2] != (size, size):
            shrinks = min(pixels.shape[:2]) > size
            pixels = cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        if channels == 3:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
        return np.asarray(pixels, dtype=np.uint8).reshape(size, size, channels)

    return decode_opencv


def _pillow() -> Decode | None:
    try:
        from PIL import Image
    except ImportError:
        return None

    def decode_pillow(encoded: bytes, size: int, channels: int, crop: bool) -> NDArray[np.uint8] | None:
        try:
            with Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG")) as image:
                pixels = image.convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError):
            return None
        if crop:
            pixels = pixels.crop(_middle(*pixels.size))
        if pixels.size != (size, size):
            shrinks = min(pixels.size) > size
            pixels = pixels.resize((size, size), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)
        return np.asarray(pixels, dtype=np.uint8).reshape(size, size, channels)

    return decode_pillow


def _middle(width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the largest square in the middle."""
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
