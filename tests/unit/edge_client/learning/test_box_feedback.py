from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from replayfleet.edge_client.flow import Picture, Shown
from replayfleet.edge_client.frames.views import Detector
from replayfleet.edge_client.learning.camera_samples import CameraSamples
from replayfleet.edge_client.learning.labels.box_feedback import BoxFeedbackDesk
from replayfleet.edge_client.learning.labels.operators_word import (
    AnyFeedback,
    BoxFeedback,
    Feedback,
    FeedbackRefused,
    NamedBox,
)
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.edge_client.sources import source_opener
from replayfleet.models.specs import DetectionSpec

TASK = DetectionSpec(3, 64, 96, ("car", "bike"), anchors=((0.25, 0.25),), stride=32, max_boxes=3)
VIEW = Detector(TASK)
CAR = NamedBox("car", (0.0, 0.0, 96.0, 64.0))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(frame_id: int = 7) -> Shown:
    pixels = np.random.default_rng(frame_id).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    picture = Picture("front", frame_id, pixels, 0.0, None, "Town01")
    return Shown(picture, VIEW.inputs(picture), None)


def said(*corners: float, name: str = "bike") -> BoxFeedback:
    left, top, right, bottom = corners
    return BoxFeedback("front", 7, (CAR, NamedBox(name, (left, top, right, bottom))))


def test_an_operators_boxes_are_what_the_kept_picture_teaches() -> None:
    clock = Clock()
    desk = BoxFeedbackDesk(TASK, 60.0, clock)
    desk.keep(shown())
    samples, place, _ = desk.samples(said(96.0, 32.0, 192.0, 128.0))
    assert place == "Town01"
    assert np.array_equal(samples.images, shown().inputs.images)  # to the bit, though bytes were kept
    rows = {tuple(row) for row in samples.labels[0].tolist()}
    assert rows == {(0.0, 0.25, 0.25, 0.5, 0.5), (1.0, 0.75, 0.625, 0.5, 0.75), (-1.0, 0.0, 0.0, 0.0, 0.0)}
    clock.now += 61
    with pytest.raises(FeedbackRefused, match="not kept"):
        desk.samples(said(96.0, 32.0, 192.0, 128.0))


def test_a_box_of_one_pixel_is_taken() -> None:
    desk = BoxFeedbackDesk(TASK, 60.0, Clock())
    desk.keep(shown())
    assert desk.samples(said(5.1, 2.0, 6.1, 3.0))[0].labels[0, :, 0].tolist() == [0.0, 1.0, -1.0]


def test_no_boxes_say_that_nothing_is_there() -> None:
    desk = BoxFeedbackDesk(TASK, 60.0, Clock())
    desk.keep(shown())
    samples, _, _ = desk.samples(BoxFeedback("", 7, ()))  # one camera needs no name
    assert samples.labels[0, :, 0].tolist() == [-1.0] * 3


@pytest.mark.parametrize(
    ("feedback", "message"),
    [
        (Feedback("front", 7, "car"), "learns where things are; send all boxes"),
        (BoxFeedback("front", 7, (CAR,) * 4), "4 boxes, expected at most 3"),
        (BoxFeedback("front", 6, (CAR,)), "frame 6 .*not kept"),
        (BoxFeedback("rear", 7, (CAR,)), "camera 'rear', of which no frame is kept; known: front"),
        (said(1, 2, 3, 4, name="bik"), "box 1 is of unknown class 'bik'; did you mean 'bike'"),
        (said(5, 2, 5, 4), "box 1 is .*1 or more from left to right"),
        (said(1, 2, 1.001, 4), "1 or more from left to right"),
        (said(1, 2, 3, 2.9), "1 or more from left to right and from top to bottom"),
        (said(1, 4, 3, 2), "from top to bottom"),
        (said(-1, 2, 3, 4), "within the picture's 192 x 128 pixels"),
        (said(1, 2, 192.5, 4), "within"),
        (said(1, 2, 3, 128.5), "within"),
        (said(1, 2, math.nan, 4), "within"),
        (said(1, 2, math.inf, 4), "within"),
        (said(1, -math.inf, 3, 4), "within"),
    ],
)
def test_boxes_that_cannot_be_used_are_refused_with_the_reason(feedback: AnyFeedback, message: str) -> None:
    desk = BoxFeedbackDesk(TASK, 60.0, Clock())
    desk.keep(shown())
    with pytest.raises(FeedbackRefused, match=message):
        desk.samples(feedback)


def test_a_fleet_that_learns_boxes_takes_them_from_an_operator(tmp_path: Path) -> None:
    learning = LearningSettings(min_samples=2)
    source = source_opener(["synthetic://street?rate=10"], tmp_path, learning=learning)(TASK).samples
    assert isinstance(source, CameraSamples)
    with pytest.raises(FeedbackRefused, match="not kept"):
        source.feedback(BoxFeedback("", 7, (CAR,)))
    for frame_id in (7, 8):
        source.watch(shown(frame_id))
    assert source.settle()
    assert source.round_samples(0) is None
    for frame_id in (7, 8):
        source.feedback(BoxFeedback("front", frame_id, (CAR,)))
    taken = source.round_samples(0)
    assert taken.labels[:, 0, 0].tolist() == [0.0, 0.0]
