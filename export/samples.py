"""Samples that an export measures with: calibration from files or replay, held data with labels, latents.

Replay lets a fleet calibrate without keeping one image: what a sub-generator draws stands for its class.
A file of images is ``.npz`` or ``.safetensors`` with ``images``, (N, C, H, W), float32 in [-1, 1] or uint8 from 0 to
255, and for held data ``labels``, (N,) class ids, or of a detector (N, M, 5): class id or -1 for no box, centre x and
y, width and height in shares of the picture.

Axes: N samples, C channels, H height, W width, M boxes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replayfleet.export.files import read_file
from replayfleet.export.parameters import read_parameters
from replayfleet.export.running.artefact import Array
from replayfleet.federation.errors import NO_ARRAYS, SettingsError, nearest
from replayfleet.federation.paths import expanded
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

_ARRAYS = ("images", "labels")
_PIXEL_SLACK = 1e-3
"""Pixels that a resize overshot by less are taken as they are."""
_MAX_SHARE = 2.0
"""Of a picture, as anchors have it: a box may stand over its edge. Numbers of pixels are larger."""


@dataclass(frozen=True, slots=True)
class Source:
    """One ``--calibration``: a file of images, or the sub-generator of a class.

    Attributes:
        path: of either.
        class_name: whose sub-generator it is; empty for images.
    """

    path: Path
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """Data that the model never saw.

    Attributes:
        images: (N, C, H, W) float32 in [-1, 1].
        labels: (N,) int64 class ids, or (N, M, 5) float32 boxes.
    """

    images: Array
    labels: Array


def parse_source(text: str, spec: AnyTaskSpec) -> Source:
    """Return what ``FILE`` or ``CLASS=FILE`` means.

    Raises:
        SettingsError: It is no path, the class is none of the task's, or a detector was given a sub-generator.
    """
    class_name, separator, path = text.partition("=")
    if not separator or Path(text).exists():
        return Source(expanded(text))
    if class_name not in spec.class_names:
        raise SettingsError(f"--calibration: unknown class {class_name!r}{nearest(class_name, spec.class_names)}")
    if isinstance(spec, DetectionSpec):
        raise SettingsError(
            f"--calibration: {text!r} is a sub-generator, which draws one thing and no picture for a detector; give a "
            "file of images"
        )
    return Source(expanded(path), class_name)


def read_images(path: Path, spec: AnyTaskSpec) -> Array:
    """Return the images of a file, (N, C, H, W) float32 in [-1, 1], N at least 1.

    Raises:
        SettingsError: The file isn't as this module says, or not for this task.
    """
    return _images(path, _read(path), spec)


def read_held(path: Path, spec: AnyTaskSpec) -> Held:
    """Return the images and labels of a file.

    Raises:
        SettingsError: The file isn't as this module says, or not for this task.
    """
    arrays = _read(path)
    images = _images(path, arrays, spec)
    labels = arrays.get("labels")
    if labels is None:
        raise SettingsError(f"{path}: has no 'labels', which the gate compares answers with")
    if isinstance(spec, DetectionSpec):
        if labels.ndim != 3 or labels.shape[::2] != (len(images), 5) or labels.dtype.kind not in "iuf":
            expected = f"({len(images)}, M, 5) numbers"
            raise SettingsError(f"{path}: labels are {labels.shape} {labels.dtype}, expected {expected}")
        boxes = labels.astype(np.float32)
        there = boxes[~(boxes[..., 0] < 0)]  # a class that is NaN is none, not the mark of no box
        _check_classes(path, there[:, 0], spec)
        sides = np.abs(there[:, 1:])
        if not (sides <= _MAX_SHARE).all():
            raise SettingsError(f"{path}: boxes reach {sides.max():g}, expected shares of the picture, 0 to 1")
        if not (there[:, 3:] > 0).all():
            raise SettingsError(
                f"{path}: a box is {there[:, 3:].min():g} wide or high, expected more than 0; class id -1 says no box"
            )
        return Held(images, boxes)
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise SettingsError(f"{path}: labels are {labels.shape} {labels.dtype}, expected ({len(images)},) integers")
    _check_classes(path, labels, spec)
    return Held(images, labels.astype(np.int64))


def latents(shape: tuple[int, ...], count: int, seed: int) -> NDArray[np.float32]:
    """Return (count, *shape) standard normal numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)


def shuffled(images: Array, seed: int) -> Array:
    """Return the images in an order that depends on the seed alone."""
    result: Array = images[np.random.default_rng(seed).permutation(len(images))]
    return result


def shares(count: int, num_parts: int) -> Sequence[int]:
    """Return how many of ``count`` each part gives; they differ by at most one."""
    return [count // num_parts + (index < count % num_parts) for index in range(num_parts)]


def _read(path: Path) -> dict[str, Array]:
    if path.suffix != ".npz":
        return read_parameters(path)
    if not zipfile.is_zipfile(path):
        read_file(path)  # says so if it isn't there
        raise SettingsError(f"{path}: not an .npz file")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in _ARRAYS if name in file.files}
    except NO_ARRAYS as error:
        raise SettingsError(f"{path}: can't be read as .npz ({error})") from error


def _images(path: Path, arrays: dict[str, Array], spec: AnyTaskSpec) -> Array:
    images = arrays.get("images")
    if images is None:
        raise SettingsError(f"{path}: has no 'images'; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    if images.shape[1:] != spec.image_shape or not len(images):
        expected = ", ".join(str(side) for side in spec.image_shape)
        raise SettingsError(f"{path}: images are {images.shape}, expected (N, {expected}) with N >= 1")
    if images.dtype == np.uint8:
        normalised: Array = images.astype(np.float32) / np.float32(127.5) - np.float32(1)
        return normalised
    if images.dtype != np.float32:
        raise SettingsError(f"{path}: images are {images.dtype}, expected float32 in [-1, 1] or uint8")
    if not (largest := float(np.abs(images).max())) <= 1 + _PIXEL_SLACK:
        raise SettingsError(f"{path}: float32 pixels reach {largest:g}, expected -1 to 1 (or uint8, 0 to 255)")
    return images


def _check_classes(path: Path, ids: Array, spec: AnyTaskSpec) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < spec.num_classes and (ids == np.round(ids)).all()):
        found = f"labels are {ids.min():g} to {ids.max():g}"
        raise SettingsError(f"{path}: {found}, expected class ids from 0 to {spec.num_classes - 1}")
