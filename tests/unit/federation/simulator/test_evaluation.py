"""What a model is right about, with and without knowing an image's task."""

from __future__ import annotations

import numpy as np
import torch

from replayfleet.federation.simulator.measures.evaluation import evaluate
from replayfleet.federation.streams.labelled_images import LabelledImages

NAMES = ("a", "b", "c", "d")


def judge(images: torch.Tensor) -> torch.Tensor:
    """Whatever it sees: class 3 before 1 before 0 before 2."""
    return torch.tensor([-3.0, -2.0, -4.0, -1.0]).expand(len(images), 4)


def test_who_knows_the_task_names_only_its_classes() -> None:
    part = LabelledImages(np.zeros((4, 28, 28, 1), dtype=np.uint8), np.array([0, 1, 2, 3]), NAMES)
    first, second = [True, True, False, False], [False, False, True, True]
    tested = evaluate(judge, part, np.arange(4), of_task=np.array([first, first, second, second]))
    assert tested.hits.tolist() == [False, False, False, True]
    assert tested.in_task.group_accuracy(np.array([0, 0, 1, 1]), ["one", "two"]) == {"one": 0.5, "two": 0.5}
    assert evaluate(judge, part, np.arange(4)).in_task is None


def test_a_model_that_rules_classes_out_is_judged_by_the_others() -> None:
    part = LabelledImages(np.zeros((2, 28, 28, 1), dtype=np.uint8), np.array([0, 1]), NAMES)
    answers = torch.tensor([[1.0, 0.0, -torch.inf, -torch.inf]])
    assert evaluate(lambda images: answers.expand(len(images), 4), part, np.arange(2)).accuracy == 0.5


def test_a_model_that_is_not_finite_is_right_about_nothing() -> None:
    part = LabelledImages(np.zeros((4, 28, 28, 1), dtype=np.uint8), np.array([0, 0, 0, 0]), NAMES)
    for value in (torch.nan, torch.inf):
        answers = torch.full((1, 4), value)
        of_first = np.array([[True, False, False, False]] * 4)
        tested = evaluate(lambda images, a=answers: a.expand(len(images), 4), part, np.arange(4), of_task=of_first)
        assert tested.accuracy == tested.in_task.accuracy == 0.0
