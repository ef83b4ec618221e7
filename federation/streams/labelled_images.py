"""Labelled uint8 images, and the one way in which pixels become what models see.

Axes: N images, H height, W width, C channels. Needs numpy only, so a device without torch can read them too.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.errors import SettingsError


class LazyImages:
    """N images that are read when somebody first takes them; then kept.

    Attributes:
        shape: (N, H, W, C).
        names: of the files, where there are any.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        read: Callable[[int], Iterable[tuple[int, NDArray[np.uint8]]]],
        names: Sequence[str] = (),
    ) -> None:
        """Read nothing yet; ``read`` returns the image of an index, with those that come with it, and their indices."""
        self.shape = shape
        self.names = names
        self._read = read
        self._pixels = np.zeros(shape, dtype=np.uint8)  # the system maps a page only once it is written
        self._is_read = np.zeros(shape[0], dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images (len(indices), H, W, C); raises SettingsError if a file is damaged."""
        for index in np.unique(indices).tolist():
            if not self._is_read[index]:
                for place, pixels in self._read(index):
                    self._pixels[place], self._is_read[place] = pixels, True
        return self._pixels[indices]


class MappedImages:
    """N images in a mapped file: what is taken is a copy, and of the file nothing stays in this process's memory.

    The kernel maps 64 KB around each byte that is read, so a few rounds of a stream would keep all of a set.

    Attributes:
        shape: (N, H, W, C).
    """

    names: Sequence[str] = ()

    def __init__(self, mapping: mmap.mmap, pixels: NDArray[np.uint8]) -> None:
        """``pixels``: (N, H, W, C), a view of ``mapping``, which is shared with its file and never written."""
        self._mapping, self._pixels = mapping, pixels
        self.shape = pixels.shape

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, indices: NDArray[np.int64] | slice) -> NDArray[np.uint8]:
        """Return the images (len(indices), H, W, C)."""
        found = np.array(self._pixels[indices])
        self._mapping.madvise(mmap.MADV_DONTNEED)
        return found


@dataclass(frozen=True, slots=True)
class ShownImages:
    """N images, each shown in T ways; image ``i`` shown in way ``t`` has index ``t N + i``."""

    images: NDArray[np.uint8] | LazyImages | MappedImages | ShownImages
    show: tuple[Callable[[NDArray[np.uint8]], NDArray[np.uint8]], ...]

    @property
    def names(self) -> Sequence[str]:
        names: Sequence[str] = getattr(self.images, "names", ())
        return names

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.images) * len(self.show)

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images (len(indices), H, W, C)."""
        ways, rows = np.divmod(np.asarray(indices), len(self.images))
        found = np.array(_bytes(self.images[rows]))
        for way in np.unique(ways).tolist():
            found[ways == way] = self.show[way](found[ways == way])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class LabelledImages:
    """Images and what they show; equal to itself alone, for most of them may not have been read yet.

    Attributes:
        images: (N, H, W, C) uint8, RGB or grey; ``images[indices]`` reads what wasn't read yet.
        labels: (N,) int64 class ids.
        class_names: K names.
    """

    images: NDArray[np.uint8] | LazyImages | MappedImages | ShownImages
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        if not isinstance(self.labels, np.ndarray):
            raise TypeError(f"labels are a {type(self.labels).__name__}, expected an array (N,) of int64")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.class_names):
            found = f"got {self.labels.min()} to {self.labels.max()}"
            raise ValueError(f"labels must be 0 to {len(self.class_names) - 1}, {found}")

    def counts(self) -> list[int]:
        """Images of each class, K numbers."""
        return [int(count) for count in np.bincount(self.labels, minlength=len(self.class_names))]


Parts: TypeAlias = tuple[LabelledImages, LabelledImages]
"""(train, test)."""


class _Labelled(Protocol):
    """Classes or boxes."""

    @property
    def images(self) -> object: ...
    @property
    def labels(self) -> NDArray[Any]: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


def digest_of(parts: Iterable[_Labelled]) -> str:
    """Return a digest of what a set holds, wherever it lies: classes, labels and names of files, which stay unread.

    Images that are an array have no files, so their pixels count.
    """
    found = hashlib.sha256()
    for part in parts:
        files = [name.rpartition("/")[2] for name in getattr(part.images, "names", ())]
        found.update("\0".join([*part.class_names, "", *files, ""]).encode(errors="surrogateescape"))
        found.update(part.labels.tobytes())
        images = part.images
        while isinstance(images, ShownImages):
            images = images.images
        if isinstance(images, np.ndarray):
            for begin in range(0, len(images), 256):  # never a second copy of all
                found.update(images[begin : begin + 256].tobytes())
    return found.hexdigest()


def normalise(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return uint8 images (N, H, W, C) as float32 (N, C, H, W) in [-1, 1], contiguous: ``x / 127.5 - 1``.

    Raises:
        SettingsError: They are of another type, as a package's images may be in one batch and not in the one before.
    """
    planes = np.ascontiguousarray(_bytes(images).transpose(0, 3, 1, 2), dtype=np.float32)
    planes /= np.float32(127.5)
    planes -= np.float32(1)
    return planes


def _bytes(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if images.dtype != np.uint8:
        raise SettingsError(f"a batch of {len(images)} images is {images.dtype}, expected uint8, as every batch is")
    return images
