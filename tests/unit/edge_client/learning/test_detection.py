from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from replayfleet.edge_client.flow import Answers, Boxes, Picture, Prediction, Samples, Shown
from replayfleet.edge_client.frames.views import Detector
from replayfleet.edge_client.learning.labels.annotated import AnnotatedLabels
from replayfleet.edge_client.learning.labels.lessons import BoxLessons, num_found
from replayfleet.edge_client.learning.labels.teacher import TeacherBoxes
from replayfleet.edge_client.learning.quality import boxes_found, quality
from replayfleet.edge_client.learning.training.job import RoundFile, read_round_data
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import DetectionSpec

TASK = DetectionSpec(3, 64, 96, ("car", "bike"), anchors=((0.25, 0.25),), stride=32, max_boxes=4)
NAMES = {"front": ("bike", "car", "tram")}


def boxes(*rows: tuple[float, float, float, float], class_ids: tuple[int, ...]) -> Boxes:
    return Boxes(np.array(rows, np.float32).reshape(-1, 4), np.array(class_ids, np.int64))


def picture(found: Boxes | None) -> Picture:
    return Picture("front", 0, np.full((128, 192, 3), 100, np.uint8), 0.0, found, "Town01")


def outputs_with(cell: tuple[int, int], class_id: int) -> NDArray[np.float32]:
    """Raw outputs that see one box of the anchor's size in the middle of a cell, and nothing else."""
    outputs = np.zeros((1, *TASK.output_shape), np.float32)
    outputs[:, 4] = -20.0
    outputs[0, 4, cell[0], cell[1]] = 20.0
    outputs[0, 5 + class_id] = 20.0
    return outputs


def test_a_detectors_answers_stand_in_the_pictures_own_pixels() -> None:
    view = Detector(TASK)
    inputs = view.inputs(picture(None))
    assert inputs.images.shape == (1, 3, 64, 96)
    answers = view.answers(outputs_with((0, 1), 1), inputs)
    assert answers.class_ids.tolist() == [1]
    assert answers.corners is not None  # cell (0, 1) of 2 x 3 has its middle at x 1/2, y 1/4
    assert np.allclose(answers.corners[0], [96 - 24, 32 - 16, 96 + 24, 32 + 16], atol=1e-3)


def test_a_picture_teaches_its_boxes_of_the_fleets_classes_and_where_nothing_is() -> None:
    lessons = BoxLessons([AnnotatedLabels(NAMES, TASK.class_names)], TASK.max_boxes)
    view = Detector(TASK)

    def label(found: Boxes | None) -> NDArray[np.float32] | None:
        one = picture(found)
        lesson = lessons.lesson(Shown(one, view.inputs(one), None))
        return None if lesson is None else lesson.samples.labels[0]

    taught = label(boxes((0, 0, 96, 64), (0, 0, 10, 10), class_ids=(0, 2)))
    assert taught[0].tolist() == [1.0, 0.25, 0.25, 0.5, 0.5]  # "bike" is the fleet's class 1
    assert taught[1:, 0].tolist() == [-1.0] * 3  # the tram is nobody's
    empty = label(Boxes.none())
    assert empty[:, 0].tolist() == [-1.0] * 4
    assert label(None) is None


def test_boxes_of_other_classes_alone_dont_teach_that_nothing_is_there(caplog: pytest.LogCaptureFixture) -> None:
    labels = AnnotatedLabels({"front": ("Car", "Bike")}, TASK.class_names)
    one = picture(boxes((0, 0, 96, 64), class_ids=(0,)))
    assert labels.boxes(Shown(one, Detector(TASK).inputs(one), None)) is None
    assert caplog.messages == ["no annotated class is the fleet's"]


def test_a_box_is_found_once_by_an_answer_of_its_class_that_overlaps_by_half() -> None:
    there = boxes((0, 0, 10, 10), (20, 0, 30, 10), class_ids=(0, 0))

    def found(*rows: tuple[float, float, float, float], class_ids: tuple[int, ...]) -> int:
        answers = boxes(*rows, class_ids=class_ids)
        return num_found(there, Answers(answers.class_ids, np.ones(len(answers), np.float32), answers.corners))

    assert found((0, 0, 10, 10), class_ids=(0,)) == 1
    assert found((0, 0, 10, 10), class_ids=(1,)) == 0
    assert found((0, 0, 10, 6), class_ids=(0,)) == 1
    assert found((0, 0, 10, 4), class_ids=(0,)) == 0
    assert found((0, 0, 10, 10), (0, 0, 10, 9), class_ids=(0, 0)) == 1  # twice the same box
    assert found((0, 0, 10, 9), (20, 1, 30, 10), class_ids=(0, 0)) == 2
    assert num_found(there, Answers.none()) == 0


