"""What every source of pictures and labelled samples offers.

Axes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.cameras.base import Camera
from edge_client.predictions import Shown
from edge_client.views.base import View

MAX_FRAME_RATE_HZ = 1000.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Labelled images.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1].
        labels: (B,) int64 class ids; for detection (B, M, 5) float32, see ``federation.streams.box_labels``.
    """

    images: NDArray[np.float32]
    labels: NDArray[Any]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.float32:
            raise ValueError(f"images must be (B, C, H, W) float32, got {self.images.shape} {self.images.dtype}")
        if self.labels.ndim == 3:
            if self.labels.shape[::2] != (len(self.images), 5) or self.labels.dtype != np.float32:
                raise ValueError(
                    f"labels must be ({len(self.images)}, M, 5) float32, got {self.labels.shape} {self.labels.dtype}"
                )
        elif self.labels.shape != (len(self.images),) or self.labels.dtype != np.int64:
            raise ValueError(f"labels must be ({len(self.images)},) int64, got {self.labels.shape} {self.labels.dtype}")

    def __len__(self) -> int:
        return len(self.images)


class Source(Protocol):
    """Pictures to serve and, apart from them, labelled samples to learn from."""

    @property
    def cameras(self) -> Sequence[Camera]:
        """Where pictures come from; their names differ."""

    @property
    def view(self) -> View:
        """How the fleet's task looks at these pictures."""

    def watch(self, shown: Shown) -> None:
        """Take note of a picture that was served; called on the serving thread, so it must be quick."""

    def round_samples(self, round_index: int) -> Samples | None:
        """Samples that this round, and only this round, may learn from; None if there are none (yet).

        Asked again for the same round it answers with the same samples; after a crash only sources that keep samples
        outside of this process can.
        """

    def test_samples(self, round_index: int) -> Samples | None:
        """Held-out samples of all classes met up to and including ``round_index``; None if the source has none."""

    def measures(self) -> Mapping[str, float]:
        """What was measured since the last call, for the next report: metric -> value."""

    def describe(self) -> str:
        """One line for logs."""
