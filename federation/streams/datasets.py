"""The data sets by name: where each is found, and what task it poses to a fleet.

Needs no torch, so a device without it can read them too. ``ALL_DATASETS`` knows those of other packages too
(``federation.extensions``), and is where a name is looked up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from replayfleet.federation.errors import SettingsError, nearest, told
from replayfleet.federation.extensions import DATASETS_GROUP, Extended
from replayfleet.federation.paths import expanded
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.streams.driving.crops import read_driving_crops
from replayfleet.federation.streams.driving.pictures import DrivingPictures, read_driving_pictures
from replayfleet.federation.streams.files import cifar_binary
from replayfleet.federation.streams.files.feature_sets import EXPECTED, read_features
from replayfleet.federation.streams.files.idx_sets import download_idx_set, read_idx_set
from replayfleet.federation.streams.files.image_trees import read_folder, read_zip
from replayfleet.federation.streams.files.imagenet import read_imagenet_10, read_tiny_imagenet_100
from replayfleet.federation.streams.labelled_images import LabelledImages, Parts
from replayfleet.federation.streams.turned import turned, turned_names
from replayfleet.models.specs import DetectionSpec, TaskSpec

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


@dataclass(frozen=True, slots=True)
class BoxDataset:
    """Both parts of a set of pictures with boxes, and the task that it poses to a fleet."""

    name: str
    train: DrivingPictures
    test: DrivingPictures
    task: DetectionSpec


AnyDataset: TypeAlias = Dataset | BoxDataset
"""What a simulation can run on."""

Reader: TypeAlias = Callable[[Path, int], "Parts | None"]
"""(folder, image size) -> (train, test), or None if the folder doesn't hold the set."""

BoxReader: TypeAlias = Callable[[Path], "tuple[DrivingPictures, DrivingPictures, DetectionSpec] | None"]
"""Folder -> (train, test, task), or None if the folder doesn't hold the set."""


@dataclass(frozen=True, slots=True)
class DatasetKind:
    """What is known of a data set before it is read.

    Attributes:
        image_sizes: sides in pixels that it can be had in; the first is the default.
        read: how to read it from one folder.
        how_to_get: the end of the sentence "not found; ...".
        places: folders to look in after the operator's own.
        download: fetches the set into a folder, or None where that would need unpickling or a login.
        task: what it poses to a fleet; None if ``TASKS`` says it, or the names of its folders are those of the classes.
    """

    image_sizes: tuple[int, ...]
    read: Reader
    how_to_get: str
    places: tuple[Path, ...] = ()
    download: Callable[[Path], None] | None = None
    task: TaskSpec | None = None


def load_dataset(
    name: str, *, data_root: Path | None = None, image_size: int | None = None, download: bool = False
) -> Dataset:
    """Find and read a data set.

    Looks in ``data_root``, then in the folder that the environment names, then where Debian and an earlier download
    put it. Pixels of image files are decoded later, when they are needed.

    Args:
        name: a key of ``ALL_DATASETS``.
        data_root: the operator's own folder of data sets (of ``folder``: the set itself).
        image_size: side in pixels; None is the set's own.
        download: fetch what wasn't found, where the set can be fetched.

    Raises:
        SettingsError: The set is unknown, absent (says how to get it), or damaged (says which file).
    """
    kind = ALL_DATASETS.named(name)
    size = kind.image_sizes[0] if image_size is None else image_size
    if size not in kind.image_sizes:
        sizes = " or ".join(str(side) for side in kind.image_sizes)
        raise SettingsError(f"data set {name} has images of {sizes} pixels, not {size}")
    own = _own_folders(data_root)
    places = [*own, *kind.places, *_cache()]

    def parts() -> Parts | None:
        return next((found for place in places if (found := _read(name, kind, place, size)) is not None), None)

    found = parts()
    if found is None and download and kind.download is not None:
        folder = next(iter([*own, *_cache()]), None)
        if folder is None:
            raise SettingsError(
                f"no folder to download {name} into: this user has no home of its own; give one with --data-root"
            )
        with _faults_named(name, "download(folder)", folder):
            kind.download(folder)
        found = parts()
    if found is None:
        raise _not_found(name, places, kind.how_to_get)
    try:
        task = _task(name, kind, size, tuple(found[0].class_names))
    except ValueError as error:
        raise SettingsError(f"data set {name}: {error}") from error
    if name not in DATASETS:
        try:
            _check_added(name, found, task)
        except (AttributeError, TypeError, IndexError) as error:  # a list in an array's place, for one
            raise SettingsError(f"data set {name}, of an installed package, holds no arrays: {error}") from error
    return Dataset(name, *found, task)


