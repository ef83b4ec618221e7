"""Boxes that lie beside pictures: YOLO label files and COCO JSON, read strictly.

Axes: N boxes. Needs numpy only. Every error names the file, the place in it, and what was expected there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import UNREADABLE, SettingsError, nearest
from replayfleet.federation.paths import open_regular

MAX_LABEL_BYTES = 2**20
"""Largest YOLO label file and names file."""

MAX_COCO_BYTES = 64 * 2**20
MAX_BOXES = 1000
"""In one picture."""

MAX_CLASSES = 1000
MAX_SIDE = 65_535
"""Largest width and height of a picture, which is JPEG's."""

_YOLO = "expected 'class cx cy w h', the class from 0 and the rest as shares of the picture's size"


@dataclass(frozen=True, slots=True)
class Annotation:
    """What stands in one picture, and where.

    Attributes:
        corners: (N, 4) float32, left, top, right, bottom in pixels, left < right and top < bottom; they may reach past
            the picture's edge.
        class_ids: (N,) int64, indices into the class names that were read with it.
    """

    corners: NDArray[np.float32]
    class_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.corners)


@dataclass(frozen=True, slots=True)
class CocoPicture:
    """One entry of ``images`` with its boxes.

    Attributes:
        file_name: as it stands in the file.
        size: (width, height) in pixels.
        annotation: its boxes; none where the file lists the picture without any.
    """

    file_name: str
    size: tuple[int, int]
    annotation: Annotation


@dataclass(frozen=True, slots=True)
class CocoFile:
    """A COCO file: what ``class_ids`` mean, and its pictures in the order in which they stand there."""

    class_names: tuple[str, ...]
    pictures: tuple[CocoPicture, ...]


_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE)]


class _Category(msgspec.Struct):
    id: int
    name: _Text


class _Image(msgspec.Struct):
    id: int
    width: _Side
    height: _Side
    file_name: _Text


class _Box(msgspec.Struct):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float] | None = None
    iscrowd: bool | int = 0


class _Coco(msgspec.Struct):
    images: list[_Image]
    annotations: list[_Box]
    categories: Annotated[list[_Category], msgspec.Meta(min_length=1, max_length=MAX_CLASSES)]


def read_class_names(path: Path) -> tuple[str, ...]:
    """Return the class names of a names file, one a line, as ``labels.txt`` has them.

    Raises:
        SettingsError: It can't be read, is no text, has no names, a blank line between names, or a name twice.
    """
    names = [line.strip() for line in _text(path, MAX_LABEL_BYTES).rstrip().split("\n")]
    if names == [""]:
        raise SettingsError(f"{path} holds no class names; expected one a line")
    if len(names) > MAX_CLASSES:
        raise SettingsError(f"{path} holds {len(names)} class names, expected at most {MAX_CLASSES}")
    for number, name in enumerate(names, 1):
        if not name:
            raise SettingsError(f"{path}, line {number} is blank; expected a class name, for ids count the lines")
        if name in names[: number - 1]:
            raise SettingsError(f"{path}, line {number}: class {name!r} stands there twice")
    return tuple(names)


def read_yolo(path: Path, num_classes: int, size: tuple[int, int]) -> Annotation:
    """Return the boxes of a YOLO label file; an empty file is a picture without objects.

    Args:
        path: one line ``class cx cy w h`` per box, relative to the picture's size; blank lines are passed over.
        num_classes: class ids must be below it.
        size: (width, height) of the picture in pixels.

    Raises:
        SettingsError: It can't be read, is larger than ``MAX_LABEL_BYTES``, or a line isn't a box.
    """
    boxes: list[tuple[float, float, float, float]] = []
    class_ids: list[int] = []
    for number, line in enumerate(_text(path, MAX_LABEL_BYTES).split("\n"), 1):
        if not line.strip():
            continue
        if len(boxes) == MAX_BOXES:
            raise SettingsError(f"{path}, line {number}: more than {MAX_BOXES} boxes in one picture")
        try:
            class_id, box = _yolo_line(line.split(), num_classes)
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: {error}") from None
        class_ids.append(class_id)
        boxes.append(box)
    centres = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    halves = centres[:, 2:] / 2
    corners = np.concatenate([centres[:, :2] - halves, centres[:, :2] + halves], axis=1) * (*size, *size)
    try:
        return _annotation(corners, class_ids)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def read_coco(path: Path, class_names: Sequence[str] = ()) -> CocoFile:
    """Return the pictures and boxes of a COCO file (``images``, ``categories``, ``annotations``).

    Boxes marked ``iscrowd`` are left out: they bound a heap, not an object.

    Args:
        path: the JSON file.
        class_names: what class ids shall mean; without them they count the file's categories by rising category id.

    Raises:
        SettingsError: It can't be read, is larger than ``MAX_COCO_BYTES``, isn't COCO, or has a category that
            ``class_names`` lacks (names the nearest).
    """
    try:
        root = msgspec.json.decode(_text(path, MAX_COCO_BYTES), type=_Coco)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {str(error).replace('`', '')}; expected a COCO file") from None
    except UNREADABLE as error:
        raise SettingsError(f"{path} is no JSON ({error}); expected a COCO file") from error
    try:
        return _coco(root, tuple(class_names))
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def _text(path: Path, max_bytes: int) -> str:
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SettingsError(f"{path} is larger than {max_bytes} bytes, the most that is read")
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is damaged: byte {error.start} is no UTF-8 text") from error


