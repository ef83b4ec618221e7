"""How well a task model does on a client's cumulative test set, in all and class by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Test results of one model on M images.

    Attributes:
        hits: (M,) bool, which of them were judged right.
        labels: (M,) int64, what they show.
    """

    hits: NDArray[np.bool_]
    labels: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        """M."""
        return len(self.labels)

    @property
    def mean_average_precision(self) -> float | None:
        """None: images with one class each have no boxes to be found."""
        return None

    @property
    def accuracy(self) -> float:
        """a_i^t of Eq. 4; NaN if nothing was tested."""
        return accuracy(int(self.hits.sum()), len(self.hits)) if len(self.hits) else math.nan

    def class_accuracy(self) -> dict[int, float]:
        """Class id -> accuracy on that class, classes rising."""
        return {class_id: self._on(self.labels == class_id) for class_id in np.unique(self.labels).tolist()}

    def group_accuracy(self, groups: Indices, names: Sequence[str]) -> dict[str, float]:
        """Return name -> accuracy on the samples of that group, in the order of ``names``; groups without any stay out.

        Args:
            groups: (M,) the group of each sample, an index into ``names``.
            names: of the groups.
        """
        return {name: self._on(groups == group) for group, name in enumerate(names) if (groups == group).any()}

    def _on(self, members: NDArray[np.bool_]) -> float:
        return accuracy(int(self.hits[members].sum()), int(members.sum()))


def evaluate(judge: Judge, part: LabelledImages, indices: Indices, device: torch.device = _CPU) -> Evaluation:
    """Judge the images ``indices`` of ``part`` in batches, on the judge's device, and compare with their labels."""
    hits = np.empty(len(indices), dtype=np.bool_)
    for start in range(0, len(indices), BATCH_SIZE):
        data = round_data(part, indices[start : start + BATCH_SIZE])
        judged = judge(data.images.to(device)).argmax(dim=1).cpu()
        hits[start : start + BATCH_SIZE] = (judged == data.labels).numpy()
    return Evaluation(hits, part.labels[indices])
