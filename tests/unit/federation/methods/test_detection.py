"""Decoding and suppression, on grids small enough for arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from replayfleet.export.running import detections as devices
from replayfleet.federation.methods.steps.detection import candidates, corners_of, found_boxes, overlaps
from replayfleet.models.specs import DetectionRules, DetectionSpec
from tests.support.rng import rng

SPEC = DetectionSpec(3, 32, 64, ("car", "light"), ((0.25, 0.5), (0.5, 0.25)), width=1, stride=32)
"""A grid of one row and two columns."""


def raw(**entries: list[float]) -> torch.Tensor:
    """Outputs (1, 14, 1, 2) that see nothing but what ``a<anchor>c<column>`` = seven numbers says."""
    outputs = torch.zeros(1, 2, 7, 1, 2)
    outputs[:, :, 4] = -20.0
    for place, numbers in entries.items():
        outputs[0, int(place[1]), :, 0, int(place[3])] = torch.tensor(numbers)
    return outputs.view(1, 14, 1, 2)


def test_a_cell_decodes_to_its_centre_the_anchors_size_and_the_product_of_probabilities():
    outputs = raw(a0c1=[0.0, 0.0, 0.0, math.log(0.5), math.log(3.0), math.log(4.0), 0.0])
    corners, scores, class_ids = candidates(SPEC, outputs)
    index = 1  # anchor 0, row 0, column 1 of two columns
    assert corners.shape == (1, 4, 4)
    assert corners[0, index].tolist() == pytest.approx([0.75 - 0.125, 0.5 - 0.125, 0.75 + 0.125, 0.5 + 0.125])
    assert scores[0, index].item() == pytest.approx(0.75 * 0.8)
    assert class_ids[0, index] == 0


def test_offsets_stay_in_their_cell_and_boxes_in_their_picture():
    corners, _, _ = candidates(SPEC, raw(a1c0=[-50.0, 50.0, 9.0, 9.0, 0.0, 0.0, 0.0]))
    assert corners.min() >= 0
    assert corners.max() <= 1
    assert corners[0, 2].tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0])


def test_overlap_of_known_boxes():
    box = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    others = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.25, 0.0, 0.75, 0.5], [0.5, 0.5, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    assert overlaps(box, others).tolist() == pytest.approx([1.0, 1 / 3, 0.0, 0.0])
    assert overlaps(others[3], others[3]).item() == 0.0
    assert corners_of(torch.tensor([0.5, 0.25, 0.2, 0.1])).tolist() == pytest.approx([0.4, 0.2, 0.6, 0.3])


def test_the_better_of_two_overlapping_boxes_of_a_class_stays_and_other_classes_are_left_alone():
    same_place = [0.0, 0.0, math.log(2.0), 0.0]
    outputs = raw(
        a0c0=[*same_place, 3.0, 9.0, 0.0],
        a1c0=[0.0, 0.0, 0.0, math.log(2.0), 2.0, 9.0, 0.0],  # the same box through the other anchor
        a0c1=[*same_place, 1.0, 9.0, 0.0],
        a1c1=[0.0, 0.0, 0.0, math.log(2.0), 2.5, 0.0, 9.0],  # another class
    )
    (found,) = found_boxes(SPEC, outputs, DetectionRules())
    assert found.class_ids.tolist() == [0, 1, 0]
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    (all_of_them,) = found_boxes(SPEC, outputs, DetectionRules(iou_threshold=1.0))
    assert len(all_of_them.scores) == 4
    (best,) = found_boxes(SPEC, outputs, DetectionRules(max_detections=1))
    assert best.scores.tolist() == found.scores[:1].tolist()
    (sure,) = found_boxes(SPEC, outputs, DetectionRules(score_threshold=0.9))
    assert len(sure.scores) == 2


@pytest.mark.parametrize("rules", [DetectionRules(0.3), DetectionRules(0.01, 0.3, 20), DetectionRules(0.99)])
def test_a_device_without_torch_finds_the_same_boxes(rules: DetectionRules):
    spec = DetectionSpec(3, 96, 160, ("a", "b", "c"), ((0.1, 0.2), (0.4, 0.3)), stride=16)
    outputs = torch.randn(4, *spec.output_shape, generator=rng()) * 2
    ours, theirs = found_boxes(spec, outputs, rules), devices.detections(spec, outputs.numpy(), rules)
    assert len(ours) == len(theirs) == 4
    assert rules.score_threshold > 0.9 or min(len(one) for one in theirs) > 5
    for torch_found, found in zip(ours, theirs, strict=True):
        assert torch_found.class_ids.tolist() == found.class_ids.tolist()
        np.testing.assert_allclose(torch_found.scores.numpy(), found.scores, atol=1e-6)
        np.testing.assert_allclose(torch_found.corners.numpy(), found.corners, atol=1e-6)
        assert found.corners.dtype == found.scores.dtype == np.float32


def test_small_boxes_of_the_last_of_many_classes_overlap_as_those_of_the_first():
    # Two of 0.0015 wide, one shifted: (0.0015 - shift) / (0.0015 + shift) is 0.4.
    spec = DetectionSpec(3, 32, 32, tuple(map(str, range(4096))), ((0.0015, 0.5),) * 2)
    shift = 0.0015 * 3 / 7
    for class_id in (0, 4095):
        outputs = torch.full((1, 2, 5 + 4096, 1, 1), -30.0)
        outputs[0, :, 0, 0, 0] = torch.tensor([0.25 + 0.00075, 0.25 + 0.00075 + shift]).logit()
        outputs[0, :, 1:4], outputs[0, :, 4, 0, 0] = 0.0, torch.tensor([5.0, 4.0])
        outputs[0, :, 5 + class_id] = 30.0
        outputs = outputs.view(1, -1, 1, 1)
        for threshold, num_stay in ((0.38, 1), (0.42, 2)):
            rules = DetectionRules(iou_threshold=threshold)
            assert len(found_boxes(spec, outputs, rules)[0].scores) == num_stay
            assert len(devices.detections(spec, outputs.numpy(), rules)[0]) == num_stay


def test_outputs_of_another_detector_are_refused():
    with pytest.raises(ValueError, match=r"outputs are \(1, 14, 2, 2\), expected \(B, \*\(14, 1, 2\)\)"):
        candidates(SPEC, torch.zeros(1, 14, 2, 2))
