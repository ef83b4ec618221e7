"""Recorded driving as whole pictures with boxes: what a stream hands to a fleet that learns to find things.

Pictures stand in driving order, town after town, and know their town and their frame. They are made as an edge client's
view makes them (``resized``), so a device and a simulation see the same pixels.
Axes: N pictures, H height, W width, M padded boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.anchors import fit_anchors
from replayfleet.federation.streams.annotations import Annotation
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.federation.streams.driving.crops import TEST_EVERY
from replayfleet.federation.streams.driving.recording import Driving, DrivingFrame, find_recording, pixels_as_labelled
from replayfleet.federation.streams.files.picture_files import picture_size
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


def read_driving_pictures(root: Path) -> tuple[DrivingPictures, DrivingPictures, DetectionSpec] | None:
    """Return (train, test, task) of the recorded driving in a folder or in its ``carla/``; None if neither holds any.

    The task's anchors are fitted to the training pictures, its ``max_boxes`` are those of the fullest picture. Pictures
    are decoded when they are asked for.

    Raises:
        SettingsError: The recording is incomplete or damaged, or one part shows nothing.
    """
    folder = find_recording(root)
    if folder is None:
        return None
    driving = Driving(folder)
    parts = {"train": _Part(), "test": _Part()}
    for place, town in enumerate(driving.towns):
        for position, frame in enumerate(driving.frames([town])):
            is_test = position % TEST_EVERY == TEST_EVERY - 1
            parts["test" if is_test else "train"].add(driving, frame, place, position)
    for name, part in parts.items():
        if not any(len(found) for found in part.found):
            raise SettingsError(f"recorded driving in {folder} has no box in its {name} frames")
    spec = _task(driving.class_names, parts["train"], parts["test"])
    return parts["train"].pictures(driving, spec), parts["test"].pictures(driving, spec), spec


@dataclass(slots=True)
class _Part:
    """What is gathered of one part: an entry per picture."""

    sources: list[DrivingFrame] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    found: list[Annotation] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, driving: Driving, frame: DrivingFrame, place: int, position: int) -> None:
        """Take a frame."""
        size = picture_size(frame.image)
        self.sources.append(frame)
        self.sizes.append(size)
        self.found.append(driving.annotation(frame, size))
        self.places.append(place)
        self.positions.append(position)

    def shares(self) -> NDArray[np.float64]:
        """Return (boxes, 2): widths and heights of all boxes in shares of their pictures'."""
        pieces = [
            ((found.corners[:, 2:] - found.corners[:, :2]).astype(np.float64) / size).round(6)
            for found, size in zip(self.found, self.sizes, strict=True)
        ]
        return np.concatenate(pieces)

    def pictures(self, driving: Driving, spec: DetectionSpec) -> DrivingPictures:
        """Return what was gathered."""
        labels = [
            box_labels(found.corners, found.class_ids, size, spec.max_boxes)
            for found, size in zip(self.found, self.sizes, strict=True)
        ]
        return DrivingPictures(
            _PicturePixels(spec.image_height, spec.image_width, self.sources),
            np.stack(labels),
            driving.class_names,
            np.array(self.places, dtype=np.int64),
            np.array(self.positions, dtype=np.int64),
            driving.towns,
            tuple(len(driving.frames([town])) for town in driving.towns),
        )


class _PicturePixels:
    """N pictures, decoded when they are first taken; then kept."""

    def __init__(self, height: int, width: int, frames: Sequence[DrivingFrame]) -> None:
        self.shape = (len(frames), height, width, 3)
        self._frames = frames
        self._pixels: dict[int, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        wanted = np.asarray(indices).tolist()
        for index in wanted:
            if index not in self._pixels:
                self._pixels[index] = resized(pixels_as_labelled(self._frames[index]), self.shape[1], self.shape[2])
        return np.stack([self._pixels[index] for index in wanted])


def _task(class_names: tuple[str, ...], train: _Part, test: _Part) -> DetectionSpec:
    shares = train.shares()
    return DetectionSpec(
        3,
        IMAGE_HEIGHT,
        IMAGE_WIDTH,
        class_names,
        fit_anchors(shares, min(NUM_ANCHORS, len(np.unique(shares, axis=0)))),
        width=NARROW_WIDTH,
        stride=STRIDE,
        max_boxes=max(len(found) for found in (*train.found, *test.found)),
    )
