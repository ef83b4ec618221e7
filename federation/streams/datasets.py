"""The data sets by name: where each is found, and what task it poses to a fleet.

Needs no torch, so a device without it can read them too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.service.presets import TASKS
from replayfleet.federation.streams.driving.crops import read_driving_crops
from replayfleet.federation.streams.files import cifar_binary
from replayfleet.federation.streams.files.idx_sets import download_idx_set, read_idx_set
from replayfleet.federation.streams.files.image_trees import read_folder, read_zip
from replayfleet.federation.streams.files.imagenet import read_imagenet_10, read_tiny_imagenet_100
from replayfleet.federation.streams.labelled_images import LabelledImages, Parts
from replayfleet.models.specs import TaskSpec

DATA_ROOT_VARIABLE = "REPLAYFLEET_DATA"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package ``dataset-fashion-mnist`` puts its four files."""

_FOLDER_MODELS = {32: ("cifar", 64), 64: ("imagenet", 128)}
"""Image size -> stem and sub-generator width of sets of image files, as in the paper's CIFAR and ImageNet series."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Both parts of a labelled image set, and the task that it poses to a fleet."""

    name: str
    train: LabelledImages
    test: LabelledImages
    task: TaskSpec


Reader: TypeAlias = Callable[[Path, int], "Parts | None"]
"""(folder, image size) -> (train, test), or None if the folder doesn't hold the set."""


@dataclass(frozen=True, slots=True)
class DatasetKind:
    """What is known of a data set before it is read.

    Attributes:
        image_sizes: sides in pixels that it can be had in; the first is the default.
        read: how to read it from one folder.
        how_to_get: the end of the sentence "not found; ...".
        places: folders to look in after the operator's own.
        download: fetches the set into a folder, or None where that would need unpickling or a login.
    """

    image_sizes: tuple[int, ...]
    read: Reader
    how_to_get: str
    places: tuple[Path, ...] = ()
    download: Callable[[Path], None] | None = None


def load_dataset(
    name: str, *, data_root: Path | None = None, image_size: int | None = None, download: bool = False
) -> Dataset:
    """Find and read a data set.

    Looks in ``data_root``, then in the folder that the environment names, then where Debian and an earlier download
    put it. Pixels of image files are decoded later, when they are needed.

    Args:
        name: a key of ``DATASETS``.
        data_root: the operator's own folder of data sets (of ``folder``: the set itself).
        image_size: side in pixels; None is the set's own.
        download: fetch what wasn't found, where the set can be fetched.

    Raises:
        SettingsError: The set is unknown, absent (says how to get it), or damaged (says which file).
    """
    kind = dataset_kind(name)
    size = kind.image_sizes[0] if image_size is None else image_size
    if size not in kind.image_sizes:
        sizes = " or ".join(str(side) for side in kind.image_sizes)
        raise SettingsError(f"data set {name} has images of {sizes} pixels, not {size}")
    own = _own_folders(data_root)
    places = folders_to_search(data_root, kind.places)
    parts = _first(kind, places, size)
    if parts is None and download and kind.download is not None:
        kind.download(own[0] if own else _cache())
        parts = _first(kind, places, size)
    if parts is None:
        looked = ", ".join(str(place) for place in places)
        raise SettingsError(f"data set {name} not found (looked in {looked}); {kind.how_to_get}")
    return Dataset(name, *parts, _task(name, size, parts[0].class_names))