@contextlib.contextmanager
def _faults_named(name: str, call: str, place: Path) -> Iterator[None]:
    """Have what another package's data set raises say whose it is."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if name in DATASETS or isinstance(error, SettingsError):
            raise
        raise SettingsError(
            f"data set {name}, of an installed package: {call} raised {told(error)}; the folder was {place}"
        ) from error


def _read(name: str, kind: DatasetKind, place: Path, size: int) -> Parts | None:
    with _faults_named(name, f"read(folder, {size})", place):
        found = kind.read(place, size)
    is_parts = isinstance(found, tuple) and [type(part) for part in found] == [LabelledImages] * 2
    if name in DATASETS or found is None or is_parts:
        return found
    gave = ", ".join(type(part).__name__ for part in found) if isinstance(found, tuple) else type(found).__name__
    raise SettingsError(
        f"data set {name}, of an installed package: read gave {gave}, expected a tuple of two LabelledImages, for "
        "training and for testing, or None where the folder doesn't hold the set"
    )


def _check_added(name: str, parts: Parts, task: TaskSpec) -> None:
    """Raise SettingsError unless what a package's data set holds is of its task."""
    channels, height, width = task.image_shape
    expected = f"(N, {height}, {width}, {channels}) uint8"
    for part, one in zip(("train", "test"), parts, strict=True):
        if isinstance(one.images, (list, tuple)):
            raise SettingsError(
                f"data set {name}, of an installed package: {part} images are a {type(one.images).__name__}, expected "
                "an array"
            )
        if tuple(one.class_names) != task.class_names:
            named = f"classes {', '.join(map(str, one.class_names))}"
            raise SettingsError(
                f"data set {name}, of an installed package: its {part} part has {named}, expected those of its task, "
                f"in their order: {', '.join(task.class_names)}"
            )
        some = np.asarray(one.images[np.arange(min(1, len(one.images)))])
        if tuple(one.images.shape[1:]) != (height, width, channels) or some.dtype != np.uint8:
            shape = f"{tuple(one.images.shape)} {some.dtype}"
            raise SettingsError(f"data set {name}, of an installed package: {part} images are {shape}, not {expected}")
        if not len(one.labels):
            raise SettingsError(f"data set {name}, of an installed package: its {part} part has no samples")
        if one.labels.dtype != np.int64 or one.labels.ndim != 1:
            shape = f"{one.labels.shape} {one.labels.dtype}"
            raise SettingsError(f"data set {name}, of an installed package: {part} labels are {shape}, not (N,) int64")


def load_any_dataset(
    name: str, *, data_root: Path | None = None, image_size: int | None = None, download: bool = False
) -> AnyDataset:
    """Find and read a data set, with classes or with boxes; see ``load_dataset``.

    Raises:
        SettingsError: The set is unknown, absent (says how to get it), damaged, or not to be had in that size.
    """
    if not has_boxes(name):
        return load_dataset(name, data_root=data_root, image_size=image_size, download=download)
    if image_size is not None:
        raise SettingsError(f"data set {name} has pictures of one size of its own; leave --image-size out")
    places = [*_own_folders(data_root), *_cache()]
    for place in places:
        try:
            found = BOX_DATASETS[name](place)
        except ValueError as error:  # no task has such classes
            raise SettingsError(f"data set {name}: {error}") from error
        if found is not None:
            return BoxDataset(name, *found)
    raise _not_found(name, places, NAME_A_RECORDING)


