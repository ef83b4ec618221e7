"""MNIST and its relatives from their four idx files, gzip-compressed or plain, wherever those come from.

An idx file begins with two zero bytes, the type (8 = uint8), the number of axes, then one big-endian uint32 per axis
(LeCun et al., "The MNIST database of handwritten digits", section "File formats").
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import io
import math
import mmap
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import open_regular
from replayfleet.federation.streams.labelled_images import LabelledImages, MappedImages, Parts

_MAX_BYTES = 1 << 31
"""Larger headers are taken for damage before anything is allocated."""
_PIECE_BYTES = 1 << 20
"""Of a file while it is decompressed; what is smaller stays in memory."""


def read_idx_set(
    root: Path,
    subfolders: Sequence[str],
    class_names: tuple[str, ...],
    prefixes: tuple[str, str] = ("train", "t10k"),
    *,
    transposed: bool = False,
) -> Parts | None:
    """Return both parts of the first subfolder that holds any of the files, gzip-compressed or not; None without one.

    Args:
        root: where the subfolders are.
        subfolders: to look in.
        class_names: K names.
        prefixes: how the names of the training and the test files begin.
        transposed: the files hold images with rows and columns exchanged, as EMNIST's do.

    Raises:
        SettingsError: One of the four files is missing, damaged, or doesn't fit the others.
    """
    for folder in (root / name for name in subfolders):
        for suffix in (".gz", ""):
            files = {
                part: (folder / f"{prefix}-images-idx3-ubyte{suffix}", folder / f"{prefix}-labels-idx1-ubyte{suffix}")
                for part, prefix in zip(("train", "test"), prefixes, strict=True)
            }
            if any(path.is_file() for pair in files.values() for path in pair):
                train, test = (_part(*files[part], class_names, transposed=transposed) for part in ("train", "test"))
                return train, test
    return None


def download_idx_set(torchvision_name: str, root: Path, **options: str) -> None:
    """Let torchvision fetch the files into ``root`` and check their MD5 sums; ``read_idx_set`` then reads them.

    Args:
        torchvision_name: its class of the set.
        root: a folder.
        options: of the class.

    Raises:
        SettingsError: torchvision is absent, or the download failed.
    """
    try:
        datasets = importlib.import_module("torchvision.datasets")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            getattr(datasets, torchvision_name)(str(root), download=True, **options)
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingsError(f"torchvision's download of {torchvision_name} into {root} failed: {error}") from error


def _part(images_path: Path, labels_path: Path, class_names: tuple[str, ...], *, transposed: bool) -> LabelledImages:
    images, mapping = _read_idx(images_path, 3)
    labels = _read_idx(labels_path, 1)[0].astype("int64")
    if images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise SettingsError(
            f"{images_path} holds images {images.shape} and {labels_path.name} {len(labels)} labels; "
            "expected (N, 28, 28) and N; fetch both again"
        )
    if transposed:
        images = images.transpose(0, 2, 1)  # a view: EMNIST has half a gigabyte of them
    pixels = images[..., None]
    try:
        return LabelledImages(pixels if mapping is None else MappedImages(mapping, pixels), labels, class_names)
    except ValueError as error:
        raise SettingsError(f"{labels_path} is damaged: {error}; fetch it again") from error


def _read_idx(path: Path, num_axes: int) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
    """Return the uint8 array of ``num_axes`` axes in ``path``, and the mapped file that it is a view of, if it is.

    A name ending in ``.gz`` is decompressed.

    Raises:
        SettingsError: The file can't be read, is no such idx file, or ends early or late.
    """
    try:
        with open_regular(path) as raw:
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            return _parse(stream, path, num_axes)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            raise SettingsError(f"{path} can't be unpacked: {error.strerror}; free space") from error
        raise SettingsError(f"{path} is damaged or unreadable ({error}); fetch it again") from error


def _parse(stream: BinaryIO, path: Path, num_axes: int) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
    expected_magic = (8 << 8) | num_axes
    header = stream.read(4 + 4 * num_axes)
    if len(header) < 4 + 4 * num_axes or int.from_bytes(header[:4], "big") != expected_magic:
        raise SettingsError(
            f"{path} is no idx file of {num_axes} axes: it begins with {header[:4].hex() or 'nothing'}, "
            f"expected {expected_magic:08x}; fetch it again"
        )
    shape = struct.unpack(f">{num_axes}I", header[4:])
    size_bytes = math.prod(shape)
    if size_bytes > _MAX_BYTES:
        raise SettingsError(f"{path} claims {size_bytes} bytes, more than any set this project knows; fetch it again")
    data = _kept(stream, size_bytes + 1)
    if len(data) != size_bytes:
        found = f"only {len(data)}" if len(data) < size_bytes else "more"
        raise SettingsError(
            f"{path} is damaged: its header promises {size_bytes} bytes, it has {found}; fetch it again"
        )
    pixels = np.frombuffer(data, dtype=np.uint8).reshape(shape)
    return pixels, data if isinstance(data, mmap.mmap) else None


def _kept(stream: BinaryIO, max_bytes: int) -> bytes | mmap.mmap:
    """Return what follows in ``stream``, at most ``max_bytes``: large images in a file without a name, mapped.

    A client looks at a few images in a round. Those that it doesn't look at take none of its memory so.
    """
    first = stream.read(min(_PIECE_BYTES, max_bytes))
    if len(first) < _PIECE_BYTES:
        return first
    try:
        unnamed = tempfile.TemporaryFile()  # noqa: SIM115  # below
    except OSError:  # nowhere to write, as on a board whose disk is read-only
        return first + stream.read(max_bytes - len(first))
    with unnamed as file:
        file.write(first)
        while piece := stream.read(min(_PIECE_BYTES, max_bytes - file.tell())):
            file.write(piece)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
