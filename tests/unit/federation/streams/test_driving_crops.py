"""From recorded frames with boxes to labelled crops, the same as a device's view makes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from support.driving_folder import CLASS_NAMES, HEIGHT, WIDTH, crops, write_driving
from support.recordings import carla_frames

from replayfleet.edge_client.flow import Boxes, Picture
from replayfleet.edge_client.frames.views import Crops
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.streams.crops import MIN_SIDE_PIXELS
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.driving.crops import DrivingCrops
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.federation.streams.files.picture_files import picture_size
from replayfleet.federation.streams.labelled_images import LabelledImages, normalise
from replayfleet.federation.streams.stream import Stream, StreamSettings

TASK = TASKS["carla-crops"]
TWO_TOWNS = {"Town01": [[0], [1, 2], [], [3, 0], [4], [0]], "Town02": [[4], [0], [0], [1]]}


def test_every_fourth_frame_of_a_town_is_held_out(tmp_path: Path):
    data, train, test = crops(write_driving(tmp_path, TWO_TOWNS))
    assert data.task == TASK
    assert train.class_names == CLASS_NAMES
    assert train.labels.tolist() == [0, 1, 2, 4, 0, 4, 0, 0]
    assert train.place_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert train.frames.tolist() == [0, 1, 1, 4, 5, 0, 1, 2]
    assert (test.labels.tolist(), test.place_ids.tolist(), test.frames.tolist()) == ([3, 0, 1], [0, 0, 1], [3, 3, 3])
    assert (train.place_names, train.num_frames) == (("Town01", "Town02"), (6, 4))


@pytest.mark.parametrize("place", [".", "carla"])
def test_a_recording_is_found_in_the_data_root_and_in_its_carla_folder(tmp_path: Path, place: str):
    write_driving(tmp_path / place, TWO_TOWNS)
    assert len(load_dataset("carla-crops", data_root=tmp_path).train.labels) == 8


@pytest.mark.parametrize(("side", "is_taken"), [(MIN_SIDE_PIXELS - 0.01, False), (MIN_SIDE_PIXELS + 0.01, True)])
def test_objects_with_too_short_a_longer_side_stay_out(tmp_path: Path, side: float, is_taken: bool):
    root = write_driving(tmp_path, {"Town01": [[0]] * 8}, side=side)
    if is_taken:
        assert len(load_dataset("carla-crops", data_root=root).train.labels) == 6
    else:
        with pytest.raises(SettingsError, match="has no object of 8 pixels in its train frames"):
            load_dataset("carla-crops", data_root=root)


def assert_same_as_a_device(root: Path, every: int) -> None:
    """Compare every so many frames with what the edge client's view makes of them, to the bit."""
    _, train, test = crops(root)
    drive, num_compared = Driving(root), 0
    for place, town in enumerate(train.place_names):
        for position, frame in list(enumerate(drive.frames([town])))[::every]:
            part = test if position % 4 == 3 else train
            pixels = frame.pixels()
            found = drive.annotation(frame, (pixels.shape[1], pixels.shape[0]))
            seen = np.minimum(found.corners[:, 2:], pixels.shape[1::-1]) - np.maximum(found.corners[:, :2], 0)
            large = seen.max(axis=1, initial=0) >= MIN_SIDE_PIXELS
            boxes = Boxes(found.corners[large], found.class_ids[large])
            inputs = Crops(TASK).inputs(Picture("front", 0, pixels, 0.0, boxes))
            own = np.flatnonzero((part.place_ids == place) & (part.frames == position))
            assert part.labels[own].tolist() == boxes.class_ids.tolist()
            assert normalise(part.images[own]).tobytes() == inputs.images.tobytes()
            num_compared += len(own)
    assert num_compared


def test_a_simulation_sees_the_same_pixels_as_a_device(tmp_path: Path):
    assert_same_as_a_device(write_driving(tmp_path, TWO_TOWNS), every=1)


def test_a_simulation_sees_the_same_real_crops_as_a_device():
    assert_same_as_a_device(carla_frames(), every=29)


def test_the_recorded_carla_frames_hold_3125_crops_for_training_and_1047_for_tests():
    _, train, test = crops(carla_frames())
    assert train.counts() == [1049, 135, 67, 1805, 69]
    assert test.counts() == [326, 46, 24, 630, 21]
    assert train.num_frames == (200, 184, 337, 58, 249)


