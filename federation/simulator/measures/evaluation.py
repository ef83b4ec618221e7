"""How well a task model does on a client's cumulative test set, in all and class by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from replayfleet.federation.methods.kit.records import Judge
from replayfleet.federation.simulator.measures.metrics import accuracy
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.labelled_images import LabelledImages
from replayfleet.federation.streams.stream import Indices

BATCH_SIZE = 512
"""Images that are float at a time: bounds memory, whatever the size of the test set."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Test results of one model.

    Attributes:
        num_correct: class id -> test samples of that class judged right.
        num_test: class id -> test samples of that class.
        hits: (M,) bool, which of the M test samples were judged right.
    """

    num_correct: dict[int, int]
    num_test: dict[int, int]
    hits: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    @property
    def num_samples(self) -> int:
        """M."""
        return sum(self.num_test.values())

    @property
    def mean_average_precision(self) -> float | None:
        """None: images with one class each have no boxes to be found."""
        return None

    @property
    def accuracy(self) -> float:
        """a_i^t of Eq. 4; NaN if nothing was tested."""
        return math.nan if not self.num_test else accuracy(sum(self.num_correct.values()), sum(self.num_test.values()))

    def class_accuracy(self) -> dict[int, float]:
        """Class id -> accuracy on that class, classes rising."""
        return {class_id: accuracy(self.num_correct[class_id], count) for class_id, count in self.num_test.items()}

    def group_accuracy(self, groups: Indices, names: Sequence[str]) -> dict[str, float]:
        """Return name -> accuracy on the samples of that group, in the order of ``names``; groups without any stay out.

        Args:
            groups: (M,) the group of each sample, an index into ``names``.
            names: of the groups.
        """
        return {
            name: accuracy(int(self.hits[groups == group].sum()), int((groups == group).sum()))
            for group, name in enumerate(names)
            if (groups == group).any()
        }


def evaluate(judge: Judge, part: LabelledImages, indices: Indices, device: torch.device = _CPU) -> Evaluation:
    """Judge the images ``indices`` of ``part`` in batches, on the judge's device, and compare with their labels."""
    num_classes = len(part.class_names)
    correct = torch.zeros(num_classes, dtype=torch.int64)
    total = torch.zeros(num_classes, dtype=torch.int64)
    all_hits = np.empty(len(indices), dtype=np.bool_)
    for start in range(0, len(indices), BATCH_SIZE):
        data = round_data(part, indices[start : start + BATCH_SIZE])
        hits = judge(data.images.to(device)).argmax(dim=1).cpu() == data.labels
        all_hits[start : start + BATCH_SIZE] = hits.numpy()
        correct += torch.bincount(data.labels[hits], minlength=num_classes)
        total += torch.bincount(data.labels, minlength=num_classes)
    tested = total.nonzero().flatten().tolist()
    return Evaluation({c: int(correct[c]) for c in tested}, {c: int(total[c]) for c in tested}, all_hits)
