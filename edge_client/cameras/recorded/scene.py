"""Pictures of a data set or a folder, shown over and over as a camera would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

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
        """Yield a picture every ``1 / rate_hz`` seconds.

        A consumer that falls behind makes the camera skip ahead: frame ids then jump, and nothing queues up.
        """
        began = self._clock()
        frame_id = 0
        while not stop.wait(max(0.0, began + frame_id / self._rate_hz - self._clock())):
            scene = self._scene
            now = self._clock()
            if len(scene):
                yield Picture(self.name, frame_id, scene[frame_id % len(scene)], now)
            frame_id = max(frame_id + 1, int((self._clock() - began) * self._rate_hz))

    def describe(self) -> str:
        return f"{self._rate_hz:g} pictures/s"
