from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from replayfleet.edge_client.flow import Boxes, Picture, Shown
from replayfleet.edge_client.frames.views import MAX_CROPS, Crops, WholePicture
from replayfleet.edge_client.learning.labels.annotated import AnnotatedLabels
from replayfleet.edge_client.learning.labels.base import UNKNOWN
from replayfleet.edge_client.learning.labels.feedback import FeedbackDesk
from replayfleet.edge_client.learning.labels.kept_frames import MAX_FRAMES, KeptFrames
from replayfleet.edge_client.learning.labels.operators_word import AnyFeedback, BoxFeedback, Feedback, FeedbackRefused
from replayfleet.edge_client.learning.labels.teacher import TeacherLabels, load_teacher
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.crops import square_crop
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(3, 32, ("car", "bike", "light"), generator_width=1)


def boxes(*class_ids: int) -> Boxes:
    corners = np.array([[10 * i, 10, 10 * i + 8, 30] for i in range(len(class_ids))], np.float32).reshape(-1, 4)
    return Boxes(corners, np.array(class_ids, np.int64))


def shown(found: Boxes | None, *, whole: bool = False, frame_id: int = 0, camera: str = "front") -> Shown:
    pixels = np.random.default_rng(frame_id).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    picture = Picture(camera, frame_id, pixels, 0.0, found, "Town01")
    view = WholePicture(TASK) if whole else Crops(TASK)
    return Shown(picture, view.inputs(picture), None)


def test_every_crop_takes_its_boxs_class_by_name_not_by_number() -> None:
    labels = AnnotatedLabels({"front": ("light", "car", "tram")}, TASK.class_names)
    assert labels.labels(shown(boxes(0, 1, 0))).tolist() == [2, 0, 2]


def test_a_class_that_the_fleet_lacks_is_said_once_and_left_unlabelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = AnnotatedLabels({"front": ("light", "tram")}, TASK.class_names)
    for _ in range(3):
        assert labels.labels(shown(boxes(1, 0))).tolist() == [UNKNOWN, 2]
    assert caplog.messages == ["annotated class is not the fleet's"]


def test_a_whole_picture_takes_the_class_of_its_boxes_only_if_they_agree() -> None:
    labels = AnnotatedLabels({"front": TASK.class_names}, TASK.class_names)
    assert labels.labels(shown(boxes(1, 1), whole=True)).tolist() == [1]
    assert labels.labels(shown(boxes(1, 2), whole=True)).tolist() == [UNKNOWN]
    assert labels.labels(shown(boxes(), whole=True)).tolist() == [UNKNOWN]
    assert labels.labels(shown(None, whole=True)).tolist() == [UNKNOWN]


def test_another_cameras_pictures_have_no_annotation() -> None:
    labels = AnnotatedLabels({"rear": TASK.class_names}, TASK.class_names)
    assert labels.labels(shown(boxes(1), camera="front")).tolist() == [UNKNOWN]


def test_boxes_with_impossible_class_ids_are_an_error_not_a_wrong_label() -> None:
    with pytest.raises(ValueError, match="class ids 1 to 7"):
        AnnotatedLabels({"front": TASK.class_names}, TASK.class_names).labels(shown(boxes(1, 7)))


def test_of_many_objects_the_largest_are_taken_in_their_own_order() -> None:
    count = MAX_CROPS + 10
    left = np.arange(count, dtype=np.float32) * 0.5
    corners = np.stack([left, left * 0, left + np.where(np.arange(count) < 10, 1, 20), left * 0 + 20], axis=1)
    found = Boxes(corners.astype(np.float32), np.zeros(count, np.int64))
    picture = Picture("front", 0, np.zeros((64, 96, 3), np.uint8), 0.0, found)
    inputs = Crops(TASK).inputs(picture)
    assert inputs.box_indices.tolist() == list(range(10, count))
    assert inputs.num_left_out == 10
    answers = Crops(TASK).answers(np.zeros((MAX_CROPS, 3), np.float32), inputs)
    assert answers.num_left_out == inputs.num_left_out


def test_a_crop_is_a_square_around_the_box_and_repeats_the_pictures_edge() -> None:
    pixels = np.arange(20 * 30 * 3, dtype=np.uint32).astype(np.uint8).reshape(20, 30, 3)
    inside = square_crop(pixels, np.array([10, 5, 20, 15], np.float32))
    assert np.array_equal(inside, pixels[4:16, 9:21])
    tall = square_crop(pixels, np.array([28, 0, 40, 20], np.float32))  # of what lies inside: 2 wide, 20 high
    assert tall.shape == (24, 24, 3)
    assert (tall[2:22, 13:] == pixels[:, 29:]).all()
    assert (tall[:2] == tall[2]).all()
    with pytest.raises(ValueError, match="doesn't overlap"):
        square_crop(pixels, np.array([40, 0, 50, 10], np.float32))


def test_a_teacher_is_believed_only_where_it_is_sure() -> None:
    sure = np.array([[9, 0, 0], [0.1, 0, 0], [0, 0, 9]], np.float32)
    labels = TeacherLabels(lambda images: sure[: len(images)], 0.9).labels(shown(boxes(0, 0, 0)))
    assert labels.tolist() == [0, UNKNOWN, 2]
    assert len(TeacherLabels(lambda images: sure, 0.9).labels(shown(boxes()))) == 0


