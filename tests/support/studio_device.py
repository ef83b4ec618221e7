"""What a device's label studio stands on, without a fleet: real frames, desk and collector for a task of boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from replayfleet.edge_client.flow import Answers, Picture, Prediction, Shown
from replayfleet.edge_client.frames.views import Detector
from replayfleet.edge_client.learning.camera_samples import CameraSamples
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, TakeBack
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.operator.studio.studio import Known, Studio
from replayfleet.edge_client.sources import source_opener
from replayfleet.models.specs import DetectionSpec

TASK = DetectionSpec(3, 64, 96, ("car", "bike"), anchors=((0.25, 0.25),), stride=32, max_boxes=3)
WIDTH, HEIGHT = 192, 128


class Device:
    """What a client does with an operator's word, without a fleet."""

    def __init__(self, folder: Path) -> None:
        opener = source_opener(["synthetic://"], folder, learning=LearningSettings(min_samples=30))
        samples = opener(TASK).samples
        assert isinstance(samples, CameraSamples)
        self.samples = samples
        self.now = 0.0
        self.studio = Studio(self.known, self.learn, 60.0, lambda: self.now)

    def known(self) -> Known:
        return Known("cam-1", TASK.class_names, 0, 1, self.samples.progress(), TASK.max_boxes)

    def learn(self, feedback: AnyFeedback, shown: Shown | None = None) -> TakeBack:
        return self.samples.feedback(feedback, shown)

    def see(self, frame: int, *found: tuple[float, float, float, float]) -> None:
        pixels = np.random.default_rng(frame).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        picture = Picture("front", frame, pixels, 0.0)
        corners = np.array(found, np.float32).reshape(-1, 4)
        answers = Answers(np.zeros(len(found), np.int64), np.full(len(found), 0.3, np.float32), corners)
        shown = Shown(picture, Detector(TASK).inputs(picture), Prediction("front", frame, answers, 1, 0.0, 0.0))
        self.now += 1
        self.studio.watch(shown)
        self.samples.watch(shown)
        assert self.samples.settle()

    def learned(self) -> list[list[float]]:
        """Labels that wait: class, left, top, right, bottom in pixels."""
        found = []
        for one in self.samples._collector._waiting:
            for row in one.labels[0]:
                if row[0] >= 0:
                    middle, size = row[1:3] * (WIDTH, HEIGHT), row[3:] * (WIDTH, HEIGHT)
                    found.append([float(row[0]), *(middle - size / 2).tolist(), *(middle + size / 2).tolist()])
        return sorted(found)
