"""Recorded driving as whole pictures with boxes: what a stream hands to a fleet that learns to find things.

Pictures stand in driving order, town after town, and know their town and their frame. They are made as an edge client's
view makes them (``resized``), so a device and a simulation see the same pixels.
Axes: N pictures, H height, W width, M padded boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.anchors import fit_anchors
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.federation.streams.driving.recording import (
    Driving,
    Seen,
    find_recording,
    pixels_as_labelled,
)
from replayfleet.federation.streams.labelled_images import LazyImages
from replayfleet.federation.streams.resizing import resized
from replayfleet.models.specs import NARROW_WIDTH, DetectionSpec

IMAGE_HEIGHT = 192
IMAGE_WIDTH = 320
"""Pixels that a fleet's detector sees: a training step of the narrow one then takes some 25 ms a picture on a core."""

STRIDE = 16
"""Pixels between cells: at the published 32 a traffic light is a fraction of one."""

NUM_ANCHORS = 6
"""Fitted to the training pictures' boxes; fewer where fewer sizes differ."""


@dataclass(frozen=True, slots=True)
class DrivingPictures:
    """Pictures of one part (training or test) of recorded driving, in driving order, town after town.

    Attributes:
        images: (N, H, W, 3) uint8, RGB; ``images[indices]`` decodes what wasn't decoded yet.
        labels: (N, M, 5) float32, as of ``federation.methods.kit.records.RoundData``.
        class_names: K names.
        place_ids: (N,) int64, where each was taken, an index into ``place_names``.
        frames: (N,) int64, its frame: 0 is the town's first one, whichever part that belongs to.
        place_names: the towns.
        num_frames: frames of each town, both parts together.
    """

    noun: ClassVar[str] = "pictures"

    images: LazyImages | NDArray[np.uint8]
    labels: NDArray[np.float32]
    class_names: tuple[str, ...]
    place_ids: NDArray[np.int64]
    frames: NDArray[np.int64]
    place_names: tuple[str, ...]
    num_frames: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = [len(self.images), len(self.labels), len(self.place_ids), len(self.frames)]
        if len(set(counts)) != 1 or self.labels.ndim != 3 or self.labels.shape[2] != 5:
            raise ValueError(
                f"images, labels, places and frames are {counts} and labels {self.labels.shape}; "
                "expected equal numbers and labels (N, M, 5)"
            )

    def kinds(self) -> NDArray[np.int64]:
        """Return (N,) what a round's quota counts apart: pictures are all of one kind."""
        return np.zeros(len(self.labels), dtype=np.int64)

    def classes_of(self, indices: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the classes of what these pictures show, rising."""
        class_ids = self.labels[indices, :, 0]
        return tuple(np.unique(class_ids[class_ids >= 0]).astype(np.int64).tolist())

    def num_objects(self, indices: NDArray[np.int64]) -> int:
        """Return how many objects these pictures show."""
        return int((self.labels[indices, :, 0] >= 0).sum())


def read_driving_pictures(
    root: Path,
    *,
    towns: Sequence[str] = (),
    size: tuple[int, int] = (IMAGE_WIDTH, IMAGE_HEIGHT),
    width: int = NARROW_WIDTH,
    stride: int = STRIDE,
    num_anchors: int = NUM_ANCHORS,
) -> tuple[DrivingPictures, DrivingPictures, DetectionSpec] | None:
    """Return (train, test, task) of the recorded driving in a folder or in its ``carla/``; None if neither holds any.

    The task's anchors are fitted to the training pictures, its ``max_boxes`` are those of the fullest picture. Pictures
    are decoded when they are asked for.

    Args:
        root: the folder.
        towns: to take; all if none is named.
        size: width and height of the detector's pictures in pixels.
        width: of the detector.
        stride: of the detector.
        num_anchors: fewer where fewer sizes differ.

    Raises:
        SettingsError: The recording is incomplete or damaged, lacks a town, or one part shows nothing.
    """
    folder = find_recording(root)
    if folder is None:
        return None
    driving = Driving(folder)
    parts = driving.parts()
    if towns:
        driving.frames(towns)  # refuses a town that isn't there
        wanted = {driving.towns.index(town) for town in towns}
        parts = {name: [seen for seen in part if seen.place in wanted] for name, part in parts.items()}
    for name, part in parts.items():
        if not any(len(seen.found) for seen in part):
            raise SettingsError(f"recorded driving in {folder} has no box in its {name} frames")
    shares = np.concatenate(
        [
            ((seen.found.corners[:, 2:] - seen.found.corners[:, :2]).astype(np.float64) / seen.size).round(6).clip(1e-6)
            for seen in parts["train"]
        ]
    )
    anchors = fit_anchors(shares, min(num_anchors, len(np.unique(shares, axis=0))))
    most = max(len(seen.found) for part in parts.values() for seen in part)
    spec = DetectionSpec(3, size[1], size[0], driving.class_names, anchors, width, stride, most)
    train, test = (_part(part, driving, spec) for part in parts.values())
    return train, test, spec


def _part(frames: Sequence[Seen], driving: Driving, spec: DetectionSpec) -> DrivingPictures:
    size = (spec.image_height, spec.image_width)
    labels = [box_labels(seen.found.corners, seen.found.class_ids, seen.size, spec.max_boxes) for seen in frames]
    return DrivingPictures(
        LazyImages(
            (len(frames), *size, 3),
            lambda index: [(index, resized(pixels_as_labelled(frames[index].frame), *size))],
            [str(seen.frame.image) for seen in frames],
        ),
        np.stack(labels),
        driving.class_names,
        np.array([seen.place for seen in frames], dtype=np.int64),
        np.array([seen.position for seen in frames], dtype=np.int64),
        driving.towns,
        driving.num_frames(),
    )
