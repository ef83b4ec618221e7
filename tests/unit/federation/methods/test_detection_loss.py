"""The three parts of a detector's loss against closed forms on a grid of one row and two columns."""

from __future__ import annotations

import math

import pytest
import torch

from replayfleet.federation.methods.steps.detection import Fields
from replayfleet.federation.methods.steps.detection_loss import (
    CLASSIFICATION_WEIGHT,
    LOCALISATION_WEIGHT,
    NO_OBJECT_WEIGHT,
    OBJECT_WEIGHT,
    Assignment,
    LossParts,
    assign,
    detection_loss,
    loss_parts,
    wanted_confidences,
)
from replayfleet.models.specs import DetectionSpec
from tests.support.rng import rng

SPEC = DetectionSpec(3, 32, 64, ("car", "light", "sign"), ((0.25, 0.5), (0.5, 0.25)), width=1, stride=32)
CAR = [0.0, 0.80, 0.6, 0.2, 0.5]  # in column 1; the first anchor is nearer
LIGHT = [1.0, 0.10, 0.3, 0.6, 0.2]  # in column 0; the second anchor is nearer
PADDING = [-1.0, 0.5, 0.5, 0.5, 0.5]


def labels(*pictures: list[list[float]]) -> torch.Tensor:
    most = max((len(boxes) for boxes in pictures), default=0)
    padded = [boxes + [PADDING] * (most - len(boxes)) for boxes in pictures]
    return torch.tensor(padded).view(len(pictures), most, 5)


def parts_of(outputs: torch.Tensor, true: torch.Tensor) -> LossParts:
    fields, assignment = Fields.of(SPEC, outputs), assign(SPEC, true)
    return loss_parts(SPEC, fields, assignment, wanted_confidences(SPEC, fields, true, assignment))


def places(assignment: Assignment) -> list[tuple[int, ...]]:
    return [tuple(int(index) for index in place) for place in zip(*assignment.places, strict=True)]


def test_a_box_belongs_to_its_centres_cell_and_the_anchor_of_the_nearest_shape():
    assignment = assign(SPEC, labels([CAR, LIGHT], [LIGHT]))
    assert places(assignment) == [(0, 0, 0, 1), (0, 1, 0, 0), (1, 1, 0, 0)]
    assert assignment.class_ids.tolist() == [0, 1, 1]
    assert torch.allclose(assignment.boxes[0], torch.tensor(CAR[1:]))


def test_padding_belongs_nowhere_and_a_centre_on_the_far_edge_to_the_last_cell():
    assignment = assign(SPEC, labels([[2.0, 1.0, 1.0, 0.25, 0.5], PADDING], []))
    assert places(assignment) == [(0, 0, 0, 1)]
    assert places(assign(SPEC, torch.empty(3, 0, 5))) == []


def test_of_two_boxes_with_one_place_the_later_counts():
    assignment = assign(SPEC, labels([[2.0, *CAR[1:]], LIGHT, CAR]))
    assert sorted(places(assignment)) == [(0, 0, 0, 1), (0, 1, 0, 0)]
    assert assignment.class_ids.tolist() == [1, 0]


def test_localisation_is_the_squared_error_of_offsets_and_log_sizes():
    outputs = torch.zeros(1, 16, 1, 2)
    # sigmoid(0) = 0.5; the centre is at 0.8 x 2 - 1 = 0.6 and 0.6 of its cell; log(0.2 / 0.25) and log(0.5 / 0.5).
    expected = (2 - 0.2 * 0.5) * ((0.5 - 0.6) ** 2 + (0.5 - 0.6) ** 2 + math.log(0.8) ** 2)
    found = parts_of(outputs, labels([CAR])).localisation
    assert found.item() == pytest.approx(LOCALISATION_WEIGHT * expected, rel=1e-5)


def test_a_size_that_is_off_by_more_than_a_factor_of_e_counts_linearly():
    outputs = torch.zeros(1, 2, 8, 1, 2)
    logit = math.log(0.6 / 0.4)
    outputs[0, 0, :4, 0, 1] = torch.tensor([logit, logit, math.log(0.8) + 3.0, -0.5])
    expected = (2 - 0.2 * 0.5) * ((2 * 3.0 - 1) + 0.5**2)
    found = parts_of(outputs.view(1, 16, 1, 2), labels([CAR])).localisation
    assert found.item() == pytest.approx(LOCALISATION_WEIGHT * expected, rel=1e-5)


def test_localisation_is_nothing_where_a_box_is_exactly_met():
    outputs = torch.zeros(1, 2, 8, 1, 2)
    logit = math.log(0.6 / 0.4)
    outputs[0, 0, :4, 0, 1] = torch.tensor([logit, logit, math.log(0.8), 0.0])
    assert parts_of(outputs.view(1, 16, 1, 2), labels([CAR])).localisation.item() == pytest.approx(0.0, abs=1e-10)


