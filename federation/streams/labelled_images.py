"""Labelled uint8 images, and the one way in which pixels become what models see.

Axes: N images, H height, W width, C channels. Needs numpy only, so a device without torch can read them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class LazyImages(Protocol):
    """N images whose pixels are read when somebody asks for them."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, H, W, C)."""

    def __len__(self) -> int:
        """N."""

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images (len(indices), H, W, C); raises SettingsError if a file is damaged."""


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Images and what they show.

    Attributes:
        images: (N, H, W, C) uint8, RGB or grey; ``images[indices]`` reads what wasn't read yet.
        labels: (N,) int64 class ids.
        class_names: K names.
    """

    images: NDArray[np.uint8] | LazyImages
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.class_names):
            raise ValueError(f"labels must be 0 to {len(self.class_names) - 1}, got up to {self.labels.max()}")

    def counts(self) -> list[int]:
        """Images of each class, K numbers."""
        return [int(count) for count in np.bincount(self.labels, minlength=len(self.class_names))]


Parts: TypeAlias = tuple[LabelledImages, LabelledImages]
"""(train, test)."""


def normalise(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return uint8 images (N, H, W, C) as float32 (N, C, H, W) in [-1, 1], contiguous: ``x / 127.5 - 1``."""
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
    planes /= np.float32(127.5)
    planes -= np.float32(1)
    return planes
