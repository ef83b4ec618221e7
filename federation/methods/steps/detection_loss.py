"""The loss of a detector in its three parts: where boxes are, whether there is one, and of which class it is.

Redmon & Farhadi 2017, "YOLO9000: Better, Faster, Stronger", section 2; its parts go back to Redmon et al. 2016, "You
Only Look Once", Eq. 3. Of every true box the anchor of the nearest shape in the cell of the box's centre answers for
it; all others answer for nothing. The weights are a tenth of those of the authors' configuration for VOC: its step size
is 0.001, that of the methods here 0.01.

Differences from the papers:

1. Confidence descends binary cross-entropy instead of a squared error, as the same authors do later ("YOLOv3", section
   2.1): a squared error of a sigmoid hardly moves what is confidently wrong.
2. Errors of small boxes weigh more by ``2 - w h`` (the authors' code, not their text).
3. The error of a log size counts squared up to 1, which is a factor of e, and linearly beyond (``2 |d| - 1``): squared
   throughout, it throws training over at step sizes that the other parts bear.
4. Of two true boxes with one anchor and cell the later one counts, as in the authors' code.

Axes: B batch, M padded true boxes, T anchors that answer for one, A anchors, Y rows and X columns of cells, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from replayfleet.federation.methods.steps.detection import Fields, corners_of, overlaps
from replayfleet.models.specs import DetectionSpec

LOCALISATION_WEIGHT = 0.1
OBJECT_WEIGHT = 0.5
"""Of the confidence of an anchor that answers for a box."""
NO_OBJECT_WEIGHT = 0.1
"""Of the confidence of one that doesn't."""
CLASSIFICATION_WEIGHT = 0.1
IGNORE_THRESHOLD = 0.6
"""An anchor that answers for nothing but overlaps some true box by more isn't told that it is wrong."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which anchors answer for which true boxes.

    Attributes:
        places: four of (T,) int64: picture, anchor, row, column. No place is there twice.
        boxes: (T, 4) the true boxes: centre x, centre y, width, height in shares of the picture's.
        class_ids: (T,) int64.
    """

    places: tuple[Tensor, Tensor, Tensor, Tensor]
    boxes: Tensor
    class_ids: Tensor


@dataclass(frozen=True, slots=True)
class Confidences:
    """What confidences should have been.

    Attributes:
        targets: (B, A, Y, X): how far the predicted box overlaps the one it answers for; 0 where it answers for none.
        weights: (B, A, Y, X): 0 where the confidence doesn't matter.
    """

    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class LossParts:
    """Weighted sums over a picture's anchors, each a scalar: the mean over the pictures of a batch."""

    localisation: Tensor
    confidence: Tensor
    classification: Tensor

    @property
    def total(self) -> Tensor:
        """What training descends."""
        return self.localisation + self.confidence + self.classification