def has_boxes(name: str) -> bool:
    """Return whether a data set's pictures have boxes instead of a class each.

    Raises:
        SettingsError: No such data set; names the nearest.
    """
    if name not in BOX_DATASETS and name not in ALL_DATASETS:
        raise SettingsError(f"unknown data set {name!r}{nearest(name, (*ALL_DATASETS, *BOX_DATASETS))}")
    return name in BOX_DATASETS


def default_image_size(name: str) -> int:
    """Return the side in pixels that a labelled image set has unless the operator asks for another; 0 of boxes."""
    return 0 if has_boxes(name) else ALL_DATASETS[name].image_sizes[0]


def task_for(name: str) -> TaskSpec:
    """Return the task that a data set poses, without reading the set.

    Raises:
        SettingsError: No such data set, or one whose folders name its classes; names the nearest that will do.
    """
    task = TASKS.get(name) or (ALL_DATASETS[name].task if name in ALL_DATASETS else None)
    if task is None:
        usable = {*TASKS, *ALL_DATASETS} - (DATASETS.keys() - TASKS.keys())
        raise SettingsError(f"unknown data set {name!r}{nearest(name, usable)}")
    return task


def _not_found(name: str, places: Sequence[Path], how_to_get: str) -> SettingsError:
    looked = ", ".join(str(place) for place in places) or "no folder"
    return SettingsError(f"data set {name} not found (looked in {looked}); {how_to_get}")


def _task(name: str, kind: DatasetKind, size: int, class_names: tuple[str, ...]) -> TaskSpec:
    if name in TASKS:
        return TASKS[name]
    if kind.task is not None:
        if class_names != kind.task.class_names:
            raise SettingsError(f"data set {name} has classes {class_names}, its task {kind.task.class_names}")
        return kind.task
    if name == "features":
        return TaskSpec(1, size, class_names, architecture="linear")
    if size not in _FOLDER_MODELS:
        raise SettingsError(
            f"data set {name} names no task, and has images of {size} pixels; without a task they are "
            f"{', '.join(map(str, _FOLDER_MODELS))}"
        )
    stem, width = _FOLDER_MODELS[size]
    return TaskSpec(3, size, class_names, stem, width)


def _own_folders(data_root: Path | None) -> list[Path]:
    folders = []
    if data_root is not None:
        if not data_root.is_dir():
            raise SettingsError(f"data root {data_root} is no folder; expected one that holds the data set")
        folders.append(data_root)
    if os.environ.get(DATA_ROOT_VARIABLE):
        folders.append(expanded(os.environ[DATA_ROOT_VARIABLE]))
    return folders


