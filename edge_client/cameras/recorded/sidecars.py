"""Boxes that lie beside a recording, found by a picture's name or a film's frame number: YOLO files or one COCO file.

Axes: N boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from replayfleet.edge_client.flow import Boxes
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.annotations import Annotation, CocoPicture, read_class_names, read_coco, read_yolo

K = TypeVar("K", str, int)

NAMES_FILES = ("labels.txt", "classes.txt")
"""Where YOLO's class names are looked for when the operator names no file."""

_FRAME_NUMBER = re.compile(r"(?:.*\D)?(\d{1,12})")


@dataclass(frozen=True, slots=True)
class Sidecar(Generic[K]):
    """Boxes by key: a picture's file name, or a film's frame number.

    Attributes:
        class_names: what ``Boxes.class_ids`` mean.
        keys: of the pictures that have some.
        read: (key, (width, height) in pixels) -> the boxes of one of them; raises SettingsError if they are damaged, or
            of a picture of another size.
    """

    class_names: tuple[str, ...]
    keys: Collection[K]
    read: Callable[[K, tuple[int, int]], Annotation]

    def boxes(self, key: K, size: tuple[int, int]) -> Boxes | None:
        """Return the boxes of a picture; None where the recording has none for it."""
        if key not in self.keys:
            return None
        found = self.read(key, size)
        return Boxes(found.corners, found.class_ids)


def coco_sidecar(path: Path, names: Path | None, key: Callable[[str], K]) -> Sidecar[K]:
    """Read a COCO file.

    Args:
        path: the file.
        names: a names file that says what class ids shall mean; without it they follow the file's categories.
        key: from an entry's ``file_name`` to what it is found by; raises SettingsError where that is impossible.

    Raises:
        SettingsError: The file or the names file can't be used, or two entries have one key.
    """
    coco = read_coco(path, read_class_names(names) if names else ())
    pictures: dict[K, CocoPicture] = {}
    for picture in coco.pictures:
        own = key(picture.file_name)
        if own in pictures:
            raise SettingsError(f"{path}: {pictures[own].file_name!r} and {picture.file_name!r} are one picture")
        pictures[own] = picture

    def read(own: K, size: tuple[int, int]) -> Annotation:
        picture = pictures[own]
        if picture.size != size:
            raise SettingsError(
                f"{path}: picture {picture.file_name} is {picture.size[0]}x{picture.size[1]} there, "
                f"{size[0]}x{size[1]} in the recording"
            )
        return picture.annotation

    return Sidecar(coco.class_names, pictures.keys(), read)


def yolo_sidecar(files: Mapping[K, Path], names: Path | None, folders: Iterable[Path]) -> Sidecar[K]:
    """Return label files with their class names.

    Args:
        files: key -> label file, at least one.
        names: the names file; without it the first ``labels.txt`` or ``classes.txt`` in ``folders``.
        folders: where to look.

    Raises:
        SettingsError: There is no names file, or it can't be used.
    """
    places = list(folders)
    usual = (place / name for place in places for name in NAMES_FILES)
    found = names or next((path for path in usual if path.is_file()), None)
    if found is None:
        raise SettingsError(
            f"label files in {next(iter(files.values())).parent} have no class names; expected labels.txt or "
            f"classes.txt in {' or '.join(str(place) for place in places)}, or names=FILE"
        )
    class_names = read_class_names(found)
    return Sidecar(class_names, files.keys(), lambda own, size: read_yolo(files[own], len(class_names), size))


def label_files(folder: Path) -> dict[str, Path]:
    """Return stem -> YOLO label file of a folder, names files and hidden ones left out."""
    files = sorted(folder.glob("*.txt"))
    return {path.stem: path for path in files if path.name not in NAMES_FILES and path.name[0] != "."}


def frame_number(stem: str) -> int | None:
    """Return the number at the end of a name without suffix, as in ``frame_000012``; None if there is none."""
    match = _FRAME_NUMBER.fullmatch(stem)
    return int(match[1]) if match else None
