"""Recorded driving as whole pictures with boxes: what is read, when, and the task that it poses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.driving_folder import CLASS_NAMES, HEIGHT, SIDE, WIDTH, write_driving
from support.recordings import carla_frames

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods.kit.records import RoundData
from replayfleet.federation.streams.box_labels import box_labels
from replayfleet.federation.streams.datasets import BOX_DATASETS, BoxDataset, Dataset, has_boxes, load_any_dataset
from replayfleet.federation.streams.driving import pictures as driving_pictures
from replayfleet.federation.streams.driving.pictures import DrivingPictures, read_driving_pictures
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.federation.streams.labelled_images import normalise
from replayfleet.federation.streams.resizing import resized

TOWNS = {"Town01": [[0, 3], [], [1], [4], [2, 2, 2], [0]], "Town02": [[1, 0]] * 4}


def boxes(root: Path) -> BoxDataset:
    data = load_any_dataset("carla-boxes", data_root=root)
    assert isinstance(data, BoxDataset)
    return data


def test_every_fourth_frame_is_for_tests_and_pictures_know_town_and_frame(tmp_path: Path):
    data = boxes(write_driving(tmp_path / "carla", TOWNS).parent)
    assert data.train.place_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert data.train.frames.tolist() == [0, 1, 2, 4, 5, 0, 1, 2]
    assert data.test.place_ids.tolist() == [0, 1]
    assert data.test.frames.tolist() == [3, 3]
    assert data.test.place_names == ("Town01", "Town02")
    assert data.test.num_frames == (6, 4)


def test_pixels_and_labels_are_those_of_a_device_that_reads_the_frames_itself(tmp_path: Path):
    data = boxes(write_driving(tmp_path, TOWNS))
    driving = Driving(tmp_path)
    frames = [driving.frames(["Town01"])[4], driving.frames(["Town02"])[0]]
    for index, frame in zip([3, 5], frames, strict=True):
        pixels = frame.pixels()
        size = (pixels.shape[1], pixels.shape[0])
        found = driving.annotation(frame, size)
        seen = resized(pixels, driving_pictures.IMAGE_HEIGHT, driving_pictures.IMAGE_WIDTH)
        assert np.array_equal(data.train.images[np.array([index])][0], seen)
        label = box_labels(found.corners, found.class_ids, size, data.task.max_boxes)
        assert np.array_equal(data.train.labels[index], label)


def read(tmp_path: Path, recorded: dict[str, list[list[int]]], **how: Any) -> DrivingPictures:
    found = read_driving_pictures(write_driving(tmp_path / "carla", recorded), size=(128, 32), **how)
    return found[0]


def test_frames_become_pictures_of_the_size_asked_for_with_boxes_in_shares(tmp_path: Path):
    part = read(tmp_path, {"Town01": [[0, 3], [], [1], [1]], "Town02": [[2]]})
    assert part.images.shape == (4, 32, 128, 3)
    first = part.labels[0][np.argsort(part.labels[0, :, 1])]
    assert first[first[:, 0] >= 0, 0].tolist() == [0, 3]
    assert part.labels[0, 0, 3:].tolist() == pytest.approx([SIDE / WIDTH, SIDE / 2 / HEIGHT], rel=1e-4)
    assert (part.labels[1, :, 0] == -1).all()
    assert part.labels[3, 0, 0] == 2
    images = normalise(part.images[np.arange(4)])
    assert images.shape == (4, 3, 32, 128)
    assert -1 <= images.min() < images.max() <= 1
    RoundData(torch.from_numpy(images), torch.from_numpy(part.labels))


def test_a_box_stands_where_its_object_is_in_the_resized_picture(tmp_path: Path):
    part = read(tmp_path, {"Town01": [[3]] * 4})
    _, x, y, width, height = part.labels[0, 0]
    inside = part.images[np.array([0])][0, :, :, 1] > 100
    rows, columns = np.nonzero(inside)
    assert columns.mean() / 128 == pytest.approx(x, abs=0.02)
    assert rows.mean() / 32 == pytest.approx(y, abs=0.05)
    assert width * 128 * height * 32 > 0


def test_of_some_towns_only_their_frames_are_taken(tmp_path: Path):
    recorded = {"Town01": [[0]] * 4, "Town02": [[1], [1, 2], [1], [1]]}
    part = read(tmp_path, recorded, towns=["Town02"])
    assert part.place_ids.tolist() == [1, 1, 1]
    assert part.labels.shape == (3, 2, 5)
    with pytest.raises(SettingsError, match="no town 'Town03'"):
        read_driving_pictures(tmp_path, towns=["Town03"])


def test_the_task_is_a_narrow_detector_whose_anchors_and_box_count_come_from_the_data(tmp_path: Path):
    task = boxes(write_driving(tmp_path, TOWNS)).task
    assert task.image_shape == (3, driving_pictures.IMAGE_HEIGHT, driving_pictures.IMAGE_WIDTH)
    assert (task.width, task.stride, task.class_names) == (4, driving_pictures.STRIDE, CLASS_NAMES)
    assert task.max_boxes == 3
    assert task.anchors == (pytest.approx((SIDE / WIDTH, SIDE / 2 / HEIGHT), abs=1e-5),)


def test_a_box_of_next_to_no_extent_is_a_box_among_others(tmp_path: Path):
    root = write_driving(tmp_path, TOWNS)
    (root / "labels/Town01_000000.txt").write_text("0 0.001 0.001 4e-7 4e-7\n")
    assert boxes(root).task.anchors[0] == (1e-6, 1e-6)


def test_a_round_s_pictures_are_of_one_kind_and_say_what_they_show(tmp_path: Path):
    train = boxes(write_driving(tmp_path, TOWNS)).train
    assert set(train.kinds()) == {0}
    assert train.classes_of(np.array([0, 1, 3])) == (0, 2, 3)
    assert train.num_objects(np.array([0, 1, 3])) == 5


def test_a_picture_is_decoded_when_it_is_first_taken(tmp_path: Path):
    data = boxes(write_driving(tmp_path, TOWNS))
    picture = tmp_path / "images/Town01_000060.png"
    good = data.train.images[np.array([1])]
    picture.write_bytes(b"no picture")
    assert np.array_equal(data.train.images[np.array([1])], good)
    (tmp_path / "images/Town01_000120.png").write_bytes(b"no picture")
    with pytest.raises(SettingsError, match="Town01_000120"):
        data.train.images[np.array([2])]


def test_recordings_that_show_nothing_to_learn_or_to_be_tested_on_are_refused(tmp_path: Path):
    write_driving(tmp_path, {"Town01": [[0], [0], [0], []]})
    with pytest.raises(SettingsError, match="no box in its test frames"):
        boxes(tmp_path)


@pytest.mark.parametrize(("name", "fault"), [("c" * 300, "has 300 characters"), ("car\x1b", "what can be printed")])
def test_a_recording_with_a_class_that_no_task_has_is_refused_in_a_line(tmp_path: Path, name: str, fault: str):
    names = write_driving(tmp_path, TOWNS) / "labels.txt"
    names.write_text("\n".join([name, *CLASS_NAMES[1:]]))
    with pytest.raises(SettingsError, match=rf"^data set carla-boxes: a class.*{fault}"):
        boxes(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REPLAYFLEET_DATA", raising=False)
    with pytest.raises(SettingsError, match=r"carla-boxes not found .*recorded driving"):
        boxes(tmp_path)
    with pytest.raises(SettingsError, match="did you mean 'carla-boxes'"):
        load_any_dataset("carla-boxs")
    with pytest.raises(SettingsError, match="leave --image-size out"):
        load_any_dataset("carla-boxes", data_root=tmp_path, image_size=32)


def test_sets_with_classes_are_found_as_ever(tmp_path: Path):
    write_driving(tmp_path, TOWNS)
    assert isinstance(load_any_dataset("carla-crops", data_root=tmp_path), Dataset)
    assert [name for name in (*BOX_DATASETS, "carla-crops") if has_boxes(name)] == ["carla-boxes"]


def test_parts_that_do_not_fit_can_t_be_made():
    pixels, labels = np.zeros((2, 4, 4, 3), np.uint8), np.zeros((1, 3, 5), np.float32)
    ids = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="expected equal numbers"):
        DrivingPictures(pixels, labels, CLASS_NAMES, ids, ids, ("Town01",), (2,))


def test_the_recorded_frames_are_all_there():
    data = boxes(carla_frames().parent)
    assert (len(data.train.labels), len(data.test.labels)) == (772, 256)
    assert data.task.max_boxes == 15
    assert len(data.task.anchors) == driving_pictures.NUM_ANCHORS
