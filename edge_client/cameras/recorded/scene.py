"""Pictures of a data set or a folder, shown over and over as a camera would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.cameras.recorded.pace import ticks
from replayfleet.edge_client.flow import Picture

NAME = "scene"


class SceneCamera:
    """Implements ``Camera`` over images that somebody else chooses; shows nothing before the first ``show``.

    Args:
        rate_hz: pictures per second.
    """

    name = NAME
    live = True
    class_names: tuple[str, ...] = ()

    def __init__(self, rate_hz: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_hz = rate_hz
        self._clock = clock
        self._scene: NDArray[np.uint8] = np.empty((0, 1, 1, 3), np.uint8)

    def show(self, scene: NDArray[np.uint8]) -> None:
        """Show these from now on, (B, H, W, 3) uint8, also while pictures flow."""
        self._scene = scene

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        for frame_id, now in ticks(self._rate_hz, stop, self._clock):
            scene = self._scene
            if len(scene):
                yield Picture(self.name, frame_id, scene[frame_id % len(scene)], now)

    def describe(self) -> str:
        return f"{self._rate_hz:g} pictures/s"
