"""Anchors by overlap, and labels of boxes in pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.streams.anchors import fit_anchors, mean_overlap, shape_overlaps
from replayfleet.federation.streams.box_labels import box_labels
from tests.support.recordings import carla_frames

SHAPES = np.array([[0.02, 0.05], [0.1, 0.1], [0.5, 0.3]])


def boxes_around(shapes: np.ndarray, per_shape: int = 50, seed: int = 0) -> np.ndarray:
    spread = np.random.default_rng(seed).uniform(0.9, 1.1, (per_shape, len(shapes), 2))
    return (shapes * spread).reshape(-1, 2)


def test_overlap_of_shapes_with_one_centre():
    found = shape_overlaps(np.array([[0.2, 0.1]]), np.array([[0.2, 0.1], [0.1, 0.2], [0.4, 0.2]]))
    assert found[0].tolist() == pytest.approx([1.0, 0.01 / 0.03, 0.02 / 0.08])


def test_clusters_are_found_whatever_their_number_and_order_of_boxes():
    boxes = np.concatenate([boxes_around(SHAPES), boxes_around(SHAPES[:1], 500)])
    anchors = fit_anchors(boxes, 3)
    np.testing.assert_allclose(anchors, SHAPES, rtol=0.05)
    assert fit_anchors(boxes[np.random.default_rng(1).permutation(len(boxes))], 3) == anchors


def test_small_boxes_count_as_much_as_large_ones():
    """By Euclidean distance the two smallest shapes would fall together; by overlap they are far apart."""
    small = np.array([[0.01, 0.02], [0.03, 0.02], [0.9, 0.8]])
    boxes = np.concatenate([boxes_around(small), boxes_around(np.array([[0.6, 0.6]]), 200)])
    anchors = np.array(fit_anchors(boxes, 4))
    np.testing.assert_allclose(anchors[:2], small[:2], rtol=0.05)


def test_more_anchors_fit_better_and_one_per_size_fits_exactly():
    boxes = boxes_around(SHAPES, 4)
    overlaps = [mean_overlap(boxes, fit_anchors(boxes, count)) for count in (1, 2, 3, 6)]
    assert overlaps == sorted(overlaps)
    assert mean_overlap(boxes, fit_anchors(boxes, len(boxes))) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("sizes", "num_anchors", "complaint"),
    [
        (np.zeros((3, 2)), 1, "above 0"),
        (np.ones((3, 3)), 1, r"sizes are \(3, 3\)"),
        (np.array([[0.1, np.nan]]), 1, "finite"),
        (np.ones((9, 2)), 2, "2 anchors were asked for, expected 1 to 1"),
        (np.ones((9, 2)), 0, "0 anchors"),
    ],
)
def test_what_no_anchors_can_be_made_of_is_refused(sizes: np.ndarray, num_anchors: int, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        fit_anchors(sizes, num_anchors)


def test_anchors_of_the_driving_frames_fit_lights_and_vehicles():
    labels = carla_frames() / "labels"
    lines = [
        line.split() for path in sorted(labels.iterdir()) for line in path.read_text().splitlines() if line.strip()
    ]
    sizes = np.array([[float(width), float(height)] for *_, width, height in lines])
    anchors = fit_anchors(sizes, 5)
    assert mean_overlap(sizes, anchors) > 0.55
    assert anchors[0][1] < 0.05 < anchors[-1][1]


def test_boxes_in_pixels_become_labels_in_shares_of_the_picture():
    corners = np.array([[0, 0, 32, 19], [320, 95, 640, 285]], np.float32)
    label = box_labels(corners, np.array([3, 0]), (640, 380), 3)
    assert label.dtype == np.float32
    assert label[0].tolist() == pytest.approx([0.0, 0.75, 0.5, 0.5, 0.5])
    assert label[1].tolist() == pytest.approx([3.0, 0.025, 0.025, 0.05, 0.05])
    assert label[2].tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0]


def test_boxes_are_cut_off_at_the_edge_and_left_out_beyond_it():
    corners = np.array([[-100, -50, 100, 50], [700, 10, 800, 20], [-9, 10, 0, 20]], np.float32)
    label = box_labels(corners, np.array([1, 2, 2]), (200, 100), 4)
    assert label[0].tolist() == pytest.approx([1.0, 0.25, 0.25, 0.5, 0.5])
    assert (label[1:, 0] == -1).all()
    RoundData(torch.zeros(1, 3, 32, 32), torch.from_numpy(label[None]))


def test_of_too_many_boxes_the_largest_stay_and_none_make_a_label_too():
    corners = np.array([[0, 0, side, side] for side in (10, 40, 20, 30)], np.float32)
    assert box_labels(corners, np.arange(4), (100, 100), 2)[:, 0].tolist() == [1.0, 3.0]
    assert (box_labels(np.empty((0, 4), np.float32), np.empty(0, np.int64), (9, 9), 2)[:, 0] == -1).all()


@pytest.mark.parametrize(
    ("corners", "class_ids", "complaint"),
    [
        (np.zeros((2, 4), np.float32), np.zeros(1, np.int64), r"corners are \(2, 4\) and class ids \(1,\)"),
        (np.full((1, 4), np.nan, np.float32), np.zeros(1, np.int64), "finite"),
        (np.ones((1, 4), np.float32), np.array([-1]), "class ids 0 or more"),
    ],
)
def test_boxes_that_make_no_sense_are_refused(corners: np.ndarray, class_ids: np.ndarray, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        box_labels(corners, class_ids, (10, 10), 2)