def test_pictures_are_decoded_when_their_crops_are_asked_for_and_then_kept(tmp_path: Path):
    root = write_driving(tmp_path, TWO_TOWNS)
    _, train, _ = crops(root)
    first = train.images[np.array([1])]
    victim = root / "images/Town01_000060.png"
    victim.write_bytes(victim.read_bytes()[:40])
    assert train.images[np.array([2, 1])].shape == (2, 32, 32, 3)
    assert (train.images[np.array([1])] == first).all()
    again = load_dataset("carla-crops", data_root=root).train
    again.images[np.array([0])]
    with pytest.raises(SettingsError, match=r"Town01_000060\.png is damaged"):
        again.images[np.array([0, 1])]


def test_other_classes_are_refused(tmp_path: Path):
    root = write_driving(tmp_path, TWO_TOWNS)
    (root / "labels.txt").write_text("\n".join(["car", *CLASS_NAMES[1:]]))
    with pytest.raises(SettingsError, match=r"has classes car, bike, .*expected vehicle, bike"):
        load_dataset("carla-crops", data_root=root)


def test_another_data_root_is_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REPLAYFLEET_DATA", raising=False)
    (tmp_path / "images").mkdir()
    with pytest.raises(SettingsError, match=r"carla-crops not found .*images/Town01_001020\.jpg"):
        load_dataset("carla-crops", data_root=tmp_path)


def test_a_picture_that_is_turned_when_decoded_is_refused_for_its_boxes_would_not_fit(tmp_path: Path):
    root = write_driving(tmp_path, {"Town01": [[0]] * 4}, suffix=".jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (WIDTH, HEIGHT)).save(root / "images/Town01_000000.jpg", exif=turned)
    _, train, _ = crops(root)
    with pytest.raises(SettingsError, match=r"decodes to 48 x 240 pixels, but its head says 240 x 48"):
        train.images[np.array([0])]


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
@pytest.mark.parametrize("size", [(1, 1), (300, 7), (640, 380)])
def test_a_picture_s_size_is_read_from_its_head(tmp_path: Path, suffix: str, size: tuple[int, int]):
    path = tmp_path / f"picture{suffix}"
    assert cv2.imwrite(str(path), np.zeros((size[1], size[0], 3), np.uint8))
    assert picture_size(path) == size


def test_a_size_behind_long_comments_and_fillers_is_found(tmp_path: Path):
    path = tmp_path / "picture.jpg"
    assert cv2.imwrite(str(path), np.zeros((20, 30, 3), np.uint8))
    data = path.read_bytes()
    comment = b"\xff\xfe" + (60_000).to_bytes(2, "big") + bytes(59_998)
    path.write_bytes(data[:2] + comment * 3 + b"\xff\xff" + data[2:])
    assert picture_size(path) == (30, 20)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\xff\xd8\xff\xe0\x00", b"\xff\xd8" + b"\xff" * 5000, b"\x89PNG"])
def test_what_is_no_picture_has_no_size(tmp_path: Path, data: bytes):
    path = tmp_path / "picture.jpg"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match="its head is not that of a PNG or JPEG"):
        picture_size(path)


def test_crops_also_make_a_stream_of_task_types(tmp_path: Path):
    data, train, _ = crops(write_driving(tmp_path, {"Town01": [[0, 1, 2, 3, 4]] * 8}))
    size = StreamSettings(scenario="circulating", num_clients=2, num_rounds=4, samples_per_class=3)
    stream = Stream(size, data.train.labels, data.test.labels, data.task.num_classes)
    assert len(np.unique(train.labels[stream.train_indices(0, 0)])) == 2
    with pytest.raises(SettingsError, match="lasts for 0 rounds on this data"):
        Stream(StreamSettings(scenario="gradual", num_clients=2), train.labels, data.test.labels, 5)


def test_crops_without_a_place_each_are_refused(tmp_path: Path):
    _, train, _ = crops(write_driving(tmp_path, TWO_TOWNS))
    with pytest.raises(ValueError, match="8 crops but 7 places and 8 frames"):
        DrivingCrops(
            train.images, train.labels, CLASS_NAMES, train.place_ids[1:], train.frames, train.place_names, (6, 4)
        )
    assert isinstance(train, LabelledImages)
