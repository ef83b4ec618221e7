"""Two subsets of ImageNet as people have them on disk: ImageNet-10 and TinyImageNet-100 (appendix A.2 of pFedGRP).

ImageNet-10: ``imagenet-10/<class>/*.JPEG``, ten folders of ILSVRC2012's training part, images of any size. In the order
of their names the first 1000 of a class are training images and the next 300 test images; a class that has fewer than
1300 is divided ten to three. An image is cut to the square in its middle and averaged down. The paper drew its ten
classes at random and doesn't say which.

TinyImageNet-100: ``tiny-imagenet-200/`` as it is distributed; the first 100 of the sorted WordNet ids. The test images
are those of the validation part, since the labels of the test part are not public.

Class names are the names of the folders. Only names are read here; pixels are decoded when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.streams.files.image_trees import class_files, labelled_parts
from replayfleet.federation.streams.files.picture_files import from_files
from replayfleet.federation.streams.labelled_images import Parts

_CHANNELS = 3
_NUM_TRAIN, _NUM_TEST = 1000, 300
_IMAGENET_CLASSES = 10
_TINY_CLASSES = 100


def read_imagenet_10(root: Path, size: int) -> Parts | None:
    """Return both parts of ``imagenet-10/[train/]<class>/*.JPEG`` below ``root``; None without such a folder.

    Raises:
        SettingsError: Its classes are not ten, or one has no test images.
    """
    folder = root / "imagenet-10"
    if not folder.is_dir():
        return None
    if (folder / "train").is_dir():
        folder /= "train"
    files = class_files(folder)
    if len(files) != _IMAGENET_CLASSES:
        raise SettingsError(
            f"{folder} holds {len(files)} classes of images, expected {_IMAGENET_CLASSES} folders; "
            "other numbers of classes can be read with --dataset folder"
        )
    members: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for class_name, paths in files.items():
        num_train = min(_NUM_TRAIN, len(paths) * _NUM_TRAIN // (_NUM_TRAIN + _NUM_TEST))
        members["train"][class_name] = paths[:num_train]
        members["test"][class_name] = paths[num_train : num_train + _NUM_TEST]
    return _parts(members, folder, "<class>/*.JPEG", size, crop=True)


def read_tiny_imagenet_100(root: Path, size: int) -> Parts | None:
    """Return both parts of ``tiny-imagenet-200/`` below ``root``; None without such a folder.

    Raises:
        SettingsError: Files are missing or name fewer than 100 classes.
    """
    folder = root / "tiny-imagenet-200"
    if not folder.is_dir():
        return None
    wnids = sorted({line.strip() for line in _lines(folder / "wnids.txt")})[:_TINY_CLASSES]
    if len(wnids) < _TINY_CLASSES:
        raise SettingsError(f"{folder / 'wnids.txt'} names {len(wnids)} classes, expected at least {_TINY_CLASSES}")
    train = {wnid: class_files(folder / "train" / wnid).get("images", []) for wnid in wnids}
    test: dict[str, list[Path]] = {wnid: [] for wnid in wnids}
    for line in _lines(folder / "val" / "val_annotations.txt"):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid in test:
            test[wnid].append(folder / "val" / "images" / Path(name).name)
    members = {"train": train, "test": {wnid: sorted(paths) for wnid, paths in test.items()}}
    return _parts(members, folder, "train/<wnid>/images/*.JPEG and val/val_annotations.txt", size, crop=False)


def _parts(
    members: Mapping[str, Mapping[str, list[Path]]], source: Path, expected: str, size: int, *, crop: bool
) -> Parts:
    return labelled_parts(members, source, expected, lambda files: from_files(files, size, _CHANNELS, crop=crop))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in read_regular(path).decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read ({error}); unpack the set again") from error
