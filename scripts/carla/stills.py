"""Pictures out of the vehicles' films, with what the model said drawn into them.

Axes: H height, W width.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import ReplayfleetError

_BLACK = 20
"""Up to this value in all channels a pixel counts as the ground of a drawn word."""

_MAX_LOOKS = 60
_JPEG_QUALITY = 82


@dataclass(frozen=True, slots=True)
class Still:
    """One picture of a film.

    Attributes:
        film: its file's name.
        index: which frame, counted from 0.
        num_frames: of the film.
        data_uri: JPEG.
    """

    film: str
    index: int
    num_frames: int
    data_uri: str


def still(film: Path, first_share: float, last_share: float) -> Still | None:
    """Return the picture with most words drawn into it out of one stretch of a film.

    None if the film is missing, or if OpenCV can't read it.

    Args:
        film: the file.
        first_share: where the stretch begins, 0 to 1.
        last_share: where it ends.

    Raises:
        ReplayfleetError: The picture can't be encoded.
    """
    best: tuple[int, int, NDArray[np.uint8]] | None = None
    for frame in _frames(film, first_share, last_share):
        if best is None or written_share(frame[2]) > written_share(best[2]):
            best = frame
    return None if best is None else Still(film.name, best[0], best[1], jpeg_uri(best[2]))


def written_share(pixels: NDArray[np.uint8]) -> float:
    """Return the share of pixels (H, W, 3) that are black: words stand on black."""
    return float((pixels.max(axis=2) < _BLACK).mean())


def jpeg_uri(pixels: NDArray[np.uint8]) -> str:
    """Return BGR pixels (H, W, 3) as a JPEG within a URI.

    Raises:
        ReplayfleetError: They can't be encoded.
    """
    import cv2

    done, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    if not done:
        raise ReplayfleetError(f"a picture of shape {pixels.shape} can't be encoded as JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"


def _frames(film: Path, first_share: float, last_share: float) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yield (index, number of all frames, BGR pixels) of up to ``_MAX_LOOKS`` frames, evenly from the stretch."""
    import cv2

    reader = cv2.VideoCapture(str(film))
    try:
        total = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)) if reader.isOpened() else 0
        first, last = int(total * first_share), max(0, int(total * last_share) - 1)
        wanted = set(np.linspace(first, last, min(_MAX_LOOKS, total)).astype(int).tolist()) if total else set()
        for index in range(last + 1):
            if not reader.grab():
                return
            if index in wanted:
                done, pixels = reader.retrieve()
                if done:
                    yield index, total, np.asarray(pixels, np.uint8)
    finally:
        reader.release()
