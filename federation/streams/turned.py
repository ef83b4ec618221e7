"""A data set with four times the classes: each quarter turn of a class is a class of its own.

As few-shot learning does with handwritten characters (Santoro et al. 2016, "Meta-Learning with Memory-Augmented Neural
Networks", section 4.1).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replayfleet.federation.streams.labelled_images import LabelledImages, ShownImages

TURNS = 4


def turned_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Return 4 K names: the K classes upright, then a quarter turn to the left of each, and so on."""
    return tuple(f"{name}-{90 * turn}" if turn else name for turn in range(TURNS) for name in class_names)


def turned(part: LabelledImages) -> LabelledImages:
    """Return 4 N images of 4 K classes from N square ones; class ``turn K + c`` is c after ``turn`` quarter turns."""
    num_classes = len(part.class_names)
    labels = np.concatenate([part.labels + turn * num_classes for turn in range(TURNS)])
    images = ShownImages(part.images, tuple(functools.partial(_turn, turn) for turn in range(TURNS)))
    return LabelledImages(images, labels, turned_names(part.class_names))


def _turn(turns: int, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.rot90(images, turns, axes=(1, 2))
