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
        hits_in_task: (M,) bool, which would be if only the classes of the image's task could be named; None if nobody
            asked.
    """

    hits: NDArray[np.bool_]
    labels: NDArray[np.int64]
    hits_in_task: NDArray[np.bool_] | None = None

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

    @property
    def in_task(self) -> Evaluation | None:
        """The same where an image's task was known; None if nobody asked."""
        return None if self.hits_in_task is None else Evaluation(self.hits_in_task, self.labels)

    def _on(self, members: NDArray[np.bool_]) -> float:
        return accuracy(int(self.hits[members].sum()), int(members.sum()))


def evaluate(
    judge: Judge,
    part: LabelledImages,
    indices: Indices,
    device: torch.device = _CPU,
    *,
    of_task: NDArray[np.bool_] | None = None,
) -> Evaluation:
    """Judge the images ``indices`` of ``part`` in batches, on the judge's device, and compare with their labels.

    Args:
        judge: images -> (B, K), the greatest of which is the answer; where that isn't finite there is none.
        part: of a data set.
        indices: (M,) into it.
        device: the judge's.
        of_task: (M, K) the classes of each image's task, if answers among those are to be counted too.
    """
    hits = np.empty(len(indices), dtype=np.bool_)
    hits_in_task = None if of_task is None else np.empty_like(hits)
    for start in range(0, len(indices), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        data = round_data(part, indices[batch])
        answers = judge(data.images.to(device))
        tells = answers.amax(dim=1).isfinite()  # also of NaN, which amax passes on: then nothing is the answer
        hits[batch] = ((answers.argmax(dim=1) == data.labels.to(answers.device)) & tells).cpu().numpy()
        if of_task is not None and hits_in_task is not None:
            others = torch.from_numpy(~of_task[batch]).to(answers.device)
            judged = answers.masked_fill(others, -torch.inf).argmax(dim=1)
            hits_in_task[batch] = ((judged == data.labels.to(answers.device)) & tells).cpu().numpy()
    return Evaluation(hits, part.labels[indices], hits_in_task)
