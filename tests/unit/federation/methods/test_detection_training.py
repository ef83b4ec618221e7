"""A detector is trained like any task model: round data of boxes, the objective, and what comes of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from replayfleet.federation.methods.kit.records import Parameters, RoundData
from replayfleet.federation.methods.steps import task_model
from replayfleet.federation.methods.steps.detection_loss import detection_loss
from replayfleet.federation.methods.steps.task_model import (
    Alignment,
    Optimisation,
    judge_with,
    loss_of,
    train_task_model,
)
from replayfleet.federation.simulator.measures.detection_metrics import evaluate_detector
from replayfleet.models.build import build_task_model, initialise
from tests.support.rng import rng
from tests.support.shapes import SHAPES, shape_pictures
from tests.support.toy import TOY, toy_data

QUICK = Optimisation(num_epochs=1, batch_size=2, learning_rate=0.01, momentum=0.9, weight_decay=0.01)


def start() -> Parameters:
    return initialise(build_task_model(SHAPES), rng()).state_dict()


@pytest.mark.learning
def test_it_learns_four_pictures_by_heart():
    data = shape_pictures(4)
    schedule = Optimisation(num_epochs=60, batch_size=4, learning_rate=0.01, momentum=0.9, weight_decay=0.0)
    before, parameters = start(), train_task_model(SHAPES, start(), data.images, data.labels, schedule, rng(1))
    untrained = evaluate_detector(SHAPES, judge_with(SHAPES, before), data.images, data.labels)
    trained = evaluate_detector(SHAPES, judge_with(SHAPES, parameters), data.images, data.labels)
    assert untrained.map50 < 0.2
    assert trained.map50 > 0.9
    assert trained.class_ap50.keys() == {0, 1}


def test_one_seed_gives_the_same_bits_and_leaves_the_start_untouched():
    data, before = shape_pictures(5), start()
    copy = {name: tensor.clone() for name, tensor in before.items()}
    first = train_task_model(SHAPES, before, data.images, data.labels, QUICK, rng(3))
    second = train_task_model(SHAPES, before, data.images, data.labels, QUICK, rng(3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], copy[name]) for name in copy)
    assert any(not torch.equal(first[name], copy[name]) for name in copy)


def test_the_objective_is_the_one_that_the_tasks_kind_asks_for():
    shapes, toys = shape_pictures(2), toy_data({0: 2, 1: 1})
    detector, classifier = initialise(build_task_model(SHAPES), rng()), initialise(build_task_model(TOY), rng())
    detector.eval()
    classifier.eval()
    assert torch.equal(
        loss_of(SHAPES, detector, shapes.images, shapes.labels),
        detection_loss(SHAPES, detector(shapes.images), shapes.labels),
    )
    assert torch.equal(
        loss_of(TOY, classifier, toys.images, toys.labels), F.cross_entropy(classifier(toys.images), toys.labels)
    )


def test_judging_in_parts_of_bounded_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    parameters, images = start(), shape_pictures(5).images
    at_once = judge_with(SHAPES, parameters)(images)
    monkeypatch.setattr(task_model, "DETECTION_BATCH_PIXELS", 2 * 64 * 64)
    in_parts = judge_with(SHAPES, parameters)(images)
    assert torch.allclose(at_once, in_parts, atol=1e-6)
    assert judge_with(SHAPES, parameters)(images[:0]).shape == (0, *SHAPES.output_shape)


def test_logits_of_detectors_cant_be_aligned():
    data = shape_pictures(2)
    alignment = Alignment(torch.ones(2, dtype=torch.bool), torch.zeros(2, 2), 0.3)
    with pytest.raises(ValueError, match="aligns class logits"):
        train_task_model(SHAPES, start(), data.images, data.labels, QUICK, rng(), alignment=alignment)


IMAGES = torch.zeros(1, 3, 64, 64)


@pytest.mark.parametrize(
    ("box", "complaint"),
    [
        ([-2.0, 0.5, 0.5, 0.1, 0.1], "whole numbers of at least -1"),
        ([0.5, 0.5, 0.5, 0.1, 0.1], "whole numbers of at least -1"),
        ([float("nan"), 0.5, 0.5, 0.1, 0.1], "whole numbers of at least -1"),
        ([0.0, 1.1, 0.5, 0.1, 0.1], "centres from 0 to 1"),
        ([0.0, 0.5, float("nan"), 0.1, 0.1], "centres from 0 to 1"),
        ([0.0, 0.5, 0.5, 0.0, 0.1], "sizes above 0"),
        ([0.0, 0.5, 0.5, 0.1, float("inf")], "sizes above 0"),
    ],
)
def test_boxes_that_cant_be_are_no_round_data(box: list[float], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        RoundData(IMAGES, torch.tensor([[[1.0, 0.5, 0.5, 0.1, 0.1], box]]))


@pytest.mark.parametrize("labels", [torch.zeros(1, 2, 4), torch.zeros(1, 2, 5, dtype=torch.float64)])
def test_boxes_have_five_single_precision_numbers(labels: torch.Tensor):
    with pytest.raises(ValueError, match=r"boxes must be \(B, M, 5\) float32"):
        RoundData(IMAGES, labels)


def test_round_data_of_boxes_may_hold_pictures_of_nothing_and_has_no_counts_by_class():
    assert len(RoundData(IMAGES, torch.empty(1, 0, 5)).labels) == 1
    padding = torch.full((1, 3, 5), float("nan"))
    padding[..., 0] = -1.0
    data = RoundData(IMAGES, padding)
    with pytest.raises(ValueError, match="have boxes, not one class each"):
        data.counts()
    with pytest.raises(ValueError, match="1 images but 2 labels"):
        RoundData(IMAGES, torch.full((2, 3, 5), -1.0))
