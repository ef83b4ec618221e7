"""From a detector's raw outputs to boxes with scores (YOLO9000, Redmon & Farhadi 2017, section 2).

``export.running.detections`` does the same with numpy, for devices without torch; a test holds that both agree.
Axes: B batch, A anchors, Y rows and X columns of cells, N = A Y X candidates of one picture, M boxes, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replayfleet.models.specs import DetectionRules, DetectionSpec

MAX_LOG_SIZE = 8.0
"""A box is at most e^8 anchors wide: a model that diverged then still has finite boxes."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A detector's raw outputs, taken apart.

    Attributes:
        offsets: (B, A, Y, X, 2) t_x and t_y.
        sizes: (B, A, Y, X, 2) t_w and t_h.
        confidences: (B, A, Y, X) t_o.
        classes: (B, A, Y, X, K) logits.
    """

    offsets: Tensor
    sizes: Tensor
    confidences: Tensor
    classes: Tensor

    @classmethod
    def of(cls, spec: DetectionSpec, outputs: Tensor) -> Fields:
        """Take outputs (B, A * (5 + K), Y, X) apart.

        Raises:
            ValueError: They are not those of a detector of this spec.
        """
        if outputs.shape[1:] != spec.output_shape:
            raise ValueError(f"outputs are {tuple(outputs.shape)}, expected (B, *{spec.output_shape})")
        parts = outputs.view(len(outputs), spec.num_anchors, 5 + spec.num_classes, *spec.grid_shape)
        parts = parts.permute(0, 1, 3, 4, 2)
        return cls(parts[..., :2], parts[..., 2:4], parts[..., 4], parts[..., 5:])

    def boxes(self, spec: DetectionSpec) -> Tensor:
        """Return (B, A, Y, X, 4): centre x, centre y, width, height in shares of the picture's.

        ``b_x = sigmoid(t_x) + c_x``, ``b_w = p_w exp(t_w)``, and so for y and h (section 2, "Direct location
        prediction"), in cells there and divided by their number here.
        """
        rows, columns = spec.grid_shape
        x, y = (torch.arange(n, dtype=self.offsets.dtype, device=self.offsets.device) for n in (columns, rows))
        cells = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        centres = (self.offsets.sigmoid() + cells) / self.offsets.new_tensor([columns, rows])
        anchors = self.sizes.new_tensor(spec.anchors)[:, None, None, :]
        return torch.cat([centres, anchors * self.sizes.clamp(-MAX_LOG_SIZE, MAX_LOG_SIZE).exp()], dim=-1)


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """What a detector found in one picture, highest score first.

    Attributes:
        corners: (N, 4) float32, left, top, right, bottom in shares of the picture's width and height, 0 to 1.
        scores: (N,) float32, confidence times class probability.
        class_ids: (N,) int64.
    """

    corners: Tensor
    scores: Tensor
    class_ids: Tensor


def corners_of(boxes: Tensor) -> Tensor:
    """Return (..., 4) left, top, right, bottom of (..., 4) centre x, centre y, width, height."""
    centres, halves = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centres - halves, centres + halves], dim=-1)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return intersection over union of boxes given by corners: (..., 4) and (..., 4), broadcast -> (...).

    Boxes of no area overlap with nothing, themselves included.
    """
    (left, top, right, bottom), others = first.unbind(dim=-1), second.unbind(dim=-1)  # a side at a time is faster
    width = (torch.minimum(right, others[2]) - torch.maximum(left, others[0])).clamp_min(0)
    height = (torch.minimum(bottom, others[3]) - torch.maximum(top, others[1])).clamp_min(0)
    intersection = width * height
    area = (right - left).clamp_min(0) * (bottom - top).clamp_min(0)
    other_area = (others[2] - others[0]).clamp_min(0) * (others[3] - others[1]).clamp_min(0)
    union = area + other_area - intersection
    return torch.where(union > 0, intersection / union.clamp_min(torch.finfo(union.dtype).tiny), 0.0)


@torch.no_grad()
def candidates(spec: DetectionSpec, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what every anchor of every cell says it sees.

    Args:
        spec: of the detector.
        outputs: (B, A * (5 + K), Y, X), raw.

    Returns:
        Corners (B, N, 4) within the picture; scores (B, N), ``sigmoid(t_o) max_k softmax(logits)_k``; class ids (B, N).
        N runs over anchors, rows and columns, the last fastest.
    """
    fields = Fields.of(spec, outputs.float())
    corners = corners_of(fields.boxes(spec)).clamp(0.0, 1.0)
    probabilities, class_ids = fields.classes.softmax(dim=-1).max(dim=-1)
    scores = fields.confidences.sigmoid() * probabilities
    return corners.flatten(1, 3), scores.flatten(1), class_ids.flatten(1)


@torch.no_grad()
def found_boxes(spec: DetectionSpec, outputs: Tensor, rules: DetectionRules) -> list[FoundBoxes]:
    """Return what a detector found in each picture: thresholds, then non-maximum suppression class by class.

    Args:
        spec: of the detector.
        outputs: (B, A * (5 + K), Y, X), raw.
        rules: what counts as found.
    """
    from torchvision.ops import batched_nms  # imports for a second, and only detection needs it

    found = []
    for corners, scores, class_ids in zip(*candidates(spec, outputs), strict=True):
        kept = (scores >= rules.score_threshold).nonzero().flatten()
        # In float64: it moves each class to a place of its own, so far out that float32 would round small boxes.
        kept = kept[batched_nms(corners[kept].double(), scores[kept].double(), class_ids[kept], rules.iou_threshold)]
        kept = kept[: rules.max_detections]
        found.append(FoundBoxes(corners[kept], scores[kept], class_ids[kept]))
    return found
