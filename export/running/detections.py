"""From an exported detector's raw outputs to boxes with scores. Needs numpy only, as a device that serves has no torch.

It stands beside the graph and not in it: non-maximum suppression has as many answers as there are things to be seen,
which execution providers do badly or not at all, and the golden vector can compare raw outputs.
``federation.methods.steps.detection`` is the same in torch; a test holds that both agree.
Axes: B batch, A anchors, Y rows and X columns of cells, N = A Y X candidates of one picture, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replayfleet.models.specs import DetectionRules, DetectionSpec

FOUND_IOU = 0.5
"""A box is found if an answer of its class overlaps it by at least so much (intersection over union)."""

_MAX_LOG_SIZE = 8.0
"""As in ``federation.methods.steps.detection``."""


@dataclass(frozen=True, slots=True)
class Detections:
    """What a detector found in one picture, highest score first.

    Attributes:
        corners: (N, 4) float32, left, top, right, bottom in shares of the picture's width and height, 0 to 1.
        scores: (N,) float32, confidence times class probability.
        class_ids: (N,) int64.
        num_left_out: candidates over the threshold that ``max_detections`` left unread. They may overlap each other, so
            it is the most things that can be missing.
    """

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.scores)

    def in_pixels(self, width: int, height: int) -> NDArray[np.float32]:
        """Return the corners in pixels of a picture of this size."""
        return self.corners * np.array([width, height, width, height], np.float32)


def detections(spec: DetectionSpec, outputs: NDArray[Any], rules: DetectionRules) -> list[Detections]:
    """Return what a detector found in each picture: thresholds, then non-maximum suppression class by class.

    Args:
        spec: of the detector.
        outputs: (B, A * (5 + K), Y, X), raw.
        rules: what counts as found.

    Raises:
        ValueError: The outputs are not those of a detector of this spec, or not finite.
    """
    if outputs.shape[1:] != spec.output_shape:
        raise ValueError(f"outputs are {outputs.shape}, expected (B, *{spec.output_shape})")
    if not np.isfinite(outputs).all():
        raise ValueError("outputs are not finite")
    found = []
    for corners, scores, class_ids in zip(*decode(spec, outputs), strict=True):
        likely = np.flatnonzero(scores >= rules.score_threshold)
        stays, num_left_out = non_max_suppression(corners[likely], scores[likely], class_ids[likely], rules)
        kept = likely[stays]
        found.append(Detections(corners[kept], scores[kept], class_ids[kept], num_left_out))
    return found


def decode(
    spec: DetectionSpec, outputs: NDArray[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return what every anchor of every cell says it sees (YOLO9000, section 2).

    Returns:
        Corners (B, N, 4) within the picture; scores (B, N), ``sigmoid(t_o) max_k softmax(logits)_k``; class ids (B, N).
    """
    rows, columns = spec.grid_shape
    parts = outputs.astype(np.float32, copy=False)
    parts = parts.reshape(len(outputs), spec.num_anchors, 5 + spec.num_classes, rows, columns)
    x = (_sigmoid(parts[:, :, 0]) + np.arange(columns, dtype=np.float32)) / np.float32(columns)
    y = (_sigmoid(parts[:, :, 1]) + np.arange(rows, dtype=np.float32)[:, None]) / np.float32(rows)
    halves = np.array(spec.anchors, np.float32)[:, :, None, None] / 2  # (A, 2, 1, 1)
    halves = halves * np.exp(parts[:, :, 2:4].clip(-_MAX_LOG_SIZE, _MAX_LOG_SIZE))  # (B, A, 2, Y, X)
    half_width, half_height = halves[:, :, 0], halves[:, :, 1]
    corners = np.stack([x - half_width, y - half_height, x + half_width, y + half_height], axis=-1).clip(0, 1)
    logits = parts[:, :, 5:]
    exponentials = np.exp(logits - logits.max(axis=2, keepdims=True))
    scores = _sigmoid(parts[:, :, 4]) / exponentials.sum(axis=2)  # the likeliest class has exponential 1
    shape = (len(outputs), spec.num_anchors * rows * columns)
    return corners.reshape(*shape, 4), scores.reshape(shape), logits.argmax(axis=2).astype(np.int64).reshape(shape)


def num_found(
    corners: NDArray[np.float32],
    class_ids: NDArray[np.int64],
    true_corners: NDArray[np.float32],
    true_class_ids: NDArray[np.int64],
) -> int:
    """Return how many true boxes were found, each answer counting for one: the best of its class not yet taken.

    Args:
        corners: (N, 4) of the answers, the surest first.
        class_ids: (N,) of the answers.
        true_corners: (T, 4) of what is there, in the same unit.
        true_class_ids: (T,) of what is there.
    """
    if not len(class_ids) or not len(true_class_ids):
        return 0
    upper = np.maximum(corners[:, None, :2], true_corners[None, :, :2]).astype(np.float64)
    lower = np.minimum(corners[:, None, 2:], true_corners[None, :, 2:])
    shared = (lower - upper).clip(0, None).prod(axis=2)
    areas, true_areas = ((box[:, 2:] - box[:, :2]).astype(np.float64).prod(axis=1) for box in (corners, true_corners))
    overlaps = shared / np.maximum(areas[:, None] + true_areas[None] - shared, 1e-12)
    overlaps[class_ids[:, None] != true_class_ids[None]] = 0.0
    taken = np.zeros(len(true_class_ids), bool)
    for row in overlaps:
        best = int(np.where(taken, 0.0, row).argmax())
        taken[best] |= row[best] >= FOUND_IOU and not taken[best]
    return int(taken.sum())


def non_max_suppression(
    corners: NDArray[np.float32], scores: NDArray[np.float32], class_ids: NDArray[np.int64], rules: DetectionRules
) -> tuple[NDArray[np.int64], int]:
    """Return (indices of the boxes that stay, how many others were left when there were enough).

    The highest score comes first, at most ``rules.max_detections`` stay. A box goes if one of its class with a higher
    score stays and overlaps it by more than ``rules.iou_threshold``; of equal scores the earlier one counts as higher.
    """
    waiting = np.argsort(-scores, kind="stable")
    areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    kept: list[int] = []
    while len(waiting) and len(kept) < rules.max_detections:
        best, waiting = int(waiting[0]), waiting[1:]
        kept.append(best)
        upper = np.maximum(corners[waiting, :2], corners[best, :2])
        lower = np.minimum(corners[waiting, 2:], corners[best, 2:])
        intersections = (lower - upper).clip(0, None).prod(axis=1)
        unions = areas[waiting] + areas[best] - intersections
        too_near = (intersections > rules.iou_threshold * unions) & (class_ids[waiting] == class_ids[best])
        waiting = waiting[~too_near]
    return np.array(kept, np.int64), len(waiting)


def _sigmoid(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1 / (1 + exp(-x)), which can't overflow in this form."""
    result: NDArray[np.float32] = 0.5 * (1 + np.tanh(0.5 * values))
    return result
