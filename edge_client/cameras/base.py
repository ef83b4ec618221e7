"""What every camera, stream, recording and simulator offers: pictures with a number, a time and, perhaps, boxes.

Axes: H height, W width, N boxes. Nothing here needs OpenCV or torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Boxes:
    """What is to be seen in a picture, and where.

    Attributes:
        corners: (N, 4) float32, left, top, right, bottom in pixels, left < right and top < bottom; they may reach past
            the picture's edge.
        class_ids: (N,) int64, indices into the camera's ``class_names``.
    """

    corners: NDArray[np.float32]
    class_ids: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.corners.ndim != 2 or self.corners.shape[1] != 4 or self.corners.dtype != np.float32:
            raise ValueError(f"corners must be (N, 4) float32, got {self.corners.shape} {self.corners.dtype}")
        if self.class_ids.shape != (len(self.corners),) or self.class_ids.dtype != np.int64:
            raise ValueError(
                f"class_ids must be ({len(self.corners)},) int64, got {self.class_ids.shape} {self.class_ids.dtype}"
            )
        sizes = self.corners[:, 2:] - self.corners[:, :2]
        if not (np.isfinite(self.corners).all() and (sizes > 0).all()):
            raise ValueError("corners must be finite, with left < right and top < bottom")

    def __len__(self) -> int:
        return len(self.corners)

    @classmethod
    def none(cls) -> Boxes:
        """Return the annotation of a picture that shows nothing of interest."""
        return cls(np.empty((0, 4), np.float32), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as a camera took it.

    Attributes:
        camera: name of the camera within its client.
        frame_id: rises with every picture that the camera took, those that nobody read included.
        pixels: (H, W, 3) uint8, RGB.
        captured_at: ``time.monotonic`` seconds at which the picture was taken, or read where nobody knows better.
        boxes: the annotation that came with it; None where there is none, which is not the same as no boxes.
        place: where it was taken, a town for example; empty where the camera doesn't know.
    """

    camera: str
    frame_id: int
    pixels: NDArray[np.uint8]
    captured_at: float
    boxes: Boxes | None = None
    place: str = ""

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.shape[2] != 3 or self.pixels.dtype != np.uint8:
            raise ValueError(f"pixels must be (H, W, 3) uint8, got {self.pixels.shape} {self.pixels.dtype}")

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        height, width, _ = self.pixels.shape
        return width, height


class CameraError(Exception):
    """A camera can't deliver now: unplugged, silent, refused, garbled. Whoever reads it tries again later."""


class Camera(Protocol):
    """One place that pictures come from."""

    name: str
    """Within its client; stands in every picture."""

    live: bool
    """Pictures come at their own pace and the newest wins; of a recording every picture is delivered."""

    class_names: tuple[str, ...]
    """What ``Boxes.class_ids`` mean; empty where the camera never annotates."""

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until ``stop`` is set or a recording ends; runs on a thread of its own.

        Raises:
            CameraError: It can't deliver now; iterating anew tries again.
        """

    def describe(self) -> str:
        """One line for logs, without passwords."""
