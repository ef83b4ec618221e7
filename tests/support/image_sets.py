"""Small data sets: in memory, and as the files that people have."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.models.specs import TaskSpec

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def small_dataset(num_classes: int = 4, train_per_class: int = 12, test_per_class: int = 6) -> Dataset:
    """Return images whose every pixel is ten times their class id."""
    names = tuple(f"class-{class_id}" for class_id in range(num_classes))

    def part(per_class: int) -> LabelledImages:
        labels = np.tile(np.arange(num_classes, dtype=np.int64), per_class)
        images = np.broadcast_to((10 * labels).astype(np.uint8)[:, None, None, None], (len(labels), 28, 28, 1))
        return LabelledImages(np.ascontiguousarray(images), labels, names)

    return Dataset("small", part(train_per_class), part(test_per_class), TaskSpec(1, 28, names, generator_width=4))


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_fashion_mnist(
    folder: Path, train_per_class: int = 6, test_per_class: int = 2, *, packed: bool = True
) -> None:
    """Write the four idx files; every pixel of an image is ten times its class id."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, per_class in (("train", train_per_class), ("t10k", test_per_class)):
        labels = np.tile(np.arange(10), per_class)
        images = np.broadcast_to((10 * labels)[:, None, None], (len(labels), 28, 28))
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx_bytes(array)
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data, mtime=0) if packed else data)


def write_emnist(folder: Path, labels: dict[str, list[int]]) -> None:
    """Write the four files of ``emnist-byclass`` for ``train`` and ``test``; the first row of a stored image is 9."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, numbers in labels.items():
        images = np.zeros((len(numbers), 28, 28))
        images[:, 0, :] = 9
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array(numbers))):
            path = folder / f"emnist-byclass-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(array), mtime=0))


def picture(colour: tuple[int, int, int], size: int = 32, suffix: str = "png") -> bytes:
    return encoded(Image.new("RGB", (size, size), colour), suffix)


def striped(suffix: str = "png") -> bytes:
    """Return an image of 40 x 20 pixels: ten columns of red, twenty of green, ten of blue."""
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    image.paste((0, 255, 0), (10, 0, 30, 20))
    image.paste((0, 0, 255), (30, 0, 40, 20))
    return encoded(image, suffix)


def encoded(image: Image.Image, suffix: str = "png") -> bytes:
    stream = io.BytesIO()
    image.save(stream, {"png": "PNG", "jpg": "JPEG"}[suffix])
    return stream.getvalue()


def cifar_members(per_class: int = 2) -> dict[str, bytes]:
    """Return ``cifar10/{train,test}/<class>/NNNN.jpg``; the red of an image is ten times its class id."""
    return {
        f"cifar10/{part}/{name}/{number:04d}.jpg": picture((10 * class_id, 0, 200), suffix="jpg")
        for part in ("train", "test")
        for class_id, name in enumerate(CIFAR_CLASSES)
        for number in range(per_class)
    }


def write_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_tree(root: Path, members: dict[str, bytes]) -> None:
    for name, data in members.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def cifar_record(*labels: int) -> bytes:
    """Return one record: red 1 but 9 in the first row, green 2, blue 3."""
    return bytes(labels) + bytes([9] * 32 + [1] * 992 + [2] * 1024 + [3] * 1024)


def write_cifar_binary(path: Path, files: dict[str, bytes]) -> None:
    """Write files into a ``.tar.gz``, below a folder as the originals are."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"some-folder/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