def write_teacher(path: Path, num_classes: int) -> None:
    """Logits that are the picture's mean red, green and blue (and nothing), times 100."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "scale"], ["logits"]),
    ]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, (3, num_classes), (np.eye(3, num_classes) * 100).ravel())
    graph = helper.make_graph(
        nodes,
        "teacher",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", num_classes])],
        [scale],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_a_teachers_onnx_file_labels_pictures(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher.onnx", 3)
    teacher = TeacherLabels(load_teacher(tmp_path / "teacher.onnx", TASK), 0.9)
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, :, 1] = 255
    picture = Picture("front", 0, pixels, 0.0)
    found = Shown(picture, WholePicture(TASK).inputs(picture), None)
    assert teacher.labels(found).tolist() == [1]


def test_a_teacher_that_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    write_teacher(tmp_path / "wide.onnx", 4)
    (tmp_path / "junk.onnx").write_bytes(b"no model")
    for name, message in (("wide", r"expected \(3,\)"), ("junk", "no model of"), ("absent", "can't be read")):
        with pytest.raises(SettingsError, match=message):
            load_teacher(tmp_path / f"{name}.onnx", TASK)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "classes",
            '["bike", "car", "light"]',
            r'has the classes \["bike", "car", "light"\], and the fleet.s task \["car"',
        ),
        ("kind", "sub-generator", "has the kind sub-generator, and the fleet's task task"),
        ("classes", '["car", "bike", "light"]', ""),
    ],
)
def test_a_teacher_that_says_other_classes_would_mislabel_everything(
    tmp_path: Path, key: str, value: str, message: str
) -> None:
    write_teacher(tmp_path / "teacher.onnx", 3)
    model = onnx.load(tmp_path / "teacher.onnx")
    model.metadata_props.add(key=f"replayfleet.{key}", value=value)
    onnx.save(model, tmp_path / "teacher.onnx")
    with pytest.raises(SettingsError, match=message) if message else contextlib.nullcontext():
        load_teacher(tmp_path / "teacher.onnx", TASK)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_operators_label_meets_the_frame_while_it_is_kept() -> None:
    clock = Clock()
    desk = FeedbackDesk(TASK.class_names, 60.0, clock)
    desk.keep(shown(boxes(0, 1), frame_id=7))
    desk.keep(shown(None, whole=True, frame_id=8))
    samples, place, _ = desk.samples(Feedback("front", 7, "bike", 1))
    assert (samples.labels.tolist(), place) == ([1], "Town01")
    assert np.array_equal(samples.images[0], shown(boxes(0, 1), frame_id=7).inputs.images[1])
    assert desk.samples(Feedback("", 8, "car"))[0].labels.tolist() == [0]  # one camera needs no name
    clock.now += 61
    with pytest.raises(FeedbackRefused, match="not kept"):
        desk.samples(Feedback("front", 7, "bike", 1))


@pytest.mark.parametrize(
    ("feedback", "message"),
    [
        (Feedback("front", 7, "bik", 0), "unknown class 'bik'; did you mean 'bike'"),
        (Feedback("front", 7, "bike"), "2 objects; say which"),
        (Feedback("front", 7, "bike", 2), "no object 2"),
        (Feedback("front", 7, "bike", -1), "no object -1"),
        (Feedback("frnt", 7, "bike", 0), "camera 'frnt', of which no frame is kept; did you mean 'front'"),
        (Feedback("front", 6, "bike", 0), "not kept"),
        (BoxFeedback("front", 7, ()), "brings boxes, .*name its class"),
    ],
)
def test_feedback_that_cannot_be_used_says_why(feedback: AnyFeedback, message: str) -> None:
    desk = FeedbackDesk(TASK.class_names, 60.0, Clock())
    desk.keep(shown(boxes(0, 1), frame_id=7))
    with pytest.raises(FeedbackRefused, match=message):
        desk.samples(feedback)


def test_of_several_cameras_feedback_names_one() -> None:
    desk = FeedbackDesk(TASK.class_names, 60.0, Clock())
    for camera in ("rear", "front"):
        desk.keep(shown(boxes(0), camera=camera, frame_id=7))
    with pytest.raises(FeedbackRefused, match="frame 7 names no camera, expected front or rear"):
        desk.samples(Feedback("", 7, "bike", 0))


def test_the_number_of_kept_frames_is_bounded() -> None:
    frames = KeptFrames(60.0, Clock())
    found = shown(boxes())
    for frame_id in range(MAX_FRAMES + 5):
        frames.keep(Shown(Picture("front", frame_id, found.picture.pixels, 0.0), found.inputs, None))
    assert len(frames) == MAX_FRAMES


def test_the_memory_of_kept_frames_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = KeptFrames(60.0, Clock())
    frames = [shown(boxes(0, 1), frame_id=frame_id) for frame_id in (1, 2, 2, 3)]
    as_bytes = frames[0].inputs.images.nbytes // 4
    monkeypatch.setattr("replayfleet.edge_client.learning.labels.kept_frames.MAX_KEPT_BYTES", 2 * as_bytes)
    for frame in frames:
        keeper.keep(frame)
    with pytest.raises(FeedbackRefused, match="not kept"):
        keeper.find("front", 1)
    assert [len(keeper.find("front", frame_id).pixels) for frame_id in (2, 3)] == [2, 2]
