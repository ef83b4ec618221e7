"""Small recordings as files: pictures whose brightness is their number, label files, films, COCO files."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from replayfleet.edge_client.flow import Camera, Picture

CLASS_NAMES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
WIDTH, HEIGHT = 64, 40


def write_picture(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((HEIGHT, WIDTH, 3), (0, 2 * number, 200), dtype=np.uint8)  # BGR: much red, green counts
    assert cv2.imwrite(str(path), pixels)


def number_in(pixels: np.ndarray) -> int:
    """Return the number of a picture that ``write_picture`` or ``write_film`` wrote; RGB."""
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    red, green, _ = pixels.reshape(-1, 3).mean(axis=0)
    assert red > 150
    return round(green / 2)


def write_drive(root: Path, towns: Mapping[str, Sequence[int]], *, boxes: str = "0 0.5 0.5 0.25 0.5\n") -> Path:
    """Write a drive whose frames count 0, 1, 2 in the order of ``towns``, whatever their frame numbers are."""
    (root / "labels").mkdir(parents=True)
    (root / "labels.txt").write_text("\n".join(CLASS_NAMES))
    names = [f"{town}_{number:06d}" for town, numbers in towns.items() for number in numbers]
    for count, name in enumerate(names):
        write_picture(root / f"images/{name}.jpg", count)
        (root / f"labels/{name}.txt").write_text(boxes)
    return root


def write_film(path: Path, num_frames: int, rate_hz: float = 20.0) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), rate_hz, (WIDTH, HEIGHT))
    assert writer.isOpened()
    for number in range(num_frames):
        writer.write(np.full((HEIGHT, WIDTH, 3), (0, 10 * number, 200), dtype=np.uint8))
    writer.release()
    return path


def write_coco(path: Path, boxes: Mapping[str, Sequence[Sequence[float]]], **changes: Any) -> Path:
    """Write a COCO file: file name -> boxes (left, top, width, height), all vehicles."""
    images = [{"id": 7 + i, "file_name": name, "width": WIDTH, "height": HEIGHT} for i, name in enumerate(boxes)]
    annotations = [
        {"id": 0, "image_id": 7 + i, "category_id": 3, "bbox": list(box), "iscrowd": 0}
        for i, own in enumerate(boxes.values())
        for box in own
    ]
    categories = [{"id": 3, "name": "vehicle"}, {"id": 9, "name": "bike"}]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations} | changes))
    return path


def play(camera: Camera, most: int = 1000) -> list[Picture]:
    """Return a camera's pictures, at most so many."""
    stop = threading.Event()
    pictures = []
    for picture in camera.pictures(stop):
        pictures.append(picture)
        if len(pictures) == most:
            stop.set()
    return pictures


def carla_frames() -> Path:
    """Return the recorded CARLA frames, or skip the test.

    They lie in the folder that REPLAYFLEET_DATA names, or else in ``shared/data`` beside the checkout.
    """
    beside = Path(__file__).resolve().parents[3] / "shared/data"
    root = Path(os.environ.get("REPLAYFLEET_DATA", beside)) / "carla"
    if not root.is_dir():
        pytest.skip(
            f"needs the recorded CARLA frames: no folder {root}; REPLAYFLEET_DATA may name one that holds carla/"
        )
    return root
