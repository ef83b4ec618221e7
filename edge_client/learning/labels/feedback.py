"""Labels from an operator: "frame 812 of the front camera shows a cat", within the time the frame is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from replayfleet.edge_client.flow import Samples, Shown
from replayfleet.edge_client.learning.labels.kept_frames import KeptFrames
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, Feedback, FeedbackRefused, Meant
from replayfleet.federation.errors import nearest


class FeedbackDesk:
    """Implements ``Desk`` for classification.

    Args:
        class_names: of the task.
        keep_s: seconds that a frame is kept.
        clock: ``time.monotonic``.
    """

    def __init__(
        self, class_names: tuple[str, ...], keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._class_ids = {name: index for index, name in enumerate(class_names)}
        self._frames = KeptFrames(keep_s, clock)

    def take_classes(self, class_names: tuple[str, ...]) -> None:
        """Take labels of the task's new classes too, also of frames that are kept already."""
        self._class_ids = {name: index for index, name in enumerate(class_names)}

    def keep(self, shown: Shown) -> None:
        """Keep a frame's inputs for a while."""
        self._frames.keep(shown)

    def samples(self, feedback: AnyFeedback) -> Meant:
        """Return what the label makes of the frame, where it was taken, and what exactly is meant.

        Raises:
            FeedbackRefused: It brings boxes; the class, the frame or the object is unknown, or the frame isn't kept any
                more.
        """
        if not isinstance(feedback, Feedback):
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id}: it brings boxes, and this fleet learns what one picture or "
                "object shows; name its class"
            )
        if feedback.class_name not in self._class_ids:
            raise FeedbackRefused(
                f"feedback names unknown class {feedback.class_name!r}{nearest(feedback.class_name, self._class_ids)}"
            )
        kept = self._frames.find(feedback.camera, feedback.frame_id)
        num_objects = len(kept.pixels)
        index = 0 if feedback.object_index is None else feedback.object_index
        if feedback.object_index is None and num_objects != 1:
            raise FeedbackRefused(
                f"feedback on frame {feedback.frame_id}: it has {num_objects} objects; say which one (object)"
            )
        if not 0 <= index < num_objects:
            raise FeedbackRefused(f"feedback on frame {feedback.frame_id}: no object {index}, it has {num_objects}")
        label = np.array([self._class_ids[feedback.class_name]], np.int64)
        samples = Samples(kept.images()[index : index + 1], label)
        return Meant(samples, kept.place, (kept.camera, feedback.frame_id, index))