def test_classification_is_the_cross_entropy_of_the_anchor_that_answers():
    outputs = torch.zeros(1, 2, 8, 1, 2)
    outputs[0, 1, 5:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    expected = math.log(math.e + math.e**2 + math.e**3) - 2
    found = parts_of(outputs.view(1, 16, 1, 2), labels([LIGHT])).classification
    assert found.item() == pytest.approx(CLASSIFICATION_WEIGHT * expected, rel=1e-5)


def test_confidence_wants_the_overlap_where_a_box_is_and_nothing_elsewhere():
    outputs = torch.zeros(1, 2, 8, 1, 2)
    outputs[:, :, 4] = -1.0
    # The anchor that answers predicts 0.25 x 0.5 around (0.75, 0.5); the true box is 0.2 x 0.5 around (0.8, 0.6).
    shared = (0.875 - 0.7) * (0.75 - 0.35)
    overlap = shared / (0.25 * 0.5 + 0.2 * 0.5 - shared)
    own = overlap * math.log(1 + math.e) + (1 - overlap) * math.log(1 + 1 / math.e)
    others = 3 * math.log(1 + 1 / math.e)
    found = parts_of(outputs.view(1, 16, 1, 2), labels([CAR])).confidence
    assert found.item() == pytest.approx(OBJECT_WEIGHT * own + NO_OBJECT_WEIGHT * others, rel=1e-5)


def test_an_anchor_that_answers_for_nothing_but_sees_the_box_well_is_left_in_peace():
    outputs = torch.zeros(1, 2, 8, 1, 2)
    outputs[0, 1, :4, 0, 1] = torch.tensor(
        [0.4, 0.4, math.log(0.4), math.log(2.0)]
    )  # the car, through the other anchor
    fields, true = Fields.of(SPEC, outputs.view(1, 16, 1, 2)), labels([CAR, PADDING])
    weights = wanted_confidences(SPEC, fields, true, assign(SPEC, true)).weights
    expected = [NO_OBJECT_WEIGHT, OBJECT_WEIGHT, NO_OBJECT_WEIGHT, 0.0]
    assert weights[0, :, 0].flatten().tolist() == pytest.approx(expected)


def test_what_stands_in_padding_changes_nothing():
    outputs = torch.zeros(2, 16, 1, 2)
    bare, padded = labels([CAR], [LIGHT]), labels([CAR, PADDING, PADDING], [LIGHT])
    wild = padded.clone()
    wild[:, 1:, 1:] = torch.tensor([0.25, 0.5, 0.25, 0.5])  # what the first anchor predicts in column 0
    values = {detection_loss(SPEC, outputs, one).item() for one in (bare, padded, wild)}
    assert len(values) == 1


def test_an_empty_street_teaches_confidence_alone():
    parts = parts_of(torch.zeros(2, 16, 1, 2), torch.empty(2, 0, 5))
    assert parts.localisation.item() == parts.classification.item() == 0.0
    assert parts.confidence.item() == pytest.approx(NO_OBJECT_WEIGHT * 4 * math.log(2), rel=1e-5)


def test_the_loss_of_a_batch_is_the_mean_over_its_pictures():
    outputs, true = torch.randn(3, 16, 1, 2, generator=rng()), labels([CAR], [CAR, LIGHT], [])
    alone = [detection_loss(SPEC, outputs[i : i + 1], true[i : i + 1]) for i in range(3)]
    assert torch.allclose(detection_loss(SPEC, outputs, true), torch.stack(alone).mean())


def test_the_gradient_is_that_of_finite_differences():
    outputs = torch.randn(2, 16, 1, 2, generator=rng(), dtype=torch.float64, requires_grad=True)
    true = labels([CAR, LIGHT], [LIGHT]).double()
    assignment = assign(SPEC, true)
    wanted = wanted_confidences(SPEC, Fields.of(SPEC, outputs.detach()), true, assignment)

    def total(raw: torch.Tensor) -> torch.Tensor:
        return loss_parts(SPEC, Fields.of(SPEC, raw), assignment, wanted).total

    assert torch.autograd.gradcheck(total, outputs)
    (gradient,) = torch.autograd.grad(detection_loss(SPEC, outputs, true), outputs)
    (frozen,) = torch.autograd.grad(total(outputs), outputs)
    assert torch.equal(gradient, frozen)  # wanted overlaps are constants to the descent
    assert not gradient.view(2, 2, 8, 1, 2)[1, 0, :4].any()  # nobody's place: only its confidence is told anything


def test_half_precision_outputs_are_summed_in_single_precision():
    outputs, true = torch.randn(2, 16, 1, 2, generator=rng()), labels([CAR], [LIGHT])
    found = detection_loss(SPEC, outputs.bfloat16(), true)
    assert found.dtype == torch.float32
    assert torch.equal(found, detection_loss(SPEC, outputs.bfloat16().float(), true))


@pytest.mark.parametrize(
    ("true", "complaint"),
    [
        (torch.zeros(1, 2, 5), r"labels are \(1, 2, 5\), expected \(2, M, 5\)"),
        (torch.zeros(2, 2, 4), r"labels are \(2, 2, 4\)"),
        (torch.zeros(2), r"labels are \(2,\)"),
        (labels([[3.0, 0.5, 0.5, 0.1, 0.1]], []), "a box has class 3, the task has classes 0 to 2"),
    ],
)
def test_labels_of_another_task_are_refused(true: torch.Tensor, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        detection_loss(SPEC, torch.zeros(2, 16, 1, 2), true)


def test_inputs_are_left_as_they_were():
    outputs, true = torch.randn(2, 16, 1, 2, generator=rng()), labels([CAR, LIGHT], [LIGHT])
    before = outputs.clone(), true.clone()
    detection_loss(SPEC, outputs, true)
    assert torch.equal(outputs, before[0])
    assert torch.equal(true, before[1])