def detection_loss(spec: DetectionSpec, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the three parts, a scalar.

    Args:
        spec: of the detector.
        outputs: (B, A * (5 + K), Y, X), raw.
        labels: (B, M, 5) float32: class id, centre x, centre y, width, height in shares of the picture's; padding has
            class id -1.

    Raises:
        ValueError: Shapes don't fit, or a class id is not below K.
    """
    if labels.ndim != 3 or len(labels) != len(outputs) or labels.shape[2] != 5:
        raise ValueError(f"labels are {tuple(labels.shape)}, expected ({len(outputs)}, M, 5)")
    labels = labels[:, (labels[..., 0] >= 0).any(dim=0)]  # padding that all pictures have only costs time
    fields = Fields.of(spec, outputs.to(torch.promote_types(outputs.dtype, torch.float32)))
    assignment = assign(spec, labels)
    confidences = wanted_confidences(spec, fields, labels, assignment)
    return loss_parts(spec, fields, assignment, confidences).total


def assign(spec: DetectionSpec, labels: Tensor) -> Assignment:
    """Return which anchors answer for the true boxes of labels (B, M, 5).

    Raises:
        ValueError: A class id is not below K.
    """
    picture, place = (labels[..., 0] >= 0).nonzero(as_tuple=True)
    boxes, class_ids = labels[picture, place, 1:], labels[picture, place, 0].long()
    if len(class_ids) and int(class_ids.max()) >= spec.num_classes:
        raise ValueError(f"a box has class {int(class_ids.max())}, the task has classes 0 to {spec.num_classes - 1}")
    rows, columns = spec.grid_shape
    column = (boxes[:, 0] * columns).long().clamp(0, columns - 1)
    row = (boxes[:, 1] * rows).long().clamp(0, rows - 1)
    anchor = _nearest_anchors(spec, boxes[:, 2:])
    flat = ((picture * spec.num_anchors + anchor) * rows + row) * columns + column
    order = torch.arange(len(flat), device=flat.device)
    latest = torch.full((len(labels) * spec.num_anchors * rows * columns,), -1, device=flat.device)
    kept = latest.scatter_reduce(0, flat, order, "amax")[flat] == order
    places = (picture[kept], anchor[kept], row[kept], column[kept])
    return Assignment(places, boxes[kept], class_ids[kept])


@torch.no_grad()
def wanted_confidences(spec: DetectionSpec, fields: Fields, labels: Tensor, assignment: Assignment) -> Confidences:
    """Return what the confidences should be, given where the predicted boxes are now; constants to the descent."""
    predicted = corners_of(fields.boxes(spec))
    weights = torch.full_like(fields.confidences, NO_OBJECT_WEIGHT)
    targets = torch.zeros_like(fields.confidences)
    if labels.shape[1] > 0:
        true = corners_of(labels[..., 1:]).to(predicted.dtype)
        shared = overlaps(predicted.flatten(1, 3)[:, None], true[:, :, None])  # (B, M, A Y X)
        shared = torch.where(labels[:, :, None, 0] >= 0, shared, 0.0).amax(dim=1)
        weights[shared.view_as(weights) > IGNORE_THRESHOLD] = 0.0
    own = overlaps(predicted[assignment.places], corners_of(assignment.boxes).to(predicted.dtype))
    targets[assignment.places] = own
    weights[assignment.places] = OBJECT_WEIGHT
    return Confidences(targets, weights)


def loss_parts(spec: DetectionSpec, fields: Fields, assignment: Assignment, confidences: Confidences) -> LossParts:
    """Return the three parts, differentiable in ``fields``; with nothing to answer for only confidence is left."""
    rows, columns = spec.grid_shape
    num_pictures = len(fields.confidences)
    dtype = fields.confidences.dtype
    _, anchor, row, column = assignment.places
    boxes = assignment.boxes.to(dtype)
    cells = torch.stack([column, row], dim=1)
    wanted_offsets = boxes[:, :2] * boxes.new_tensor([columns, rows]) - cells
    wanted_sizes = (boxes[:, 2:] / boxes.new_tensor(spec.anchors)[anchor]).log()
    offset_errors = (fields.offsets[assignment.places].sigmoid() - wanted_offsets).square().sum(dim=1)
    size_errors = 2 * F.smooth_l1_loss(fields.sizes[assignment.places], wanted_sizes, reduction="none").sum(dim=1)
    small_weigh_more = 2 - boxes[:, 2:].prod(dim=1)
    entropies = F.binary_cross_entropy_with_logits(
        fields.confidences, confidences.targets, confidences.weights, reduction="sum"
    )
    classes = F.cross_entropy(fields.classes[assignment.places], assignment.class_ids, reduction="sum")
    return LossParts(
        LOCALISATION_WEIGHT * (small_weigh_more * (offset_errors + size_errors)).sum() / num_pictures,
        entropies / num_pictures,
        CLASSIFICATION_WEIGHT * classes / num_pictures,
    )


def _nearest_anchors(spec: DetectionSpec, sizes: Tensor) -> Tensor:
    """Return (T,) the anchor that overlaps most with each of (T, 2) sizes when both have the same centre."""
    anchors = sizes.new_tensor(spec.anchors)
    intersections = torch.minimum(sizes[:, None], anchors).prod(dim=-1)
    unions = sizes.prod(dim=-1)[:, None] + anchors.prod(dim=-1) - intersections
    return (intersections / unions).argmax(dim=1)
