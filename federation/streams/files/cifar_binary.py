"""The "binary version" of CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixel bytes.

A record begins with one label byte (CIFAR-10), or the coarse and the fine label (CIFAR-100); then come the red, green
and blue planes, 32x32 each. Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html; read from the ``.tar.gz`` in
place, or from the folder that is in it.
"""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.labelled_images import LabelledImages, Parts

_PIXEL_BYTES = 3 * 32 * 32
_MAX_RECORDS = 50_000
"""Of one file; larger ones are none of these sets."""


@dataclass(frozen=True, slots=True)
class CifarBinary:
    """What tells one set from the other.

    Attributes:
        name: of the set, for messages.
        archive: file name of the ``.tar.gz``.
        folder: of the unpacked files.
        train: files of the training part.
        test: files of the test part.
        label_bytes: labels in front of the pixels; the last one counts.
    """

    name: str
    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + _PIXEL_BYTES


CIFAR_10 = CifarBinary(
    name="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    label_bytes=1,
)
CIFAR_100 = CifarBinary(
    name="CIFAR-100",
    archive="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    label_bytes=2,
)


def read_cifar_binary(root: Path, layout: CifarBinary, class_names: tuple[str, ...]) -> Parts | None:
    """Return both parts, images (N, 32, 32, 3), of the folder or the archive in ``root``; None if it has neither.

    Raises:
        SettingsError: A file is missing or damaged.
    """
    if (root / layout.folder).is_dir():
        path = root / layout.folder
        try:
            files = {name: (path / name).read_bytes() for name in layout.files if (path / name).is_file()}
        except OSError as error:
            raise SettingsError(f"{path} can't be read ({error})") from error
    elif (root / layout.archive).is_file():
        path = root / layout.archive
        files = _packed(path, layout)
    else:
        return None
    missing = [name for name in layout.files if name not in files]
    if missing:
        raise SettingsError(
            f"{path} lacks {', '.join(missing)}; expected {layout.name}'s binary version; fetch it again"
        )
    train, test = (
        _parse(b"".join(files[name] for name in names), path, layout, class_names)
        for names in (layout.train, layout.test)
    )
    return train, test


def _packed(path: Path, layout: CifarBinary) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in layout.files and member.isfile() and member.size <= _MAX_RECORDS * layout.record_bytes:
                    stream = archive.extractfile(member)
                    files[name] = stream.read() if stream is not None else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise SettingsError(f"{path} is damaged or unreadable ({error}); fetch it again") from error
    return files


def _parse(data: bytes, path: Path, layout: CifarBinary, class_names: tuple[str, ...]) -> LabelledImages:
    size = layout.record_bytes
    if not data or len(data) % size:
        raise SettingsError(f"{path} is damaged: {len(data)} bytes are no whole number of {size}-byte records")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
    planes = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    try:
        return LabelledImages(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, class_names)
    except ValueError as error:
        raise SettingsError(f"{path} is damaged: {error}; fetch it again") from error
