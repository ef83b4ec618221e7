"""MNIST and its relatives from their four idx files, wherever those come from."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence
from pathlib import Path

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.files.idx import read_idx
from replayfleet.federation.streams.labelled_images import LabelledImages, Parts


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
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1).astype("int64")
    if images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise SettingsError(
            f"{images_path} holds images {images.shape} and {labels_path.name} {len(labels)} labels; "
            "expected (N, 28, 28) and N; fetch both again"
        )
    if transposed:
        images = images.transpose(0, 2, 1)  # a view: EMNIST has half a gigabyte of them
    try:
        return LabelledImages(images[..., None], labels, class_names)
    except ValueError as error:
        raise SettingsError(f"{labels_path} is damaged: {error}; fetch it again") from error
