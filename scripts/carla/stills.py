"""Pictures out of the vehicles' films, with what the model said drawn into them.

Axes: H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.service.pages import picture_uri

_BLACK = 20
"""Up to this value in all channels a pixel counts as the ground of a drawn word."""

_MAX_LOOKS = 60


@dataclass(frozen=True, slots=True)
class Still:
    """One picture of a film, as a JPEG within a URI; its index counts from 0."""

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
    import cv2

    reader = cv2.VideoCapture(str(film))
    best: tuple[float, int, NDArray[np.uint8]] | None = None
    try:
        total = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)) if reader.isOpened() else 0
        first, last = int(total * first_share), max(0, int(total * last_share) - 1)
        wanted = set(np.linspace(first, last, min(_MAX_LOOKS, total)).astype(int).tolist()) if total else set()
        for index in range(last + 1):
            if not reader.grab():
                break
            done, found = reader.retrieve() if index in wanted else (False, None)
            if done and found is not None:
                pixels = np.asarray(found, np.uint8)
                share = written_share(pixels)
                best = (share, index, pixels) if best is None or share > best[0] else best
    finally:
        reader.release()
    return None if best is None else Still(film.name, best[1], total, picture_uri(best[2][..., ::-1], ".jpg"))


def written_share(pixels: NDArray[np.uint8]) -> float:
    """Return the share of pixels (H, W, 3) that are black: words stand on black."""
    return float((pixels.max(axis=2) < _BLACK).mean())
