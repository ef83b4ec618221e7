"""Every annotated object of a picture as an input of its own: what is this?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Inputs, Picture, classified
from replayfleet.edge_client.frames.views.pixels import fitted
from replayfleet.federation.streams.crops import square_crop, worth_a_crop
from replayfleet.models.specs import TaskSpec

MAX_CROPS = 64
"""Of one picture; the largest objects are taken, and the others counted."""


class Crops:
    """Implements ``View`` for classification of the objects in a picture, where something else says where they are.

    Args:
        task: says how large an input is, and whether it is grey.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._task = task

    def inputs(self, picture: Picture) -> Inputs:
        """Return a square crop around each box; a picture without an annotation asks nothing."""
        taken, num_left_out = self._taken(picture)
        corners = np.empty((0, 4), np.float32) if picture.boxes is None else picture.boxes.corners[taken]
        crops = [fitted(square_crop(picture.pixels, box), self._task) for box in corners]
        images = np.stack(crops) if crops else np.empty((0, *self._task.image_shape), np.float32)
        return Inputs(images, corners, taken, num_left_out=num_left_out)

    def _taken(self, picture: Picture) -> tuple[NDArray[np.int64], int]:
        """Return (which boxes become inputs, in their own order, how many are too many): the largest worth a crop."""
        if picture.boxes is None:
            return np.empty(0, np.int64), 0
        corners = picture.boxes.corners
        inside = np.minimum(corners[:, 2:], picture.size) - np.maximum(corners[:, :2], 0)
        areas = np.where(worth_a_crop(corners, picture.size), inside.prod(axis=1), 0.0)
        largest = np.argsort(-areas, kind="stable")[:MAX_CROPS]
        kept = np.sort(largest[areas[largest] > 0])
        return kept.astype(np.int64), int((areas > 0).sum()) - len(kept)

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        return classified(outputs, inputs)
