"""``images:///folder?rate=5``: the pictures of a folder in the order of their names, with boxes if there are some."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from replayfleet.edge_client.cameras.recorded.sidecars import Sidecar, coco_sidecar, label_files, yolo_sidecar
from replayfleet.edge_client.cameras.recorded.stills import StillsCamera
from replayfleet.edge_client.flow import Boxes, Rate
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import expanded
from replayfleet.federation.service.settings import check_settings
from replayfleet.federation.service.words import count_of
from replayfleet.federation.streams.files.picture_files import list_pictures

COCO_FILE = "annotations.json"
"""Looked for in the folder and beside it."""


@dataclass(frozen=True, slots=True)
class ImagesSettings:
    """Which pictures, how fast, and where their boxes are.

    Attributes:
        path: the folder.
        rate: pictures per second.
        loop: begin again after the last; otherwise the camera ends.
        annotations: a folder of YOLO label files or a COCO file; empty looks for label files in ``labels/`` beside the
            folder and in the folder itself, then for ``annotations.json`` in it and beside it.
        names: file with the class names; empty looks for ``labels.txt`` or ``classes.txt`` with the label files, with
            the pictures, and above them. A COCO file brings its own.
    """

    path: Path
    rate: Rate = 5.0
    loop: bool = False
    annotations: str = ""
    names: str = ""

    def __post_init__(self) -> None:
        check_settings(self)


class ImagesCamera(StillsCamera):
    """A folder of pictures.

    The folder is listed once: what is put there later isn't seen.

    Raises:
        SettingsError: No such folder, no pictures in it, or annotations that can't be used.
    """

    def __init__(self, settings: ImagesSettings, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        expected = "expected images:///FOLDER, the folder itself, with .png or .jpg files in it"
        if not settings.path.is_dir():
            problem = "is no folder" if settings.path.exists() else "doesn't exist"
            raise SettingsError(f"folder of pictures {str(settings.path)!r} {problem}; {expected}")
        files = list_pictures(settings.path)
        if not files:
            raise SettingsError(f"folder {settings.path} has no pictures; {expected}")
        super().__init__(name, files, rate_hz=settings.rate, loop=settings.loop, clock=clock)
        self._sidecar = _sidecar(settings, self.files)
        self.class_names = self._sidecar.class_names if self._sidecar else ()

    def boxes(self, index: int, size: tuple[int, int]) -> Boxes | None:
        return self._sidecar.boxes(self.files[index].name, size) if self._sidecar else None

    def describe(self) -> str:
        boxes = f"boxes of {count_of(len(self.class_names), 'class')}" if self._sidecar else "no boxes"
        return f"pictures {self._settings.path}, {len(self.files)} at {self._settings.rate:g}/s, {boxes}"


def _sidecar(settings: ImagesSettings, files: tuple[Path, ...]) -> Sidecar[str] | None:
    """Return the boxes that the operator named, or those that lie where boxes usually lie."""
    folder = settings.path
    names = expanded(settings.names) if settings.names else None
    if settings.annotations:
        place = expanded(settings.annotations)
        if place.is_dir():
            found = _yolo(place, folder, files, names)
            if found is None:
                raise SettingsError(
                    f"no file in {place} is a label file of a picture in {folder}; expected PICTURE.txt"
                )
            return found
        return _coco(place, files, names)
    for place in (folder.parent / "labels", folder):
        found = _yolo(place, folder, files, names) if place.is_dir() else None
        if found is not None:
            return found
    for place in (folder / COCO_FILE, folder.parent / COCO_FILE):
        if place.is_file():
            return _coco(place, files, names)
    if names:
        raise SettingsError(
            f"source: names is {names}, but no picture in {folder} has boxes; expected annotations=PLACE"
        )
    return None


def _yolo(place: Path, folder: Path, files: tuple[Path, ...], names: Path | None) -> Sidecar[str] | None:
    labels = label_files(place)
    own = {file.name: labels[file.stem] for file in files if file.stem in labels}
    return yolo_sidecar(own, names, (place, folder, folder.parent)) if own else None


def _coco(path: Path, files: tuple[Path, ...], names: Path | None) -> Sidecar[str]:
    sidecar = coco_sidecar(path, names, lambda file_name: PurePosixPath(file_name.replace("\\", "/")).name)
    if not any(file.name in sidecar.keys for file in files):
        raise SettingsError(f"{path} lists no picture of {files[0].parent}; expected file_name {files[0].name!r}")
    return sidecar
