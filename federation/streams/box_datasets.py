"""Data sets whose pictures have boxes, and ``load_any_dataset``, which finds those and the labelled image sets.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.streams.datasets import (
    DATASETS,
    NAME_A_RECORDING,
    Dataset,
    dataset_kind,
    folders_to_search,
    load_dataset,
)
from replayfleet.federation.streams.driving.pictures import DrivingPictures, read_driving_pictures
from replayfleet.models.specs import DetectionSpec


@dataclass(frozen=True, slots=True)
class BoxDataset:
    """Both parts of a set of pictures with boxes, and the task that it poses to a fleet."""

    name: str
    train: DrivingPictures
    test: DrivingPictures
    task: DetectionSpec


AnyDataset: TypeAlias = Dataset | BoxDataset
"""What a simulation can run on."""

BoxReader: TypeAlias = Callable[[Path], "tuple[DrivingPictures, DrivingPictures, DetectionSpec] | None"]
"""Folder -> (train, test, task), or None if the folder doesn't hold the set."""

BOX_DATASETS: dict[str, BoxReader] = {"carla-boxes": read_driving_pictures}


def load_any_dataset(
    name: str, *, data_root: Path | None = None, image_size: int | None = None, download: bool = False
) -> AnyDataset:
    """Find and read a data set, with classes or with boxes; see ``load_dataset``.

    Raises:
        SettingsError: The set is unknown, absent (says how to get it), damaged, or not to be had in that size.
    """
    check_dataset(name)
    if name not in BOX_DATASETS:
        return load_dataset(name, data_root=data_root, image_size=image_size, download=download)
    if image_size is not None:
        raise SettingsError(f"data set {name} has pictures of one size of its own; leave --image-size out")
    places = folders_to_search(data_root)
    for place in places:
        found = BOX_DATASETS[name](place)
        if found is not None:
            return BoxDataset(name, *found)
    looked = ", ".join(str(place) for place in places)
    raise SettingsError(f"data set {name} not found (looked in {looked}); {NAME_A_RECORDING}")


def check_dataset(name: str) -> None:
    """Raise SettingsError if no data set has this name; names the nearest."""
    if name not in BOX_DATASETS and name not in DATASETS:
        raise SettingsError(f"unknown data set {name!r}{nearest(name, (*DATASETS, *BOX_DATASETS))}")


def has_boxes(name: str) -> bool:
    """Return whether a data set's pictures have boxes instead of a class each.

    Raises:
        SettingsError: No such data set; names the nearest.
    """
    check_dataset(name)
    return name in BOX_DATASETS


def default_image_size(name: str) -> int:
    """Return the side in pixels that a labelled image set has unless the operator asks for another; 0 of boxes."""
    return 0 if has_boxes(name) else dataset_kind(name).image_sizes[0]
