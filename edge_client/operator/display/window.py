"""The drawn stream in a window per camera; ``q`` closes them, and serving goes on."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable

import numpy as np

from replayfleet.edge_client.flow import Shown
from replayfleet.edge_client.operator.display.drawing import Legend, drawn
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.logs import EventLogger

log = EventLogger(__name__)

_REFRESH_MS = 30


class Window:
    """Watches predictions and shows each camera's newest.

    Args:
        legend: camera name -> what its drawings need; asked for every picture.

    Raises:
        SettingsError: There is no display, or OpenCV has no windows.
    """

    def __init__(self, legend: Callable[[str], Legend]) -> None:
        check_display()
        self._legend = legend
        self._newest: dict[str, Shown] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="window", daemon=True)
        self._thread.start()

    def watch(self, shown: Shown) -> None:
        """Remember what to show next; called on the serving thread."""
        self._newest[shown.picture.camera] = shown

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        import cv2

        try:
            while not self._closing.is_set():
                for camera in sorted(self._newest.copy()):
                    shown = self._newest.pop(camera, None)
                    if shown is not None:
                        image = drawn(shown, self._legend(camera))
                        cv2.imshow(camera, np.ascontiguousarray(image[:, :, ::-1]))
                if cv2.waitKey(_REFRESH_MS) & 0xFF == ord("q"):
                    log.info("windows closed")
                    break
            cv2.destroyAllWindows()
        except Exception:  # root of a thread: OpenCV's own errors
            log.exception("windows closed")


def check_display() -> None:
    """Raise SettingsError unless windows can be opened here."""
    import cv2

    toolkit = re.search(r"^\s*GUI:\s*(\S+)", cv2.getBuildInformation(), re.MULTILINE)
    if toolkit is None or toolkit.group(1) == "NONE":
        raise SettingsError(
            "--show needs an OpenCV with windows: pip uninstall opencv-python-headless, then pip install "
            "'replayfleet[window]'; or take --studio, --record"
        )
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise SettingsError(
            "--show needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set; or take --studio, --record"
        )
