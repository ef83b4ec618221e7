from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
from support.recordings import CLASS_NAMES, carla_frames, number_in, play, write_drive

from replayfleet.edge_client.cameras.recorded.carla_replay import CarlaReplayCamera, CarlaReplaySettings
from replayfleet.edge_client.flow import Camera, CameraError
from replayfleet.federation.errors import SettingsError

FAST = 1000.0


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Town01 is frames 0 to 3, Town02 4 and 5, Town03 6."""
    return write_drive(tmp_path / "drive", {"Town01": [60, 120, 180, 1000], "Town02": [9, 10], "Town03": [1]})


def test_a_town_is_played_frame_by_frame_with_its_boxes(drive: Path):
    camera: Camera = CarlaReplayCamera(CarlaReplaySettings(drive, town="Town01", rate=FAST), "front")
    pictures = play(camera)
    assert [number_in(picture.pixels) for picture in pictures] == [0, 1, 2, 3]
    assert [picture.frame_id for picture in pictures] == [0, 1, 2, 3]
    assert {picture.camera for picture in pictures} == {"front"}
    assert not camera.live
    assert camera.class_names == CLASS_NAMES
    assert pictures[0].size == (64, 40)
    assert pictures[0].boxes.corners.tolist() == [[24, 10, 40, 30]]


def test_towns_come_in_the_order_of_the_drive(drive: Path):
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, towns="Town03, Town01", rate=FAST), "front")
    pictures = play(camera)
    assert [number_in(picture.pixels) for picture in pictures] == [6, 0, 1, 2, 3]
    assert [picture.place for picture in pictures] == ["Town03", *["Town01"] * 4]
    assert "Town03, Town01, 5 frames at 1000/s" in camera.describe()


def test_without_towns_all_are_driven_through(drive: Path):
    assert len(play(CarlaReplayCamera(CarlaReplaySettings(drive, rate=FAST), "front"))) == 7


def test_start_leaves_frames_out_and_a_loop_brings_them_back(drive: Path):
    settings = CarlaReplaySettings(drive, towns="Town02,Town03", rate=FAST, loop=True, start=2)
    camera = CarlaReplayCamera(settings, "front")
    pictures = play(camera, most=5)
    assert [number_in(picture.pixels) for picture in pictures] == [6, 4, 5, 6, 4]
    assert [picture.frame_id for picture in pictures] == [0, 1, 2, 3, 4]
    assert [picture.place for picture in pictures][:3] == ["Town03", "Town02", "Town02"]


def test_a_drive_goes_on_where_it_stopped_and_stays_ended(drive: Path):
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, town="Town01", rate=FAST), "front")
    assert [number_in(picture.pixels) for picture in play(camera, most=3)] == [0, 1, 2]
    assert [(picture.frame_id, number_in(picture.pixels)) for picture in play(camera)] == [(3, 3)]
    assert play(camera) == []


def test_frames_come_at_the_rate_and_wait_for_a_slow_reader(drive: Path):
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, rate=50.0), "front")
    numbers, moments = [], []
    for picture in camera.pictures(threading.Event()):
        numbers.append(number_in(picture.pixels))
        moments.append(picture.captured_at)
        if picture.frame_id == 2:
            time.sleep(0.15)  # several frames long
    assert numbers == [0, 1, 2, 3, 4, 5, 6]
    assert moments[2] - moments[0] >= 0.03
    assert moments[3] - moments[2] >= 0.15
    assert moments[6] - moments[3] >= 0.04  # it doesn't hurry after a wait


def test_stop_ends_a_wait_at_once(drive: Path):
    stop = threading.Event()
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, rate=0.01), "front")
    pictures = camera.pictures(stop)
    next(pictures)
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    assert list(pictures) == []
    assert time.monotonic() - began < 60


def test_damaged_files_cost_one_line_each_and_the_rest_goes_on(drive: Path, caplog: pytest.LogCaptureFixture):
    (drive / "images/Town01_000120.jpg").write_bytes(b"\xff\xd8 no picture")
    (drive / "labels/Town01_000180.txt").write_text("0 0.5 0.5 nonsense 0.1")
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, rate=FAST, loop=True), "front")
    (drive / "images/Town02_000009.jpg").unlink()
    with caplog.at_level(logging.WARNING):
        pictures = play(camera, most=15)
    assert [number_in(picture.pixels) for picture in pictures] == [0, 2, 3, 5, 6] * 3
    assert [picture.frame_id for picture in pictures][:6] == [0, 2, 3, 5, 6, 7]
    assert [picture.boxes is None for picture in pictures][:5] == [False, True, False, False, False]
    lines = [(record.getMessage(), str(record.fields["reason"])) for record in caplog.records]  # type: ignore[attr-defined]
    assert [event for event, _ in lines] == ["picture skipped", "annotation skipped", "picture skipped"]
    assert "Town01_000120.jpg is damaged" in lines[0][1]
    assert "Town01_000180.txt, line 1" in lines[1][1]
    assert "Town02_000009.jpg can't be read" in lines[2][1]


def test_a_drive_that_vanished_is_a_lost_camera(drive: Path):
    camera = CarlaReplayCamera(CarlaReplaySettings(drive, rate=FAST, loop=True), "front")
    (drive / "images").rename(drive / "away")
    with pytest.raises(CameraError, match=r"none of 7 pictures in .*images can be read"):
        play(camera)
    (drive / "away").rename(drive / "images")
    assert number_in(play(camera, most=1)[0].pixels) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0, expected a number, more than 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"start": -1}, "start is -1, expected a whole number, at least 0"),
        ({"start": 7}, "start is 7, expected less than the 7 frames"),
        ({"town": "Town01", "towns": "Town02"}, "both town and towns"),
        ({"towns": "Town01,,Town02"}, "expected names joined by commas"),
        ({"towns": "Town01,Twon02"}, "no town 'Twon02'; did you mean 'Town02'"),
    ],
)
def test_a_bad_drive_is_refused_before_the_start(drive: Path, settings: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message):
        CarlaReplayCamera(CarlaReplaySettings(drive, **settings), "front")  # type: ignore[arg-type]


def test_the_recorded_carla_towns_are_played():
    camera = CarlaReplayCamera(CarlaReplaySettings(carla_frames(), towns="Town04,Town01", rate=FAST), "front")
    pictures = play(camera, most=70)
    assert len(pictures) == 70
    assert {picture.size for picture in pictures} == {(640, 380)}
    assert camera.place(57) == "Town04"
    assert camera.place(58) == "Town01"
    assert all(picture.boxes is not None for picture in pictures)
    assert sum(len(picture.boxes or ()) for picture in pictures) > 20
