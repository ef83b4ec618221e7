"""How a task looks at pictures: what a picture asks the served model, and what its outputs mean.

Axes: B images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Inputs, Picture, classified
from replayfleet.export.running.detections import detections
from replayfleet.federation.streams.crops import square_crop, worth_a_crop
from replayfleet.federation.streams.resizing import resized
from replayfleet.models.specs import AnyTaskSpec, DetectionRules, DetectionSpec, TaskSpec

MAX_CROPS = 64
"""Of one picture; the largest objects are taken, and the others counted."""


class WholePicture:
    """Implements ``View`` for classification of whole pictures.

    Args:
        task: says how large an input is, and whether it is grey.
        among: class ids that alone may be answered; all if there are none.
    """

    def __init__(self, task: TaskSpec, among: Sequence[int] = ()) -> None:
        self._task = task
        self._among = among

    def inputs(self, picture: Picture) -> Inputs:
        return Inputs(fitted(picture.pixels, self._task)[None])

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        return classified(outputs, inputs, self._among)


class Crops:
    """Implements ``View`` for classification of the objects in a picture, where something else says where they are.

    Args:
        task: says how large an input is, and whether it is grey.
        among: class ids that alone may be answered; all if there are none.
    """

    def __init__(self, task: TaskSpec, among: Sequence[int] = ()) -> None:
        self._task = task
        self._among = among

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
        return classified(outputs, inputs, self._among)


class Detector:
    """Implements ``View`` for detection.

    Args:
        task: says how large an input is; a picture of another shape is stretched to it, and so are boxes.
        rules: what counts as found.
    """

    def __init__(self, task: DetectionSpec, rules: DetectionRules | None = None) -> None:
        self._task = task
        self._rules = rules or DetectionRules()

    def inputs(self, picture: Picture) -> Inputs:
        return Inputs(fitted(picture.pixels, self._task)[None], size=picture.size)

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        assert inputs.size is not None
        (found,) = detections(self._task, outputs, self._rules)
        return Answers(found.class_ids, found.scores, found.in_pixels(*inputs.size), found.num_left_out)


def fitted(pixels: NDArray[np.uint8], task: AnyTaskSpec) -> NDArray[np.float32]:
    """Return RGB pixels (H, W, 3) as the task's input: (C, height, width) float32 in [-1, 1].

    The picture is stretched to the task's size, whatever its shape was; grey tasks see its luminance.
    """
    channels, height, width = task.image_shape
    grey = channels == 1
    red, green, blue = (pixels[:, :, channel] for channel in range(3))
    if grey and (red == green).all() and (green == blue).all():  # of a data set that is grey: its own levels, exactly
        pixels, grey = pixels[:, :, :1], False
    if grey or pixels.shape[:2] != (height, width):
        pixels = resized(pixels, height, width, grey=grey)
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    image: NDArray[np.float32] = np.ascontiguousarray(planes, dtype=np.float32) / np.float32(127.5) - np.float32(1.0)
    return image


def to_pixels(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return inputs (B, C, H, W) in [-1, 1] as RGB pixels (B, H, W, 3); a grey image gets three equal channels."""
    levels = np.clip(np.rint((images + np.float32(1.0)) * np.float32(127.5)), 0, 255).astype(np.uint8)
    return as_rgb(levels.transpose(0, 2, 3, 1))


def as_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pixels (B, H, W, C) with C of 1 or 3 as (B, H, W, 3)."""
    return np.repeat(pixels, 3, axis=3) if pixels.shape[3] == 1 else np.ascontiguousarray(pixels)
