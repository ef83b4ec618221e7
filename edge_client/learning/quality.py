"""How good a served model is on held-out samples, in one number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Boxes, Samples
from replayfleet.edge_client.learning.labels.lessons import num_found
from replayfleet.edge_client.serving.slot import Model
from replayfleet.export.running.detections import detections
from replayfleet.models.specs import AnyTaskSpec, DetectionRules, DetectionSpec

_BATCH = 256
_PICTURE_BATCH = 8


def quality(model: Model, samples: Samples, task: AnyTaskSpec) -> dict[str, float]:
    """Return ``accuracy``: the share of samples classified rightly; of a detector ``boxes_found``: of boxes, if any."""
    if isinstance(task, DetectionSpec):
        has_boxes = (samples.labels[:, :, 0] >= 0).any()
        return {"boxes_found": boxes_found(model, samples, task)} if has_boxes else {}
    return {"accuracy": accuracy(model, samples)}


def accuracy(model: Model, samples: Samples) -> float:
    """Return the share of samples that the model classifies rightly, 0 to 1."""
    right = 0
    for first in range(0, len(samples), _BATCH):
        last = first + _BATCH
        right += int((model(samples.images[first:last]).argmax(axis=1) == samples.labels[first:last]).sum())
    return right / len(samples)


def boxes_found(model: Model, samples: Samples, task: DetectionSpec) -> float:
    """Return the share of boxes that the detector finds (``lessons.num_found``), 0 to 1; 0 where there are none.

    It says nothing of boxes that the detector invents: mean average precision does, which needs more than a device has.
    """
    found = total = 0
    for first in range(0, len(samples), _PICTURE_BATCH):
        last = first + _PICTURE_BATCH
        outputs = model(samples.images[first:last])
        for seen, label in zip(detections(task, outputs, DetectionRules()), samples.labels[first:last], strict=True):
            boxes = _boxes(label)
            total += len(boxes)
            found += num_found(boxes, Answers(seen.class_ids, seen.scores, seen.corners))
    return found / total if total else 0.0


def _boxes(label: NDArray[np.float32]) -> Boxes:
    """Return a label's boxes (M, 5), corners in shares of the picture."""
    rows = label[label[:, 0] >= 0]
    halves = rows[:, 3:] / 2
    return Boxes(np.concatenate([rows[:, 1:3] - halves, rows[:, 1:3] + halves], axis=1), rows[:, 0].astype(np.int64))