def dataset_kind(name: str) -> DatasetKind:
    """Return what is known of a data set before it is read.

    Raises:
        SettingsError: No such data set; names the nearest.
    """
    if name not in DATASETS:
        raise SettingsError(f"unknown data set {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]


def folders_to_search(data_root: Path | None, places: Sequence[Path] = ()) -> list[Path]:
    """Return the folders that may hold a data set: the operator's own, ``places``, and that of earlier downloads.

    Raises:
        SettingsError: ``data_root`` is no folder.
    """
    return [*_own_folders(data_root), *places, _cache()]


def _task(name: str, size: int, class_names: tuple[str, ...]) -> TaskSpec:
    if name in TASKS:
        return TASKS[name]
    stem, width = _FOLDER_MODELS[size]
    return TaskSpec(3, size, class_names, stem, width)


def _own_folders(data_root: Path | None) -> list[Path]:
    folders = []
    if data_root is not None:
        if not data_root.is_dir():
            raise SettingsError(f"data root {data_root} is no folder; expected one that holds the data set")
        folders.append(data_root)
    if os.environ.get(DATA_ROOT_VARIABLE):
        folders.append(Path(os.environ[DATA_ROOT_VARIABLE]))
    return folders


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replayfleet" / "data"


def _first(kind: DatasetKind, places: Sequence[Path], size: int) -> Parts | None:
    for place in places:
        parts = kind.read(place, size)
        if parts is not None:
            return parts
    return None


def _read_fashion_mnist(root: Path, _size: int) -> Parts | None:
    return read_idx_set(root, (".", "fashion-mnist", "FashionMNIST/raw"), TASKS["fashion-mnist"].class_names)


def _read_mnist(root: Path, _size: int) -> Parts | None:
    return read_idx_set(root, ("mnist", "MNIST/raw"), TASKS["mnist"].class_names)


def _read_emnist_byclass(root: Path, _size: int) -> Parts | None:
    prefixes = ("emnist-byclass-train", "emnist-byclass-test")
    places = (".", "emnist", "gzip", "EMNIST/raw")
    return read_idx_set(root, places, TASKS["emnist-byclass"].class_names, prefixes, transposed=True)


def _read_cifar_100(root: Path, _size: int) -> Parts | None:
    return cifar_binary.read_cifar_binary(root, cifar_binary.CIFAR_100, TASKS["cifar-100"].class_names)


def _read_cifar_10(root: Path, size: int) -> Parts | None:
    class_names = TASKS["cifar-10"].class_names
    if (root / "cifar10-images.zip").is_file():
        parts: Parts | None = read_zip(root / "cifar10-images.zip", size)
    elif (root / "cifar10").is_dir():
        parts = read_folder(root / "cifar10", size)
    else:
        parts = cifar_binary.read_cifar_binary(root, cifar_binary.CIFAR_10, class_names)
    if parts is not None and parts[0].class_names != class_names:
        found = ", ".join(parts[0].class_names)
        raise SettingsError(f"the cifar-10 images in {root} have classes {found}; expected {', '.join(class_names)}")
    return parts


def _read_carla_crops(root: Path, size: int) -> Parts | None:
    return read_driving_crops(root, size, TASKS["carla-crops"].class_names)


_NAME_A_FOLDER = f"name a folder with --data-root or {DATA_ROOT_VARIABLE} that holds"

NAME_A_RECORDING = (
    f"{_NAME_A_FOLDER} recorded driving, or carla/ with it: images/Town01_001020.jpg, labels/Town01_001020.txt "
    "(YOLO) and labels.txt with the class names"
)
"""The end of the sentence "not found; ..." for data sets that are made of recorded driving."""

DATASETS: dict[str, DatasetKind] = {
    "fashion-mnist": DatasetKind(
        image_sizes=(28,),
        read=_read_fashion_mnist,
        how_to_get=(
            "get it with `apt install dataset-fashion-mnist`, or let torchvision fetch it (--download), "
            f"or {_NAME_A_FOLDER} its four idx files"
        ),
        places=(DEBIAN_FASHION_MNIST,),
        download=functools.partial(download_idx_set, "FashionMNIST"),
    ),
    "mnist": DatasetKind(
        image_sizes=(28,),
        read=_read_mnist,
        how_to_get=f"let torchvision fetch it (--download), or {_NAME_A_FOLDER} mnist/ with its four idx files",
        download=functools.partial(download_idx_set, "MNIST"),
    ),
    "emnist-byclass": DatasetKind(
        image_sizes=(28,),
        read=_read_emnist_byclass,
        how_to_get=(
            f"let torchvision fetch it (--download, 560 MB), or {_NAME_A_FOLDER} "
            "emnist-byclass-{train,test}-{images-idx3,labels-idx1}-ubyte.gz from "
            "https://www.nist.gov/itl/products-and-services/emnist-dataset"
        ),
        download=functools.partial(download_idx_set, "EMNIST", split="byclass"),
    ),
    "cifar-10": DatasetKind(
        image_sizes=(32,),
        read=_read_cifar_10,
        how_to_get=(
            f"{_NAME_A_FOLDER} cifar10-images.zip or cifar10/ (both with {{train,test}}/<class>/*.png or *.jpg), "
            "or cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"
        ),
    ),
    "cifar-100": DatasetKind(
        image_sizes=(32,),
        read=_read_cifar_100,
        how_to_get=(
            f"{_NAME_A_FOLDER} cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, "
            "or cifar-100-binary/ with its train.bin and test.bin"
        ),
    ),
    "imagenet-10": DatasetKind(
        image_sizes=(64,),
        read=read_imagenet_10,
        how_to_get=f"{_NAME_A_FOLDER} imagenet-10/ with ten class folders of ILSVRC2012's training images",
    ),
    "tinyimagenet-100": DatasetKind(
        image_sizes=(64,),
        read=read_tiny_imagenet_100,
        how_to_get=(
            f"{_NAME_A_FOLDER} tiny-imagenet-200/, unpacked from http://cs231n.stanford.edu/tiny-imagenet-200.zip"
        ),
    ),
    "carla-crops": DatasetKind(
        image_sizes=(32,),
        read=_read_carla_crops,
        how_to_get=NAME_A_RECORDING,
    ),
    "folder": DatasetKind(
        image_sizes=(32, 64),
        read=read_folder,
        how_to_get=f"{_NAME_A_FOLDER} {{train,test}}/<class>/*.png (or *.jpg), or <class>/*.png to be split",
    ),
}