def _yolo_line(words: Sequence[str], num_classes: int) -> tuple[int, tuple[float, float, float, float]]:
    """Return (class id, (cx, cy, w, h)) or raise ValueError."""
    if len(words) != 5:
        raise ValueError(f"{len(words)} values, {_YOLO}")
    if not (words[0].isascii() and words[0].isdigit() and int(words[0][:9]) < num_classes and len(words[0]) < 9):
        raise ValueError(f"class is {words[0][:20]!r}, expected 0 to {num_classes - 1}")
    try:
        cx, cy, w, h = (float(word) for word in words[1:])
    except ValueError:
        raise ValueError(f"{' '.join(words)[:60]!r} has a value that is no number; {_YOLO}") from None
    for name, value in (("cx", cx), ("cy", cy)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value:.9g}, expected 0 to 1")
    for name, value in (("w", w), ("h", h)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value:.9g}, expected more than 0 and at most 1")
    return int(words[0]), (cx, cy, w, h)


def _coco(root: _Coco, class_names: tuple[str, ...]) -> CocoFile:
    """Return what a decoded COCO object says, or raise ValueError."""
    own_names, classes = _categories(root.categories, class_names)
    boxes: dict[int, list[tuple[float, ...]]] = {}
    class_ids: dict[int, list[int]] = {}
    for index, image in enumerate(root.images):
        if image.id in boxes:
            raise ValueError(f"images[{index}].id is {image.id}, which an earlier picture has")
        boxes[image.id], class_ids[image.id] = [], []
    for index, entry in enumerate(root.annotations):
        where = f"annotations[{index}]"
        if entry.image_id not in boxes:
            raise ValueError(f"{where}.image_id is {entry.image_id}, which no picture in 'images' has")
        if entry.category_id not in classes:
            raise ValueError(f"{where}.category_id is {entry.category_id}, which no category has")
        if entry.iscrowd:
            continue
        x, y, w, h = entry.bbox or (0, 0, 0, 0)
        if not (all(abs(value) <= MAX_SIDE for value in (x, y, w, h)) and w > 0 and h > 0):
            raise ValueError(f"{where}.bbox is {entry.bbox}, expected [left, top, width, height] in pixels")
        if len(boxes[entry.image_id]) == MAX_BOXES:
            raise ValueError(f"{where}: more than {MAX_BOXES} boxes in picture {entry.image_id}")
        boxes[entry.image_id].append((x, y, x + w, y + h))
        class_ids[entry.image_id].append(classes[entry.category_id])
    pictures = []
    for image in root.images:
        corners = np.array(boxes[image.id], np.float64).reshape(-1, 4)
        annotation = _annotation(corners, class_ids[image.id], f"picture {image.file_name}: ")
        pictures.append(CocoPicture(image.file_name, (image.width, image.height), annotation))
    return CocoFile(own_names, tuple(pictures))


def _categories(
    categories: Sequence[_Category], class_names: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[int, int]]:
    """Return the class names, and category id -> class id."""
    names: dict[int, str] = {}
    for index, category in enumerate(categories):
        if category.id in names or category.name in names.values():
            raise ValueError(
                f"categories[{index}] is {category.id} {category.name!r}; an earlier category has that id or name"
            )
        names[category.id] = category.name
    known = class_names or tuple(names[category] for category in sorted(names))
    for name in names.values():
        if name not in known:
            raise ValueError(f"unknown category {name!r}{nearest(name, known)}")
    return known, {category: known.index(name) for category, name in names.items()}


def _annotation(corners: NDArray[np.float64], class_ids: Sequence[int], where: str = "") -> Annotation:
    """Return the boxes, or raise ValueError if one has no extent in float32."""
    rounded = corners.astype(np.float32)
    sound = (rounded[:, :2] < rounded[:, 2:]).all(axis=1)
    if not sound.all():
        raise ValueError(f"{where}box {int(np.argmin(sound)) + 1} of {len(rounded)} is too small to have an extent")
    return Annotation(rounded, np.array(class_ids, dtype=np.int64))
