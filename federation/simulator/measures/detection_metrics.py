"""How well a detector finds what is there: mean average precision, as COCO defines it, through torchmetrics.

Of all boxes found in all pictures, those of one class are taken from the highest score down. One that overlaps a true
box of its class by at least the threshold, and comes before any other that does, is right; else it is wrong. Average
precision is the mean, over 101 recalls from 0 to 1, of the best precision at that recall or a higher one; mAP is its
mean over the classes that are there. At most 100 boxes of a picture count. Needs the extra ``[detection]``.

Axes: B pictures, M padded true boxes, K classes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replayfleet.export.running.detections import Detections
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import Judge
from replayfleet.federation.methods.steps.detection import found_boxes
from replayfleet.models.specs import EVALUATION_RULES, DetectionRules, DetectionSpec

_BACKEND = "faster_coco_eval"
_FIRST_THRESHOLD = 0
"""Of the ten overlaps 0.5, 0.55, ..., 0.95: the place of 0.5."""


@dataclass(frozen=True, slots=True)
class DetectionQuality:
    """Average precision of a detector; classes without a single true box have none and are left out.

    Attributes:
        class_ap50: class id -> average precision where an overlap of 0.5 is enough, classes rising.
        class_ap: class id -> the mean over overlaps of 0.5, 0.55, ..., 0.95.
    """

    class_ap50: dict[int, float]
    class_ap: dict[int, float]

    @property
    def map50(self) -> float:
        """mAP@0.5, 0 to 1; NaN if nothing was there to be found."""
        return _mean(self.class_ap50)

    @property
    def map(self) -> float:
        """mAP@0.5:0.95, 0 to 1; NaN if nothing was there to be found."""
        return _mean(self.class_ap)


def detection_quality(found: Sequence[Detections], labels: NDArray[np.float32]) -> DetectionQuality:
    """Compare what was found in B pictures with what is there.

    Args:
        found: of each picture; nearly everything, with a low score threshold.
        labels: (B, M, 5) float32, as of ``RoundData``.

    Raises:
        ValueError: Not as many pictures were searched as labelled.
        SettingsError: torchmetrics or its backend isn't installed.
    """
    if labels.ndim != 3 or labels.shape[2] != 5 or len(found) != len(labels):
        raise ValueError(f"labels are {labels.shape}, expected ({len(found)}, M, 5)")
    metric = _metric()
    metric.update([_as_found(one) for one in found], [_as_true(boxes) for boxes in labels])
    result = metric.compute()
    precision = result["precision"][..., 0, -1]  # (10 overlaps, 101 recalls, classes): of all sizes, at most 100 boxes
    class_ids = [int(class_id) for class_id in result["classes"].reshape(-1)]
    there = {class_id: k for k, class_id in enumerate(class_ids) if precision.numel() and precision[0, 0, k] >= 0}
    return DetectionQuality(
        {class_id: float(precision[_FIRST_THRESHOLD, :, k].mean()) for class_id, k in sorted(there.items())},
        {class_id: float(precision[:, :, k].mean()) for class_id, k in sorted(there.items())},
    )


def evaluate_detector(
    spec: DetectionSpec,
    judge: Judge,
    images: Tensor,
    labels: Tensor,
    rules: DetectionRules = EVALUATION_RULES,
) -> DetectionQuality:
    """Return how well a detector does on labelled pictures.

    Args:
        spec: of the detector.
        judge: its raw outputs, see ``task_model.judge_with``.
        images: (B, C, H, W) float32 in [-1, 1], on the judge's torch device.
        labels: (B, M, 5) float32, as of ``RoundData``.
        rules: what counts as found.

    Raises:
        SettingsError: torchmetrics or its backend isn't installed.
    """
    return detection_quality(found_in(spec, judge, images, rules), labels.cpu().numpy())


def found_in(
    spec: DetectionSpec, judge: Judge, images: Tensor, rules: DetectionRules = EVALUATION_RULES
) -> list[Detections]:
    """Return what a detector finds in each of B pictures; the arguments are those of ``evaluate_detector``."""
    return [
        Detections(one.corners.cpu().numpy(), one.scores.cpu().numpy(), one.class_ids.cpu().numpy())
        for one in found_boxes(spec, judge(images), rules)
    ]


def require_metric() -> None:
    """Raise SettingsError if torchmetrics or its backend isn't installed."""
    _metric()


def _metric() -> Any:
    try:
        module = importlib.import_module("torchmetrics.detection")
        importlib.import_module(_BACKEND)
    except ImportError as error:
        raise SettingsError(
            "mean average precision needs torchmetrics and faster-coco-eval; pip install 'replayfleet[detection]'"
        ) from error
    # COCO's own numbers: torchmetrics rounds its to float32, and a recall of 3/5 then isn't one of 0.6.
    metric = module.MeanAveragePrecision(
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0, 1, 101).tolist(),
        backend=_BACKEND,
        extended_summary=True,
    )
    metric.warn_on_many_detections = False
    return metric


def _as_found(found: Detections) -> dict[str, Tensor]:
    return {
        "boxes": torch.from_numpy(found.corners),
        "scores": torch.from_numpy(found.scores),
        "labels": torch.from_numpy(found.class_ids),
    }


def _as_true(boxes: NDArray[np.float32]) -> dict[str, Tensor]:
    true = boxes[boxes[:, 0] >= 0]
    halves = true[:, 3:] / 2
    corners = np.concatenate([true[:, 1:3] - halves, true[:, 1:3] + halves], axis=1)
    return {"boxes": torch.from_numpy(corners), "labels": torch.from_numpy(true[:, 0].astype(np.int64))}


def _mean(by_class: dict[int, float]) -> float:
    return sum(by_class.values()) / len(by_class) if by_class else math.nan
