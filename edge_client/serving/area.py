"""Shared memory of one lane: images on their way to the serving process, outputs on their way back.

Anonymous memory files (``memfd_create``, Linux): nothing lies on a disk, and they vanish with the last process that
holds them, however it ends.

Axes: B images, C channels, H height, W width.
"""

from __future__ import annotations

import math
import mmap
import os

import numpy as np
from numpy.typing import NDArray

MAX_IMAGES = 256
MAX_AREA_BYTES = 8 << 20
"""Larger batches go in pieces; one image always fits. Memory that no batch has touched costs nothing."""

_ITEM_BYTES = 4


class Area:
    """A mapping of one lane's memory, which both processes make for themselves.

    Args:
        fd: the memory file; stays open.
        image_shape: (C, H, W).
        output_shape: of one image's outputs.
    """

    def __init__(self, fd: int, image_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
        in_bytes, out_bytes = _ITEM_BYTES * math.prod(image_shape), _ITEM_BYTES * math.prod(output_shape)
        self.capacity = max(1, min(MAX_IMAGES, MAX_AREA_BYTES // (in_bytes + out_bytes)))
        """Images of one piece."""
        size = self.capacity * (in_bytes + out_bytes)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory = np.frombuffer(mmap.mmap(fd, size), np.float32)
        border = self.capacity * math.prod(image_shape)
        self.images: NDArray[np.float32] = memory[:border].reshape(self.capacity, *image_shape)
        self.outputs: NDArray[np.float32] = memory[border:].reshape(self.capacity, *output_shape)


def memory_file() -> int:
    """Return a new memory file, empty, which children get only if they are told."""
    return os.memfd_create("serving")
