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

from federation.errors import ReplayfleetError

_COLOURFUL = 90
"""Difference of a pixel's largest and smallest channel from which it counts as drawn: films are of grey streets."""

_LAST_SHARE = 0.35
"""Stills come from so much of the end of a film, when the models have learned."""

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


def stills(film: Path, count: int) -> list[Still]:
    """Return pictures from the end of a film: in each of ``count`` equal stretches, the one with most drawn into it.

    A film that is missing, or that OpenCV can't read, has none.

    Raises:
        ReplayfleetError: A picture can't be encoded.
    """
    frames = list(_last_frames(film))
    if not frames:
        return []
    total = frames[-1][0] + 1
    found = []
    for part in np.array_split(np.arange(len(frames)), min(count, len(frames))):
        index, pixels = max((frames[place] for place in part), key=lambda frame: colourful_share(frame[1]))
        found.append(Still(film.name, index, total, jpeg_uri(pixels)))
    return found


def colourful_share(pixels: NDArray[np.uint8]) -> float:
    """Return the share of pixels (H, W, 3) that are far from grey."""
    spread = pixels.max(axis=2).astype(np.int16) - pixels.min(axis=2)
    return float((spread > _COLOURFUL).mean())


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


def _last_frames(film: Path) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (index, BGR pixels) of up to ``_MAX_LOOKS`` frames, evenly from the film's last part."""
    import cv2

    reader = cv2.VideoCapture(str(film))
    try:
        total = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)) if reader.isOpened() else 0
        first = int(total * (1 - _LAST_SHARE))
        wanted = set(np.linspace(first, total - 1, min(_MAX_LOOKS, total - first)).astype(int).tolist())
        for index in range(total):
            if not reader.grab():
                return
            if index in wanted:
                done, pixels = reader.retrieve()
                if done:
                    yield index, np.asarray(pixels, np.uint8)
    finally:
        reader.release()
