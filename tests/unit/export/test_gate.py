"""The gate counts what rounding costs, in points, and lets nothing through that costs more or can't be counted."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from replayfleet.export.gate import GateError, Verdict, check_gate, compare_answers, compare_on_labels
from replayfleet.export.running.artefact import Array, Run
from replayfleet.federation.errors import ArtefactRejected, SettingsError
from replayfleet.models.specs import DetectionSpec, TaskSpec

TASK = TaskSpec(1, 28, ("a", "b", "c"))
DETECTOR = DetectionSpec(1, 64, 64, ("car", "bus"), ((0.5, 0.5),), stride=32)


def says(classes: list[int]) -> Run:
    """Return a model that answers image i, whose every pixel is i, with ``classes[i]``."""

    def run(images: Array) -> Array:
        return np.eye(3, dtype=np.float32)[[classes[int(image.flat[0])] for image in images]]

    return run


def numbered(count: int) -> Array:
    return np.tile(np.arange(count, dtype=np.float32)[:, None, None, None], (1, 1, 28, 28))


def test_with_labels_the_loss_is_what_accuracy_falls_by():
    labels = np.array([0, 1, 2, 0])
    verdict = compare_on_labels(TASK, numbered(4), labels, says([0, 1, 2, 1]), says([0, 1, 0, 1]), 1.0)
    assert (verdict.reference, verdict.candidate) == (0.75, 0.5)
    assert verdict.loss_points == 25
    better = compare_on_labels(TASK, numbered(4), labels, says([1, 1, 2, 1]), says([0, 1, 2, 0]), 1.0)
    assert better.loss_points == -50
    assert check_gate("onnx-int8", better) is better


def test_without_labels_every_disagreement_counts_right_or_wrong():
    verdict = compare_answers(TASK, numbered(4), says([0, 1, 2, 1]), says([0, 1, 1, 0]), 1.0, drawn=False)
    assert (verdict.reference, verdict.loss_points) == (1.0, 50)
    assert verdict.measure == "agreement on 4 samples", "images of a file are no replay"


def test_drawn_images_lose_the_mean_difference_of_their_pixels():
    exact: Run = lambda x: np.zeros((len(x), 1, 4, 4), np.float32)  # noqa: E731
    verdict = compare_answers(TASK, np.zeros((6, 100), np.float32), exact, lambda x: exact(x) + 0.02, 1.0, drawn=True)
    assert verdict.loss_points == pytest.approx(1.0)


@pytest.mark.parametrize("loss", [0.0101, float("nan")])
def test_a_loss_beyond_the_limit_is_refused_with_the_numbers(loss: float):
    with pytest.raises(GateError, match=r"loses .* points of accuracy .*, at most 1 are accepted; nothing was written"):
        check_gate("onnx-int8", Verdict("accuracy", 0.9, 0.9 - loss, 1.0))
    check_gate("onnx-int8", Verdict("accuracy", 0.9, 0.89, 1.0))


def test_answers_that_are_no_numbers_are_refused():
    broken: Run = lambda x: np.full((len(x), 3), np.nan, np.float32)  # noqa: E731
    with pytest.raises(ArtefactRejected, match="not-finite"):
        compare_answers(TASK, numbered(2), says([0, 1]), broken, 1.0, drawn=False)


def sees(*boxes: tuple[int, int, int]) -> Run:
    """Return a detector of ``DETECTOR`` that sees (row, column, class) boxes of half a picture in every picture."""

    def run(images: Array) -> Array:
        raw = np.full((len(images), *DETECTOR.output_shape), -10, np.float32)
        raw[:, 2:4] = 0
        for row, column, class_id in boxes:
            raw[:, [0, 1], row, column] = 0
            raw[:, 4, row, column] = 10
            raw[:, 5 + class_id, row, column] = 10
        return raw

    return run


def test_a_detector_is_judged_by_boxes_of_the_right_class_in_the_right_place():
    pictures = np.zeros((3, *DETECTOR.image_shape), np.float32)
    label = np.array([[0, 0.25, 0.25, 0.5, 0.5], [-1, 0, 0, 0, 0]], np.float32)
    labels = np.tile(label, (3, 1, 1))
    right, elsewhere, other = sees((0, 0, 0)), sees((1, 1, 0)), sees((0, 0, 1))
    both = sees((0, 0, 0), (1, 1, 0))
    for run, share in [(right, 1.0), (elsewhere, 0.0), (other, 0.0), (both, 2 / 3)]:
        verdict = compare_on_labels(DETECTOR, pictures, labels, right, run, 1.0)
        assert verdict.reference == 1.0
        assert verdict.candidate == pytest.approx(share)
        assert compare_answers(DETECTOR, pictures, right, run, 1.0, drawn=False).candidate == pytest.approx(share)


def test_of_what_a_detector_answers_one_batch_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("replayfleet.export.gate._PIXELS_PER_BATCH", 2 * 64 * 64)
    seen, answers, held = sees((0, 0, 0)), list[weakref.ref[Array]](), list[int]()

    def run(images: Array) -> Array:
        held.append(sum(answer() is not None for answer in answers))
        answers.append(weakref.ref(answer := seen(images)))
        return answer

    verdict = compare_answers(DETECTOR, np.zeros((8, 1, 64, 64), np.float32), run, run, 1.0, drawn=False)
    assert verdict.loss_points == 0
    assert len(held) == 8
    assert max(held) == 1


def test_nothing_to_be_seen_is_no_measure():
    pictures = np.zeros((1, *DETECTOR.image_shape), np.float32)
    with pytest.raises(SettingsError, match="finds no box"):
        compare_answers(DETECTOR, pictures, sees(), sees(), 1.0, drawn=False)
    with pytest.raises(SettingsError, match="no box in the labels"):
        compare_on_labels(DETECTOR, pictures, np.full((1, 2, 5), -1, np.float32), sees(), sees(), 1.0)


def test_who_is_right_about_nothing_has_nothing_to_lose():
    pictures = np.zeros((1, *DETECTOR.image_shape), np.float32)
    label = np.array([[[0, 0.25, 0.25, 0.5, 0.5]]], np.float32)
    with pytest.raises(SettingsError, match="F1 of boxes on 1 held pictures of 0"):
        compare_on_labels(DETECTOR, pictures, label, sees(), sees(), 1.0)
    with pytest.raises(SettingsError, match="accuracy on 2 held samples of 0, so nothing can be lost"):
        compare_on_labels(TASK, numbered(2), np.array([1, 2]), says([0, 0]), says([0, 0]), 1.0)
