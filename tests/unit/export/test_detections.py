"""What a device makes of a detector's outputs; that torch makes the same of them stands in its own tests."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from replayfleet.export.running.detections import Detections, detections, non_max_suppression
from replayfleet.models.specs import DetectionRules, DetectionSpec

SPEC = DetectionSpec(3, 32, 64, ("car",), ((0.25, 0.5),), width=1, stride=32)
ROW = np.array([[0.0, 0.0, 0.4, 0.4], [0.1, 0.0, 0.5, 0.4], [0.2, 0.0, 0.6, 0.4], [0.6, 0.6, 0.9, 0.9]], np.float32)
"""The first overlaps the second by 0.6 and the third by 1/3, the second the third by 0.6; the fourth none."""


def kept(scores: list[float], class_ids: list[int], **rules: float) -> list[int]:
    made = DetectionRules(**{"iou_threshold": 0.5, **rules})
    return non_max_suppression(ROW, np.array(scores, np.float32), np.array(class_ids), made)[0].tolist()


def test_a_box_that_went_suppresses_nothing():
    assert kept([0.9, 0.8, 0.7, 0.6], [0, 0, 0, 0]) == [0, 2, 3]


def test_the_best_goes_first_and_of_equals_the_earlier():
    assert kept([0.5, 0.9, 0.5, 0.5], [0, 0, 0, 0]) == [1, 3]
    assert kept([0.5, 0.5, 0.5, 0.5], [0, 0, 0, 0]) == [0, 2, 3]


def test_among_many_equals_the_order_stays():
    places = np.arange(64, dtype=np.float32)[:, None]
    apart = np.concatenate([places, places, places + 0.5, places + 0.5], axis=1)
    found = non_max_suppression(apart, np.full(64, 0.5, np.float32), np.zeros(64, np.int64), DetectionRules())[0]
    assert found.tolist() == list(range(64))


def test_classes_suppress_only_their_own():
    assert kept([0.9, 0.8, 0.7, 0.6], [0, 1, 0, 0]) == [0, 1, 2, 3]


def test_no_more_than_asked_for_and_none_from_none():
    assert kept([0.9, 0.8, 0.7, 0.6], [0, 0, 0, 0], max_detections=2) == [0, 2]
    nothing = non_max_suppression(ROW[:0], np.empty(0, np.float32), np.empty(0, np.int64), DetectionRules())[0]
    assert nothing.shape == (0,)


def test_what_a_limit_left_unread_is_counted_and_nothing_else_is():
    outputs = np.zeros((1, 6, 1, 2), np.float32)
    outputs[:, 4] = 9.0  # both cells are sure of a box, of which none overlaps the other by half
    assert [found.num_left_out for found in detections(SPEC, outputs, DetectionRules(max_detections=1))] == [1]
    assert [found.num_left_out for found in detections(SPEC, outputs, DetectionRules(max_detections=2))] == [0]


def test_a_picture_in_which_nothing_is_seen_has_no_boxes():
    outputs = np.zeros((2, 6, 1, 2), np.float32)
    outputs[:, 4] = -9.0
    found = detections(SPEC, outputs, DetectionRules())
    assert [len(one) for one in found] == [0, 0]
    assert found[0].corners.shape == (0, 4)


def test_of_no_pictures_there_are_no_answers():
    assert detections(SPEC, np.zeros((0, *SPEC.output_shape), np.float32), DetectionRules()) == []


def test_corners_in_pixels_are_those_of_the_picture_that_was_shrunk():
    found = Detections(np.array([[0.0, 0.25, 0.5, 1.0]], np.float32), np.ones(1, np.float32), np.zeros(1, np.int64))
    assert found.in_pixels(640, 380).tolist() == [[0.0, 95.0, 320.0, 380.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_diverged_model_is_an_error_and_not_an_empty_street(bad: float):
    with pytest.raises(ValueError, match="not finite"):
        detections(SPEC, np.full((1, 6, 1, 2), bad, np.float32), DetectionRules())


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="expected"):
        detections(SPEC, np.zeros((1, 6, 2, 2), np.float32), DetectionRules())


@pytest.mark.parametrize("name", ["score_threshold", "iou_threshold"])
def test_rules_that_make_no_sense_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} is 1.5, expected 0 to 1"):
        DetectionRules(**{name: 1.5})
    with pytest.raises(ValueError, match="max_detections is 0"):
        DetectionRules(max_detections=0)


def test_serving_needs_no_torch():
    code = (
        "import sys, replayfleet.export.running.detections\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'onnx')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
