"""``Street``: picture number n of a drive through a street that doesn't exist, with exact boxes. Needs OpenCV."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.streams.annotations import Annotation
from replayfleet.federation.streams.files.picture_files import require_opencv
from replayfleet.federation.streams.street.ground import Ground
from replayfleet.federation.streams.street.painter import Painter
from replayfleet.federation.streams.street.towns import TOWNS
from replayfleet.federation.streams.street.traffic import CLASS_NAMES, Traffic
from replayfleet.federation.streams.street.view import View

MIN_SIDE, MAX_SIDE = 64, 1920

_EYE_M = 1.55


class Street:
    """A drive through one town.

    A picture is a function of the arguments and of its moment, on one machine to the bit: pictures can be drawn in any
    order, and two streets with equal arguments are equal.

    Args:
        town: key of ``TOWNS``.
        seed: of houses, traffic, signs and weather; not negative.
        width: of the picture, ``MIN_SIDE`` to ``MAX_SIDE`` pixels.
        height: likewise.

    Raises:
        SettingsError: Unknown town (names the nearest), a size or seed out of range, or OpenCV isn't installed.
    """

    class_names = CLASS_NAMES

    def __init__(self, town: str = "sunny", *, seed: int = 0, width: int = 640, height: int = 380) -> None:
        if town not in TOWNS:
            raise SettingsError(f"synthetic street: unknown town {town!r}{nearest(town, TOWNS)}")
        for name, side in (("width", width), ("height", height)):
            if not MIN_SIDE <= side <= MAX_SIDE:
                raise SettingsError(f"synthetic street: {name} is {side}, expected {MIN_SIDE} to {MAX_SIDE} pixels")
        if seed < 0:
            raise SettingsError(f"synthetic street: seed is {seed}, expected 0 or more")
        self._cv2 = require_opencv()
        self._size = (width, height)
        self._town = TOWNS[town]
        self._traffic = Traffic(self._town, seed)
        self._ground = Ground(self._cv2, self._town, self._size, seed)

    def draw(self, time_s: float) -> tuple[NDArray[np.uint8], Annotation]:
        """Return what the camera sees ``time_s`` seconds into the drive.

        Returns:
            The picture (H, W, 3) uint8, RGB, and the boxes of what can be seen in it: whole objects within the picture,
            without those that are tiny or mostly hidden.
        """
        view = self._view(time_s)
        pixels = self._ground.begin(view, self._traffic.driven(time_s))
        painter = Painter(self._cv2, pixels, view, self._town)
        painter.paint(self._traffic.things(time_s))
        corners, class_ids = painter.boxes()
        # Noise repeats after 64 pictures a second; a moment is told by its milliseconds.
        pixels = self._ground.finish(pixels, painter.glows(), round(1000 * time_s))
        return pixels, Annotation(corners, class_ids)

    def _view(self, time_s: float) -> View:
        """The camera swings a little in its lane, and the road bends."""
        width, height = self._size
        return View(
            focal=width / 2,
            centre_x=width / 2 + 0.02 * width * math.sin(0.23 * time_s),
            horizon_y=height / 2 + 0.004 * height * math.sin(2.1 * time_s),
            x=0.22 * math.sin(0.31 * time_s),
            eye=_EYE_M,
            bend=0.0007 * math.sin(0.13 * time_s) * (0.6 if self._town.motorway else 1.0),
        )
