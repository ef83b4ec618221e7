"""The whole picture as one input of a detector: what is where?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Inputs, Picture
from replayfleet.edge_client.frames.views.pixels import fitted
from replayfleet.export.running.detections import detections
from replayfleet.models.specs import DetectionRules, DetectionSpec


class Detector:
    """Implements ``View`` for detection.

    Args:
        task: says how large an input is; a picture of another shape is stretched to it, and so are boxes.
        rules: what counts as found.
    """

    def __init__(self, task: DetectionSpec, rules: DetectionRules | None = None) -> None:
        self._task = task
        self._rules = rules or DetectionRules()

    def inputs(self, picture: Picture) -> Inputs:
        return Inputs(fitted(picture.pixels, self._task)[None], size=picture.size)

    def answers(self, outputs: NDArray[np.float32], inputs: Inputs) -> Answers:
        assert inputs.size is not None
        (found,) = detections(self._task, outputs, self._rules)
        return Answers(found.class_ids, found.scores, found.in_pixels(*inputs.size), found.num_left_out)
