"""What every source of frames and labelled samples offers.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_FRAME_RATE_HZ = 1000.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One image on its way to the served model.

    Attributes:
        frame_id: rises by one with every frame of a source, served or dropped.
        image: (C, H, W) float32 in [-1, 1].
        captured_at: ``time.monotonic`` seconds.
    """

    frame_id: int
    image: NDArray[np.float32]
    captured_at: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Labelled images.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64 class ids.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.float32:
            raise ValueError(f"images must be (B, C, H, W) float32, got {self.images.shape} {self.images.dtype}")
        if self.labels.shape != (len(self.images),) or self.labels.dtype != np.int64:
            raise ValueError(f"labels must be ({len(self.images)},) int64, got {self.labels.shape} {self.labels.dtype}")

    def __len__(self) -> int:
        return len(self.images)


class Source(Protocol):
    """Frames to serve and, apart from them, labelled samples to learn from."""

    def frames(self, stop: threading.Event) -> Iterator[Frame]:
        """Yield frames at the source's own rate until ``stop`` is set; runs on a thread of its own."""

    def round_samples(self, round_index: int) -> Samples | None:
        """Samples that this round, and only this round, may learn from; None if there are none (yet).

        Asked again for the same round, after a crash, it answers with the same samples.
        """

    def test_samples(self, round_index: int) -> Samples | None:
        """Held-out samples of all classes met up to and including ``round_index``; None if the source has none."""

    def describe(self) -> str:
        """One line for logs."""


def paced(
    images: Callable[[], NDArray[np.float32]], rate_hz: float, stop: threading.Event, clock: Callable[[], float]
) -> Iterator[Frame]:
    """Yield ``images()`` over and over, one every ``1 / rate_hz`` seconds.

    Args:
        images: (B, C, H, W); asked for every frame, so the scene may change while frames flow.
        rate_hz: frames per second.
        stop: ends the iteration, also during a wait.
        clock: ``time.monotonic``.

    A consumer that falls behind makes the source skip ahead: frame ids then jump, and nothing queues up.
    """
    began = clock()
    frame_id = 0
    while not stop.wait(max(0.0, began + frame_id / rate_hz - clock())):
        current = images()
        now = clock()
        if len(current):
            yield Frame(frame_id, current[frame_id % len(current)], now)
        frame_id = max(frame_id + 1, int((clock() - began) * rate_hz))
