"""Folders of recorded driving whose every object is known: PNG pictures with a coloured patch in each box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.driving.crops import DrivingCrops

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
WIDTH, HEIGHT = 240, 48
SIDE = 16
"""Of every object, in pixels, unless a test says otherwise."""


def write_driving(
    root: Path, towns: Mapping[str, Sequence[Sequence[int]]], *, side: float = SIDE, suffix: str = ".png"
) -> Path:
    """Write a recording: town -> class ids of the objects of each of its frames, from left to right.

    An object's colour tells its class, and noise makes every picture another one.
    """
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    (root / "labels.txt").write_text("\n".join(CLASS_NAMES))
    noise = np.random.default_rng(0)
    for town, frames in towns.items():
        for number, class_ids in enumerate(frames):
            pixels = noise.integers(0, 60, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            lines = []
            for place, class_id in enumerate(class_ids):
                left, top = 4 + 20 * place, 12
                pixels[top : top + SIDE, left : left + SIDE] += np.array([40 * class_id, 120, 90], dtype=np.uint8)
                centre = ((left + SIDE / 2) / WIDTH, (top + SIDE / 2) / HEIGHT)
                lines.append(f"{class_id} {centre[0]:.8f} {centre[1]:.8f} {side / WIDTH:.8f} {side / 2 / HEIGHT:.8f}\n")
            stem = f"{town}_{60 * number:06d}"
            assert cv2.imwrite(str(root / f"images/{stem}{suffix}"), pixels)
            (root / f"labels/{stem}.txt").write_text("".join(lines))
    return root


def crops(root: Path) -> tuple[Dataset, DrivingCrops, DrivingCrops]:
    """Return the data set ``carla-crops`` of a recording, and both its parts."""
    data = load_dataset("carla-crops", data_root=root)
    assert isinstance(data.train, DrivingCrops)
    assert isinstance(data.test, DrivingCrops)
    return data, data.train, data.test