def test_the_share_of_boxes_found_is_a_detectors_quality() -> None:
    label = np.full((1, 4, 5), -1.0, np.float32)
    label[0, 0] = [1, 0.5, 0.25, 0.25, 0.25]
    label[0, 1] = [0, 0.9, 0.9, 0.1, 0.1]
    samples = Samples(np.zeros((1, 3, 64, 96), np.float32), label)
    assert boxes_found(lambda images: outputs_with((0, 1), 1), samples, TASK) == 0.5
    assert quality(lambda images: outputs_with((0, 1), 0), samples, TASK) == {"boxes_found": 0.0}


def test_of_pictures_without_a_box_no_share_is_found() -> None:
    """It was 0, which looks like a model that finds nothing."""
    samples = Samples(np.zeros((1, 3, 64, 96), np.float32), np.full((1, 4, 5), -1.0, np.float32))
    assert quality(lambda images: outputs_with((0, 1), 1), samples, TASK) == {}


def test_what_a_model_found_counts_as_stream_accuracy() -> None:
    one = picture(boxes((72, 16, 120, 48), (0, 0, 20, 20), class_ids=(0, 0)))
    view = Detector(TASK)
    inputs = view.inputs(one)
    answers = view.answers(outputs_with((0, 1), 1), inputs)
    lesson = BoxLessons([AnnotatedLabels(NAMES, TASK.class_names)], 4).lesson(
        Shown(one, inputs, Prediction("front", 0, answers, 1, 0.0, 0.1))
    )
    assert (lesson.num_right, lesson.num_answered) == (1, 2)


def test_of_a_box_at_the_edge_what_lies_in_the_picture_is_to_be_found() -> None:
    """Annotations may reach past the edge, or lie outside; answers don't, so such boxes were never found."""
    one = picture(boxes((-96, 0, 96, 64), (60, 60, 192, 400), (200, 0, 300, 50), class_ids=(1, 0, 0)))
    inputs = Detector(TASK).inputs(one)
    cut = boxes((0, 0, 96, 64), (60, 60, 192, 128), class_ids=(0, 1))
    answers = Answers(cut.class_ids, np.ones(2, np.float32), cut.corners)
    lesson = BoxLessons([AnnotatedLabels(NAMES, TASK.class_names)], 2).lesson(
        Shown(one, inputs, Prediction("front", 0, answers, 1, 0.0, 0.1))
    )
    assert (lesson.num_right, lesson.num_answered, lesson.num_left_out) == (2, 2, 0)
    assert lesson.samples.labels[0, :, 0].tolist() == [1.0, 0.0]  # the largest first


def test_a_teacher_detector_labels_only_what_it_is_sure_of() -> None:
    one = picture(None)
    shown = Shown(one, Detector(TASK).inputs(one), None)
    sure = TeacherBoxes(lambda images: outputs_with((0, 1), 1), TASK, 0.9).boxes(shown)
    assert sure.class_ids.tolist() == [1]
    assert np.allclose(sure.corners[0], [72, 16, 120, 48], atol=1e-3)
    nothing = np.zeros((1, *TASK.output_shape), np.float32)
    assert TeacherBoxes(lambda images: nothing, TASK, 0.9).boxes(shown) is None


def test_samples_with_boxes_reach_the_training_process_unchanged() -> None:
    labels = np.full((2, 4, 5), -1.0, np.float32)
    labels[0, 0] = [1, 0.5, 0.5, 0.1, 0.2]
    samples = Samples(np.zeros((2, 3, 64, 96), np.float32), labels)
    file = RoundFile(samples)
    again = read_round_data(file.path)
    file.close()
    assert again.labels.dtype == np.float32
    assert np.array_equal(again.labels, labels)
    with pytest.raises(ValueError, match="M, 5"):
        Samples(samples.images, labels[:, :, :4])


def test_sources_of_single_labels_do_not_fit_a_fleet_that_learns_boxes(tmp_path: Path) -> None:
    (tmp_path / "images" / "car").mkdir(parents=True)
    with pytest.raises(SettingsError, match="learns to find boxes"):
        source_opener([f"folder://{tmp_path}/images"], tmp_path)(TASK)
