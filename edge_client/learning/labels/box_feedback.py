"""Boxes from an operator: "in frame 812 there are a car here and a bike there, and nothing else"."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from replayfleet.edge_client.flow import Samples, Shown
from replayfleet.edge_client.learning.labels.kept_frames import KeptFrames
from replayfleet.edge_client.learning.labels.operators_word import (
    AnyFeedback,
    BoxFeedback,
    FeedbackRefused,
    Meant,
    NamedBox,
)
from replayfleet.federation.errors import nearest
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.models.specs import DetectionSpec

MIN_SIDE_PIXELS = 1
"""Of a box: what is smaller shows nothing, and a finger slipped."""
_ROUNDING = 1e-6


class BoxFeedbackDesk:
    """Implements ``Desk`` for detection.

    Args:
        task: its classes, and how many boxes a picture's label holds.
        keep_s: seconds that a frame is kept.
        clock: ``time.monotonic``.
    """

    def __init__(self, task: DetectionSpec, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._class_ids = {name: index for index, name in enumerate(task.class_names)}
        self._max_boxes = task.max_boxes
        self._frames = KeptFrames(keep_s, clock)

    def keep(self, shown: Shown) -> None:
        """Keep a frame for a while, as the model saw it."""
        self._frames.keep(shown)

    def samples(self, feedback: AnyFeedback) -> Meant:
        """Return the picture with these boxes and no others, where it was taken, and what exactly is meant.

        Raises:
            FeedbackRefused: It names one class; it has more boxes than a label holds, one of an unknown class, not
                within the picture or smaller than a pixel; or the frame isn't kept any more.
        """
        if not isinstance(feedback, BoxFeedback):
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id}: it names one class, and this fleet learns where things are; "
                "send all boxes of the frame"
            )
        where = f"feedback on frame {feedback.frame_id}"
        if len(feedback.boxes) > self._max_boxes:
            raise FeedbackRefused(
                f"{where}: {len(feedback.boxes)} boxes, expected at most {self._max_boxes} (max_boxes of the task)"
            )
        for index, box in enumerate(feedback.boxes):
            if box.class_name not in self._class_ids:
                raise FeedbackRefused(
                    f"{where}: box {index} is of unknown class {box.class_name!r}"
                    f"{nearest(box.class_name, self._class_ids)}"
                )
        kept = self._frames.find(feedback.camera, feedback.frame_id)
        for index, box in enumerate(feedback.boxes):
            if not _lies_within(box, kept.size):
                width, height = kept.size
                raise FeedbackRefused(
                    f"{where}: box {index} is {list(box.corners)}, expected left, top, right and bottom within "
                    f"the picture's {width} x {height} pixels, {MIN_SIDE_PIXELS} or more from left to right and from "
                    "top to bottom"
                )
        corners = np.array([box.corners for box in feedback.boxes], np.float32).reshape(-1, 4)
        class_ids = np.array([self._class_ids[box.class_name] for box in feedback.boxes], np.int64)
        label = box_labels(corners, class_ids, kept.size, self._max_boxes)
        return Meant(Samples(kept.images(), label[None]), kept.place, (kept.camera, feedback.frame_id, None))


def _lies_within(box: NamedBox, size: tuple[int, int]) -> bool:
    """Whether a box lies in the picture, and is large enough to hold something; NaN is not."""
    left, top, right, bottom = box.corners
    in_width = left >= 0 and left + MIN_SIDE_PIXELS - _ROUNDING <= right <= size[0]
    return in_width and top >= 0 and top + MIN_SIDE_PIXELS - _ROUNDING <= bottom <= size[1]
