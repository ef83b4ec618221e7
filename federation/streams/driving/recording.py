"""Recorded driving with boxes, as simulators leave it: pictures and labels by town and frame number.

``images/TownNN_FFFFFF.jpg`` (or ``.png``), ``labels/TownNN_FFFFFF.txt`` (YOLO), ``labels.txt`` with the class names.
Frame numbers rise in driving order. Only names are read here; pictures and boxes are read when somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.streams.annotations import Annotation, read_class_names, read_yolo
from replayfleet.federation.streams.files.picture_files import list_pictures, picture_size, read_picture

TEST_EVERY = 4
"""The last of every so many frames of a town is held out for tests."""

_PARTS = ("images", "labels", "labels.txt")
_NAME = re.compile(r"(?P<town>[A-Za-z][A-Za-z0-9_-]*)_(?P<number>\d{1,12})")
_EXPECTED = "expected images/Town01_001020.jpg, labels/Town01_001020.txt and labels.txt with the class names"


@dataclass(frozen=True, slots=True)
class DrivingFrame:
    """One recorded frame.

    Attributes:
        town: the part of its name before the number.
        number: rises in driving order.
        image: its picture.
        labels: its boxes, a YOLO label file.
    """

    town: str
    number: int
    image: Path
    labels: Path

    def pixels(self) -> NDArray[np.uint8]:
        """Return the picture as (H, W, 3) uint8, RGB; raises SettingsError if it is damaged."""
        return read_picture(self.image)


@dataclass(frozen=True, slots=True)
class Seen:
    """A frame with its boxes, and where it stands in the recording.

    Attributes:
        frame: of the recording.
        place: the town, an index into ``Driving.towns``.
        position: counted from the town's first frame.
        size: (width, height) of the picture in pixels.
        found: its boxes in pixels.
    """

    frame: DrivingFrame
    place: int
    position: int
    size: tuple[int, int]
    found: Annotation


def find_recording(root: Path) -> Path | None:
    """Return the folder of recorded driving: ``root/carla`` or ``root`` itself; None if neither holds any."""
    folders = (root / "carla", root)
    return next((folder for folder in folders if all((folder / part).exists() for part in _PARTS)), None)


def pixels_as_labelled(frame: DrivingFrame) -> NDArray[np.uint8]:
    """Return a frame's picture as (H, W, 3) uint8, RGB, upright as its boxes are.

    Raises:
        SettingsError: It is damaged, or was turned as it was decoded: its boxes would not fit.
    """
    pixels, size = frame.pixels(), picture_size(frame.image)
    if (pixels.shape[1], pixels.shape[0]) != size:
        raise SettingsError(
            f"picture {frame.image} decodes to {pixels.shape[1]} x {pixels.shape[0]} pixels, but its head says "
            f"{size[0]} x {size[1]}; save it without an orientation mark"
        )
    return pixels


class Driving:
    """The index of a folder of recorded driving.

    Args:
        root: the folder that holds ``images/``, ``labels/`` and ``labels.txt``.

    Attributes:
        root: that folder.
        class_names: what the boxes' class ids mean.
        towns: towns in the order of their names.

    Raises:
        SettingsError: Something is missing; says what and where.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise SettingsError(f"folder of recorded driving {str(root)!r} doesn't exist; {_EXPECTED}")
        for folder in ("images", "labels"):
            if not (root / folder).is_dir():
                raise SettingsError(f"recorded driving in {root} has no folder {folder}/; {_EXPECTED}")
        if not (root / "labels.txt").is_file():
            raise SettingsError(f"recorded driving in {root} has no labels.txt; {_EXPECTED}")
        self.root = root
        self.class_names = read_class_names(root / "labels.txt")
        frames = _index(root)
        self.towns = tuple(sorted(frames))
        self._frames = {town: tuple(frames[town][number] for number in sorted(frames[town])) for town in self.towns}

    def frames(self, towns: Sequence[str] = ()) -> tuple[DrivingFrame, ...]:
        """Return the frames of these towns, one town after the other, in driving order; of all towns if none is named.

        Raises:
            SettingsError: The recording has no such town (names the nearest).
        """
        for town in towns:
            if town not in self._frames:
                raise SettingsError(f"recorded driving in {self.root} has no town {town!r}{nearest(town, self.towns)}")
        return tuple(frame for town in (towns or self.towns) for frame in self._frames[town])

    def annotation(self, frame: DrivingFrame, size: tuple[int, int]) -> Annotation:
        """Return a frame's boxes in pixels, for a picture of ``size`` (width, height).

        Raises:
            SettingsError: The label file is damaged; names the line.
        """
        return read_yolo(frame.labels, len(self.class_names), size)

    def parts(self) -> dict[str, list[Seen]]:
        """Return ``train`` and ``test`` -> their frames in driving order, town after town; no picture is decoded.

        Raises:
            SettingsError: A label file or the head of a picture is damaged; names the line.
        """
        parts: dict[str, list[Seen]] = {"train": [], "test": []}
        for place, town in enumerate(self.towns):
            for position, frame in enumerate(self._frames[town]):
                size = picture_size(frame.image)
                found = self.annotation(frame, size)
                part = "test" if position % TEST_EVERY == TEST_EVERY - 1 else "train"
                parts[part].append(Seen(frame, place, position, size, found))
        return parts

    def num_frames(self) -> tuple[int, ...]:
        """Return how many frames each town has, both parts together."""
        return tuple(len(self._frames[town]) for town in self.towns)


def _index(root: Path) -> dict[str, dict[int, DrivingFrame]]:
    """Return town -> frame number -> frame."""
    labels = {path.stem: path for path in (root / "labels").glob("*.txt")}
    towns: dict[str, dict[int, DrivingFrame]] = {}
    without: list[Path] = []
    images = list_pictures(root / "images")
    for image in images:
        match = _NAME.fullmatch(image.stem)
        if match is None:
            raise SettingsError(f"picture {image} has no town and number in its name; {_EXPECTED}")
        if image.stem not in labels:
            without.append(image)
            continue
        town, number = match["town"], int(match["number"])
        frames = towns.setdefault(town, {})
        if number in frames:
            raise SettingsError(f"pictures {frames[number].image} and {image} are the same frame; keep one")
        frames[number] = DrivingFrame(town, number, image, labels[image.stem])
    if not images:
        raise SettingsError(f"recorded driving in {root} has no pictures in images/; {_EXPECTED}")
    if without:
        raise SettingsError(
            f"{len(without)} of {len(images)} pictures in {root / 'images'} have no label file, first "
            f"{without[0].name}; expected labels/{without[0].stem}.txt, empty where the picture shows nothing"
        )
    alone = sorted(stem for stem in labels.keys() - {image.stem for image in images} if _NAME.fullmatch(stem))
    if alone:
        raise SettingsError(
            f"{len(alone)} label files in {root / 'labels'} have no picture, first {alone[0]}.txt; "
            f"expected images/{alone[0]}.jpg"
        )
    return towns
