"""How well a detector does on a client's cumulative test set: mean average precision in all, by class and by town."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from replayfleet.export.running.detections import Detections
from replayfleet.federation.methods.kit.records import Judge
from replayfleet.federation.simulator.measures.detection_metrics import DetectionQuality, detection_quality, found_in
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.driving.pictures import DrivingPictures
from replayfleet.federation.streams.stream import Indices
from replayfleet.models.specs import DetectionSpec

BATCH_SIZE = 32
"""Pictures that are float at a time: bounds memory, whatever the size of the test set."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DetectionEvaluation:
    """Test results of one detector on M pictures, with what ``evaluation.Evaluation`` has.

    Attributes:
        found: of each picture.
        labels: (M, boxes, 5) float32, as of ``RoundData``.
    """

    found: Sequence[Detections]
    labels: NDArray[np.float32]

    @functools.cached_property
    def quality(self) -> DetectionQuality:
        """Average precisions of all M pictures."""
        return detection_quality(self.found, self.labels)

    @property
    def num_samples(self) -> int:
        """M."""
        return len(self.labels)

    @property
    def accuracy(self) -> float:
        """mAP@0.5, which stands where classifications have their accuracy; NaN if nothing was there to be found."""
        return self.quality.map50

    @property
    def mean_average_precision(self) -> float | None:
        """mAP@0.5:0.95; NaN if nothing was there to be found."""
        return self.quality.map

    @property
    def in_task(self) -> None:
        """None: pictures have no task of their own."""
        return

    def class_accuracy(self) -> dict[int, float]:
        """Class id -> its average precision at an overlap of 0.5, classes rising."""
        return dict(self.quality.class_ap50)

    def group_accuracy(self, groups: Indices, names: Sequence[str]) -> dict[str, float]:
        """Return name -> mAP@0.5 on the pictures of that group; groups that show nothing stay out.

        Args:
            groups: (M,) the group of each picture, an index into ``names``.
            names: of the groups.
        """
        found: dict[str, float] = {}
        for group, name in enumerate(names):
            members = np.flatnonzero(groups == group)
            if len(members):
                quality = detection_quality([self.found[index] for index in members.tolist()], self.labels[members])
                if not math.isnan(quality.map50):
                    found[name] = quality.map50
        return found


def evaluate_boxes(
    spec: DetectionSpec, judge: Judge, part: DrivingPictures, indices: Indices, device: torch.device = _CPU
) -> DetectionEvaluation:
    """Search the pictures ``indices`` of ``part`` in batches, on the judge's device.

    Raises:
        SettingsError: A picture is damaged.
    """
    found: list[Detections] = []
    for start in range(0, len(indices), BATCH_SIZE):
        data = round_data(part, indices[start : start + BATCH_SIZE])
        found += found_in(spec, judge, data.images.to(device))
    return DetectionEvaluation(found, part.labels[indices])
