"""``python -m support.doubled_device_worker FILE``: the capture process with a double of ``cv2.VideoCapture``.

There is no camera on the machines that run tests. FILE says what becomes of the one that isn't there: ``plugged``,
``unplugged``, or ``hung``, which is a read that never returns.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import cv2
from support.rtsp_server import painted

from replayfleet.edge_client.cameras.live.worker import main

RATE_HZ = 50.0
SIZE = (192, 64)


class DoubledDevice:
    """Gives 50 numbered pictures a second, as long as it is plugged."""

    state_file = Path(sys.argv[1])
    numbers = itertools.count()

    def __init__(self, *_: Any) -> None:
        self._opened = self._state() == "plugged"
        self._number = -1

    def _state(self) -> str:
        return self.state_file.read_text()

    def isOpened(self) -> bool:  # noqa: N802
        return self._opened

    def grab(self) -> bool:
        time.sleep(1 / RATE_HZ)
        if self._state() == "hung":
            time.sleep(3600)
        self._number = next(self.numbers)
        return self._state() == "plugged"

    def retrieve(self) -> tuple[bool, Any]:
        return True, painted(self._number, *SIZE)[:, :, ::-1].copy()

    def get(self, prop: int) -> float:
        return float(SIZE[0 if prop == cv2.CAP_PROP_FRAME_WIDTH else 1])

    def set(self, prop: int, value: float) -> bool:
        return True

    def release(self) -> None:
        pass


if __name__ == "__main__":
    cv2.VideoCapture = DoubledDevice  # type: ignore[misc, assignment]
    main()
