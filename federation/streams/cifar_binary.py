"""CIFAR-10's "binary version": records of one label byte and 3072 pixel bytes (red, green, blue planes, 32x32 each).

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html; read from the ``.tar.gz`` in place.
"""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np

from federation.errors import SettingsError
from federation.streams.labelled_images import LabelledImages, Parts

_RECORD_BYTES = 1 + 3 * 32 * 32
_MAX_MEMBER_BYTES = 10_000 * _RECORD_BYTES
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)


def read_cifar_binary(path: Path, class_names: tuple[str, ...]) -> Parts:
    """Return both parts, images (N, 32, 32, 3).

    Raises:
        SettingsError: The archive is damaged or lacks one of its six files.
    """
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in _TRAIN + _TEST and member.isfile() and member.size <= _MAX_MEMBER_BYTES:
                    stream = archive.extractfile(member)
                    members[name] = stream.read() if stream is not None else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise SettingsError(f"{path} is damaged or unreadable ({error}); fetch it again") from error
    missing = [name for name in _TRAIN + _TEST if name not in members]
    if missing:
        raise SettingsError(f"{path} lacks {', '.join(missing)}; expected CIFAR-10's binary version; fetch it again")
    train, test = (_parse(b"".join(members[name] for name in names), path, class_names) for names in (_TRAIN, _TEST))
    return train, test


def _parse(data: bytes, path: Path, class_names: tuple[str, ...]) -> LabelledImages:
    if not data or len(data) % _RECORD_BYTES:
        raise SettingsError(f"{path} is damaged: {len(data)} bytes are no whole number of {_RECORD_BYTES}-byte records")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    try:
        return LabelledImages(images, records[:, 0].astype(np.int64), class_names)
    except ValueError as error:
        raise SettingsError(f"{path} is damaged: {error}; fetch it again") from error
