"""What a view offers: from a picture to the served model's inputs, and from its outputs to answers.

Axes: B inputs of one picture, C channels, H height, W width, K classes, N answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.cameras.base import Picture


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one picture asks the served model.

    Attributes:
        images: (B, C, H, W) float32 in [-1, 1]; B may be 0.
        corners: (B, 4) float32, left, top, right, bottom in pixels of the picture: what each input shows. None: B is 1
            and the input shows all of it.
        size: (width, height) of the picture; None where nothing depends on it.
        box_indices: (B,) int64, which of the picture's annotated boxes each input shows; None where it shows none.
        num_left_out: objects of the picture that ask nothing because it has too many.
    """

    images: NDArray[np.float32]
    corners: NDArray[np.float32] | None = None
    box_indices: NDArray[np.int64] | None = None
    size: tuple[int, int] | None = None
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """What the served model said about one picture.

    Attributes:
        class_ids: (N,) int64, indices into the task's class names.
        confidences: (N,) float32, 0 to 1.
        corners: (N, 4) float32 in pixels of the picture; None where the one answer is about all of it.
        num_left_out: objects without an answer because the picture has too many; of a detector the most that it can be.
    """

    class_ids: NDArray[np.int64]
    confidences: NDArray[np.float32]
    corners: NDArray[np.float32] | None = None
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.class_ids)

    @classmethod
    def none(cls) -> Answers:
        """Return what is said about a picture that asks nothing."""
        return cls(np.empty(0, np.int64), np.empty(0, np.float32), np.empty((0, 4), np.float32))


class View(Protocol):
    """How one task looks at pictures."""

    def inputs(self, picture: Picture) -> Inputs:
        """Return what the picture asks; runs on the serving thread, so it must be quick."""

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        """Return what the model's outputs (B, ...) mean.

        Raises:
            ValueError: They aren't finite, or not of the task's shape.
        """


def classified(logits: NDArray[np.float32], inputs: Inputs) -> Answers:
    """Return the winning class of each input, with its softmax probability.

    Raises:
        ValueError: The logits (B, K) aren't finite, or not one row per input.
    """
    exact = logits.astype(np.float64)
    if exact.ndim != 2 or len(exact) != len(inputs.images):
        raise ValueError(f"logits have shape {logits.shape}, expected {len(inputs.images)} rows")
    if not np.isfinite(exact).all():
        raise ValueError("logits are not finite")
    winners = exact.argmax(axis=1)
    rows = np.arange(len(exact))
    shares = 1.0 / np.exp(exact - exact[rows, winners][:, None]).sum(axis=1)
    return Answers(winners.astype(np.int64), shares.astype(np.float32), inputs.corners, inputs.num_left_out)
