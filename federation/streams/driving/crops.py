"""Objects that were met while driving, as a labelled image set: a square crop around each annotated box.

Crops stand in driving order, town after town, and know their town and their frame. They are made as an edge client's
view makes them (``square_crop``, then ``resized``), so a device and a simulation see the same pixels.
Axes: N crops, S side of a crop in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.crops import MIN_SIDE_PIXELS, square_crop, worth_a_crop
from replayfleet.federation.streams.driving.recording import (
    Driving,
    DrivingFrame,
    Seen,
    find_recording,
    pixels_as_labelled,
)
from replayfleet.federation.streams.labelled_images import LabelledImages, LazyImages
from replayfleet.federation.streams.resizing import resized


@dataclass(frozen=True, slots=True)
class DrivingCrops(LabelledImages):
    """Crops of one part (training or test) of recorded driving, in driving order, town after town.

    Attributes:
        place_ids: (N,) int64, where each was met, an index into ``place_names``.
        frames: (N,) int64, its frame: 0 is the town's first one, whichever part that belongs to.
        place_names: the towns.
        num_frames: frames of each town, both parts together.
    """

    noun: ClassVar[str] = "objects"

    place_ids: NDArray[np.int64]
    frames: NDArray[np.int64]
    place_names: tuple[str, ...]
    num_frames: tuple[int, ...]

    def __post_init__(self) -> None:
        LabelledImages.__post_init__(self)
        if not len(self.place_ids) == len(self.frames) == len(self.labels):
            raise ValueError(
                f"{len(self.labels)} crops but {len(self.place_ids)} places and {len(self.frames)} frames of them"
            )

    def kinds(self) -> NDArray[np.int64]:
        """Return (N,) what a round's quota counts apart: the classes."""
        return self.labels

    def classes_of(self, indices: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the classes of these crops, rising."""
        return tuple(np.unique(self.labels[indices]).tolist())

    def num_objects(self, indices: NDArray[np.int64]) -> int:
        """Return how many objects these crops show: one each."""
        return len(indices)


def read_driving_crops(root: Path, side: int, class_names: Sequence[str]) -> tuple[DrivingCrops, DrivingCrops] | None:
    """Return (train, test) of the recorded driving in a folder or in its ``carla/``, or None if neither holds any.

    Pictures are decoded when their crops are asked for.

    Args:
        root: the folder.
        side: S.
        class_names: what the recording's names must be.

    Raises:
        SettingsError: The recording is incomplete or damaged, or has other classes.
    """
    folder = find_recording(root)
    if folder is None:
        return None
    driving = Driving(folder)
    if driving.class_names != tuple(class_names):
        raise SettingsError(
            f"recorded driving in {folder} has classes {', '.join(driving.class_names)}; "
            f"expected {', '.join(class_names)}"
        )
    train, test = (_part(name, seen, driving, side) for name, seen in driving.parts().items())
    return train, test


def _part(name: str, frames: Sequence[Seen], driving: Driving, side: int) -> DrivingCrops:
    entries = [
        (seen, int(index)) for seen in frames for index in np.flatnonzero(worth_a_crop(seen.found.corners, seen.size))
    ]
    if not entries:
        raise SettingsError(
            f"recorded driving in {driving.root} has no object of {MIN_SIDE_PIXELS} pixels in its {name} frames"
        )
    return DrivingCrops(
        _pixels(entries, side),
        np.array([seen.found.class_ids[index] for seen, index in entries], dtype=np.int64),
        driving.class_names,
        np.array([seen.place for seen, _ in entries], dtype=np.int64),
        np.array([seen.position for seen, _ in entries], dtype=np.int64),
        driving.towns,
        driving.num_frames(),
    )


def _pixels(entries: Sequence[tuple[Seen, int]], side: int) -> LazyImages:
    """Crops (S, S, 3), each cut out with all others of its frame."""
    by_frame: dict[DrivingFrame, list[int]] = {}
    for place, (seen, _) in enumerate(entries):
        by_frame.setdefault(seen.frame, []).append(place)

    def cut(index: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        frame = entries[index][0].frame
        pixels = pixels_as_labelled(frame)
        for place in by_frame[frame]:
            seen, box = entries[place]
            yield place, resized(square_crop(pixels, seen.found.corners[box]), side)

    names = [f"{seen.frame.image} {seen.found.corners[box].tolist()}" for seen, box in entries]
    return LazyImages((len(entries), side, side, 3), cut, names)