def _cache() -> list[Path]:
    """Where downloads go that nobody named a folder for; nowhere for a user of a container who has no home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replayfleet" / "data"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            cache.stat()
    except (RuntimeError, PermissionError):
        return []
    return [cache]


def _idx(name: str, places: Sequence[str], **how: Any) -> Reader:
    """Return what reads four idx files from one of these places below a folder."""
    return lambda root, _size: read_idx_set(root, places, TASKS[name].class_names, **how)


def _all_turned(read: Reader) -> Reader:
    """Return what reads a set of square images with each quarter turn of a class as a class of its own."""

    def both(root: Path, size: int) -> Parts | None:
        parts = read(root, size)
        return None if parts is None else (turned(parts[0]), turned(parts[1]))

    return both


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


_NAME_A_FOLDER = f"name a folder with --data-root or {DATA_ROOT_VARIABLE} that holds"

NAME_A_RECORDING = (
    f"{_NAME_A_FOLDER} recorded driving, or carla/ with it: images/Town01_001020.jpg, labels/Town01_001020.txt "
    "(YOLO) and labels.txt with the class names"
)
"""The end of the sentence "not found; ..." for data sets that are made of recorded driving."""

BOX_DATASETS: dict[str, BoxReader] = {"carla-boxes": read_driving_pictures}

_FASHION_MNIST = DatasetKind(
    image_sizes=(28,),
    read=_idx("fashion-mnist", (".", "fashion-mnist", "FashionMNIST/raw")),
    how_to_get=(
        "get it with `apt install dataset-fashion-mnist`, or let torchvision fetch it (--download), "
        f"or {_NAME_A_FOLDER} its four idx files"
    ),
    places=(DEBIAN_FASHION_MNIST,),
    download=functools.partial(download_idx_set, "FashionMNIST"),
)

DATASETS: dict[str, DatasetKind] = {
    "fashion-mnist": _FASHION_MNIST,
    "fashion-mnist-turned": dataclasses.replace(
        _FASHION_MNIST,
        read=_all_turned(_FASHION_MNIST.read),
        task=TaskSpec(1, 28, turned_names(TASKS["fashion-mnist"].class_names), "cifar", 16),
    ),
    "mnist": DatasetKind(
        image_sizes=(28,),
        read=_idx("mnist", ("mnist", "MNIST/raw")),
        how_to_get=f"let torchvision fetch it (--download), or {_NAME_A_FOLDER} mnist/ with its four idx files",
        download=functools.partial(download_idx_set, "MNIST"),
    ),
    "emnist-byclass": DatasetKind(
        image_sizes=(28,),
        read=_idx(
            "emnist-byclass",
            (".", "emnist", "gzip", "EMNIST/raw"),
            prefixes=("emnist-byclass-train", "emnist-byclass-test"),
            transposed=True,
        ),
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
        read=lambda root, _size: cifar_binary.read_cifar_binary(
            root, cifar_binary.CIFAR_100, TASKS["cifar-100"].class_names
        ),
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
        read=lambda root, size: read_driving_crops(root, size, TASKS["carla-crops"].class_names),
        how_to_get=NAME_A_RECORDING,
    ),
    "features": DatasetKind(
        image_sizes=(28, 32, 64),
        read=read_features,
        how_to_get=(
            f"{_NAME_A_FOLDER} {EXPECTED}; `python -m replayfleet.scripts.experiments.sentence_features` makes them "
            "from texts"
        ),
    ),
    "folder": DatasetKind(
        image_sizes=(32, 64),
        read=read_folder,
        how_to_get=f"{_NAME_A_FOLDER} {{train,test}}/<class>/*.png (or *.jpg), or <class>/*.png to be split",
    ),
}

OF_ANY_FILES = ("carla-crops", "features", "folder", "imagenet-10")
"""Those that are whatever an operator's files are, as ``BOX_DATASETS`` are; the others are the same everywhere."""


def _fault(_name: str, kind: object) -> str:
    """Return why something can't be a data set, or ""."""
    if not isinstance(kind, DatasetKind):
        return f"{kind!r} is no DatasetKind (replayfleet.federation.streams.datasets)"
    task: Any = kind.task
    if task is not None and not isinstance(task, TaskSpec):
        return f"its task {task!r:.80} is no TaskSpec (replayfleet.models.specs)"
    sizes: object = kind.image_sizes
    if not isinstance(sizes, tuple) or not sizes:
        return f"image_sizes is {sizes!r:.80}, expected a tuple of sides in pixels, for example (32,)"
    if kind.task is not None and sizes != (kind.task.image_size,):
        return f"image_sizes is {sizes}, its task has images of {kind.task.image_size} pixels"
    return ""


ALL_DATASETS: Extended[DatasetKind] = Extended(DATASETS_GROUP, "data set", DATASETS, _fault)
"""``DATASETS``, and those of other packages, which are imported when they are used."""
