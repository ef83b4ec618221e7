"""The whole picture as one input: what kind of scene is this?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Inputs, Picture, classified
from replayfleet.edge_client.frames.views.pixels import fitted
from replayfleet.models.specs import TaskSpec


class WholePicture:
    """Implements ``View`` for classification of whole pictures.

    Args:
        task: says how large an input is, and whether it is grey.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._task = task

    def inputs(self, picture: Picture) -> Inputs:
        return Inputs(fitted(picture.pixels, self._task)[None])

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        return classified(outputs, inputs)
