"""Images in a tree of folders or a zip of one: ``{train,test}/<class>/<image>``, or ``<class>/<image>`` to be split.

Classes are numbered in the order of their names. Only names are read here; pixels are decoded when they are needed.
What file managers and version control leave beside them (names that begin with a dot, ``__MACOSX``) is passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.growth import check_apart
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.streams.files.picture_files import SUFFIXES, flaw_in, from_files, from_zip
from replayfleet.federation.streams.labelled_images import LabelledImages, LazyImages, Parts

log = EventLogger(__name__)

_T = TypeVar("_T")

_CHANNELS = 3

_LEFT_BY_A_MAC = "__MACOSX"

_TEST_SHARE = 6
"""An image folder without train and test parts gives one image in this many to the test part, as Fashion-MNIST has."""


def read_zip(path: Path, size: int) -> Parts:
    """Return both parts of ``[<set>/]{train,test}/<class>/*.{png,jpg}`` in a zip, which is read in place.

    Raises:
        SettingsError: The zip is damaged, or its classes are fewer than two or differ between the parts.
    """
    pattern = re.compile(r"(?:[^/]+/)?(train|test)/([^/]+)/[^/]+\.(?i:png|jpe?g)")
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise SettingsError(f"{path} is damaged or truncated ({error}); fetch it again") from error
    members: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for name in sorted(archive.namelist()):
        match = pattern.fullmatch(name)
        if match and not any(_is_hidden(part) for part in name.split("/")):
            members[match[1]].setdefault(match[2], []).append(name)
    expected = "<set>/{train,test}/<class>/*.jpg"
    return labelled_parts(members, path, expected, lambda names: from_zip(archive, names, size, _CHANNELS))


def read_folder(root: Path, size: int) -> Parts | None:
    """Return both parts of the images below ``root``, or None if there are none; what is none is told and left out.

    Raises:
        SettingsError: Its classes are fewer than two or differ between the parts.
    """
    if not root.is_dir():
        return None
    if train := class_files(root / "train"):  # one of pictures alone is a class, as in a set of vehicles
        members = {"train": _whole(train, root), "test": _whole(class_files(root / "test"), root)}
    else:
        members = _split(_whole(class_files(root), root), root)
    if not members["train"]:
        return None
    expected = "{train,test}/<class>/*.{png,jpg} or <class>/*.{png,jpg}"
    return labelled_parts(members, root, expected, lambda files: from_files(files, size, _CHANNELS))


def class_files(folder: Path) -> dict[str, list[Path]]:
    """Return the images in each folder below ``folder``, names rising; what else lies in those folders is counted."""
    if not folder.is_dir():
        return {}
    found = {  # names need be no UTF-8, but results are
        os.fsencode(entry.name).decode(errors="backslashreplace"): sorted(
            path for path in entry.iterdir() if not _is_hidden(path.name)
        )
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not _is_hidden(entry.name)
    }
    files = {name: [path for path in paths if path.suffix.lower() in SUFFIXES] for name, paths in found.items()}
    others = [path for paths in found.values() for path in paths if path.suffix.lower() not in SUFFIXES]
    if others:
        reason = f"named neither {', '.join(SUFFIXES[:-1])} nor {SUFFIXES[-1]}"
        log.warning("files passed over", folder=folder, num=len(others), first=others[0], reason=reason)
    return {name: paths for name, paths in files.items() if paths}


def _whole(files: Mapping[str, list[Path]], root: Path) -> dict[str, list[Path]]:
    """Return the files without those of which a device would say that they are no pictures, which one line tells."""
    flaws = {path: flaw for paths in files.values() for path in paths if (flaw := flaw_in(path))}
    if flaws:
        first = next(iter(flaws))
        log.warning("images left out", folder=root, num=len(flaws), first=first, reason=flaws[first])
    whole = {name: [path for path in paths if path not in flaws] for name, paths in files.items()}
    return {name: paths for name, paths in whole.items() if paths}


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _LEFT_BY_A_MAC


def _split(files: Mapping[str, list[Path]], root: Path) -> dict[str, dict[str, list[Path]]]:
    """Give every sixth image of a class to the test part, in the order of a digest of its name: equal everywhere."""
    parts: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for class_name, paths in files.items():
        mixed = sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(root))).digest())
        num_test = max(1, len(mixed) // _TEST_SHARE)
        parts["test"][class_name], parts["train"][class_name] = sorted(mixed[:num_test]), sorted(mixed[num_test:])
    return parts


def _class_names(members: Mapping[str, Mapping[str, Sequence[object]]], source: Path, expected: str) -> tuple[str, ...]:
    train, test = ({name for name, images in members[part].items() if images} for part in ("train", "test"))
    if train != test:
        only = sorted(train ^ test)[0]
        raise SettingsError(
            f"{source}: class {only!r} lacks train or test images; expected {expected}, 2 images or more"
        )
    if len(train) < 2:
        raise SettingsError(f"{source} holds {len(train)} classes of images, expected at least 2 as {expected}")
    check_apart(sorted(train))
    return tuple(sorted(train))


def labelled_parts(
    members: Mapping[str, Mapping[str, list[_T]]],
    source: Path,
    expected: str,
    images: Callable[[list[_T]], LazyImages],
) -> Parts:
    """Return both parts of images that are known by class, classes numbered in the order of their names.

    Args:
        members: ``train`` and ``test`` -> class name -> its images, in whatever form ``images`` takes.
        source: what errors call the set.
        expected: what errors say that it should hold.
        images: from members to images that are decoded when they are needed.

    Raises:
        SettingsError: Classes are fewer than two or differ between the parts.
    """
    class_names = _class_names(members, source, expected)
    train, test = (_labelled(members[part], class_names, images) for part in ("train", "test"))
    return train, test


def _labelled(
    members: Mapping[str, list[_T]], class_names: tuple[str, ...], images: Callable[[list[_T]], LazyImages]
) -> LabelledImages:
    flat = [member for class_name in class_names for member in members[class_name]]
    sizes = [len(members[class_name]) for class_name in class_names]
    return LabelledImages(images(flat), np.repeat(np.arange(len(class_names), dtype=np.int64), sizes), class_names)
