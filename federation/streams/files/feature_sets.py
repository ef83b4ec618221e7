"""Vectors that a frozen encoder said of texts, or of anything, as images: streams, methods and fleets take those.

Entry d of a vector is pixel d, row by row, of a grey image as large as needed; what is left over is grey. A byte is
left of each entry: the largest one of the training part in absolute value is 255 or 0, which a linear layer hardly
notices.

Axes: N vectors of D entries, S side of the image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import NO_ARRAYS, SettingsError
from replayfleet.federation.paths import open_regular, read_regular
from replayfleet.federation.streams.labelled_images import LabelledImages, Parts

FOLDER = "features"
CLASSES = "classes.txt"
EXPECTED = (
    f"{FOLDER}/ with train.npz and test.npz (features (N, D) and labels (N,) each), or "
    "{train,test}-{features,labels}.npy, and classes.txt with a class's name a line"
)


def read_features(root: Path, size: int) -> Parts | None:
    """Return both parts of the vectors in ``root/features``, or None if that isn't there.

    Args:
        root: a folder of data sets.
        size: S, at least the square root of D.

    Raises:
        SettingsError: A file is missing or damaged, shapes don't agree, or a vector doesn't fit the image.
    """
    folder = root / FOLDER
    if not folder.is_dir():
        return None
    try:
        lines = read_regular(folder / CLASSES).decode("utf-8-sig").splitlines()  # as Notepad writes it
        names = tuple(line.strip() for line in lines if line)
        (train, train_labels), (test, test_labels) = (_part(folder, part) for part in ("train", "test"))
    except NO_ARRAYS as error:
        raise SettingsError(f"features in {folder} can't be read ({error}); expected {EXPECTED}") from error
    for part, vectors, labels in (("train", train, train_labels), ("test", test, test_labels)):
        good = vectors.ndim == 2 and vectors.size > 0 and labels.shape == vectors.shape[:1]
        if not (good and vectors.shape[1] == train.shape[1] and np.isfinite(vectors).all()):
            raise SettingsError(
                f"{part} features in {folder} are {vectors.shape} with labels {labels.shape}; expected finite (N, D) "
                "with labels (N,), and one D"
            )
        if labels.min() < 0 or labels.max() >= len(names):
            found = f"{labels.min()} to {labels.max()}"
            raise SettingsError(f"{part} labels in {folder} are {found}, but {CLASSES} names {len(names)} from 0")
    if train.shape[1] > size * size:
        raise SettingsError(
            f"features in {folder} have {train.shape[1]} entries, {size} x {size} pixels hold fewer: 4096 at most, "
            "with --image-size 64"
        )
    scale = float(np.abs(train).max()) or 1.0
    return (
        LabelledImages(as_images(train, scale, size), train_labels, names),
        LabelledImages(as_images(test, scale, size), test_labels, names),
    )


def as_images(vectors: NDArray[np.floating], scale: float, size: int) -> NDArray[np.uint8]:
    """Return (N, D) as (N, S, S, 1) uint8: ``-scale`` is 0, ``scale`` 255, and beyond them it ends."""
    pixels = np.full((len(vectors), size * size), 127.5)
    pixels[:, : vectors.shape[1]] += 127.5 * np.clip(vectors / scale, -1, 1)
    images: NDArray[np.uint8] = np.rint(pixels).astype(np.uint8)
    return images.reshape(-1, size, size, 1)


def _part(folder: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    both = folder / f"{part}.npz"
    if both.exists():
        with open_regular(both) as file, np.load(file, allow_pickle=False) as found:
            features, labels = found["features"], found["labels"]
    else:
        arrays = []
        for name in ("features", "labels"):
            with open_regular(folder / f"{part}-{name}.npy") as file:
                arrays.append(np.load(file, allow_pickle=False))
        features, labels = arrays
    labels = np.asarray(labels)
    if labels.dtype.kind == "f" and not (labels == np.rint(labels)).all():
        raise ValueError(f"a label of {part} is no whole number")
    return np.asarray(features, dtype=np.float32), labels.astype(np.int64)
