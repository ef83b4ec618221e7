"""Recorded driving as pictures with boxes, for detection: whole frames, resized, and their labels.

Pictures are made as an edge client's view makes them (``resized``), so a device and a simulation see the same pixels.
Axes: N pictures, H height, W width, M padded boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.federation.streams.driving.recording import Driving, DrivingFrame
from replayfleet.federation.streams.labelled_images import normalise
from replayfleet.federation.streams.resizing import resized
from replayfleet.models.specs import DetectionSpec


@dataclass(frozen=True, slots=True)
class LabelledPictures:
    """Pictures and what is to be seen in them.

    Attributes:
        pixels: (N, H, W, 3) uint8, RGB.
        labels: (N, M, 5) float32, as of ``federation.methods.kit.records.RoundData``.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.pixels)

    def images(self) -> NDArray[np.float32]:
        """Return (N, 3, H, W) float32 in [-1, 1], four times as large as the pixels."""
        return normalise(self.pixels)


def read_pictures(driving: Driving, frames: Sequence[DrivingFrame], spec: DetectionSpec) -> LabelledPictures:
    """Return frames as a detector sees them.

    Args:
        driving: the recording.
        frames: of it, in the order wanted.
        spec: says how large pictures are and how many boxes a label holds; with three channels.

    Raises:
        SettingsError: The task has other classes than the recording or grey pictures, or a file is damaged.
    """
    if driving.class_names != spec.class_names or spec.image_channels != 3:
        raise SettingsError(
            f"recorded driving in {driving.root} has coloured pictures of {', '.join(driving.class_names)}; "
            f"the task has {spec.image_channels} channels and {', '.join(spec.class_names)}"
        )
    pixels = np.empty((len(frames), spec.image_height, spec.image_width, 3), np.uint8)
    labels = np.empty((len(frames), spec.max_boxes, 5), np.float32)
    for index, frame in enumerate(frames):
        picture = frame.pixels()
        size = (picture.shape[1], picture.shape[0])
        found = driving.annotation(frame, size)
        pixels[index] = resized(picture, spec.image_height, spec.image_width)
        labels[index] = box_labels(found.corners, found.class_ids, size, spec.max_boxes)
    return LabelledPictures(pixels, labels)
