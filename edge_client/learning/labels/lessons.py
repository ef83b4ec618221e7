"""From a picture that was served and what is known about it to what can be learned from it.

Axes: B inputs of one picture, M padded boxes, N answers, T boxes that are really there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Boxes, Samples, Shown
from replayfleet.edge_client.learning.labels.base import UNKNOWN, Labeller, unknown
from replayfleet.export.running import detections
from replayfleet.federation.streams.box_labels import box_labels


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one picture teaches.

    Attributes:
        samples: labelled.
        num_right: of the labelled things, how many the served model had answered rightly.
        num_answered: how many it had been asked about; 0 without a model.
        num_left_out: boxes that the label has no room for.
    """

    samples: Samples
    num_right: int
    num_answered: int
    num_left_out: int = 0


class Lessons(Protocol):
    """Makes lessons for one kind of task."""

    def lesson(self, shown: Shown) -> Lesson | None:
        """Return what the picture teaches, or None if nobody knows what it shows."""


class ClassLessons:
    """Lessons of a classification task, input by input.

    Args:
        labellers: asked in turn; the first that knows decides.
    """

    def __init__(self, labellers: Sequence[Labeller]) -> None:
        self._labellers = tuple(labellers)

    def lesson(self, shown: Shown) -> Lesson | None:
        """Return the inputs whose class is known."""
        labels = self._labels(shown)
        known = labels != UNKNOWN
        if not known.any():
            return None
        samples = Samples(shown.inputs.images[known], labels[known])
        if shown.prediction is None:
            return Lesson(samples, 0, 0)
        right = shown.prediction.answers.class_ids[known] == samples.labels
        return Lesson(samples, int(right.sum()), len(samples))

    def _labels(self, shown: Shown) -> NDArray[np.int64]:
        labels = unknown(shown)
        for labeller in self._labellers:
            if (labels != UNKNOWN).all():
                break
            labels = np.where(labels == UNKNOWN, labeller.labels(shown), labels)
        return labels


class BoxLabeller(Protocol):
    """Says which boxes of which of the task's classes are in a picture."""

    def boxes(self, shown: Shown) -> Boxes | None:
        """Return them, with class ids of the task; None if there is no telling."""


class BoxLessons:
    """Lessons of a detection task, picture by picture.

    Args:
        labellers: asked in turn; the first that knows decides.
        max_boxes: M, of a label.
    """

    def __init__(self, labellers: Sequence[BoxLabeller], max_boxes: int) -> None:
        self._labellers = tuple(labellers)
        self._max_boxes = max_boxes

    def lesson(self, shown: Shown) -> Lesson | None:
        """Return the picture with its boxes; a picture without any teaches where nothing is."""
        boxes = next((found for labeller in self._labellers if (found := labeller.boxes(shown)) is not None), None)
        if boxes is None:
            return None
        boxes = _within(boxes, shown.picture.size)
        label = box_labels(boxes.corners, boxes.class_ids, shown.picture.size, self._max_boxes)
        samples = Samples(shown.inputs.images, label[None])
        num_left_out = max(0, len(boxes) - self._max_boxes)
        if shown.prediction is None:
            return Lesson(samples, 0, 0, num_left_out)
        return Lesson(samples, num_found(boxes, shown.prediction.answers), len(boxes), num_left_out)


def _within(boxes: Boxes, size: tuple[int, int]) -> Boxes:
    """Return what of the boxes lies in a picture of (width, height), as a detector answers."""
    corners = boxes.corners.clip(0, np.array([*size, *size], np.float32))
    kept = (corners[:, :2] < corners[:, 2:]).all(axis=1)
    return Boxes(corners[kept], boxes.class_ids[kept])


def num_found(boxes: Boxes, answers: Answers) -> int:
    """Return how many of a picture's boxes its answers found (``export.running.detections.num_found``)."""
    if answers.corners is None:
        return 0
    return detections.num_found(answers.corners, answers.class_ids, boxes.corners, boxes.class_ids)
