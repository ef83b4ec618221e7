from __future__ import annotations

import base64
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.recordings import CLASS_NAMES, play, write_coco, write_film

from replayfleet.edge_client.cameras.recorded.video import VideoCamera, VideoSettings, overheard
from replayfleet.edge_client.flow import Camera, CameraError, Picture
from replayfleet.federation.errors import SettingsError

NUM_FRAMES = 12
INTERLACED = (
    "AAABswEAEBP//+AYAAABtRSCAAEAAAAAAbgACABAAAABAAAP//gAAAG1j//zgAAAAAEBE3kKUpfM37hAAAABAhN5ClKXzN+4QAAAAbMBABAT///gGAAA"
    "AbUUggABAAAAAAG4AAgAgAAAAQAAD//4AAABtY//84AAAAABARN5ClKXzN+4QAAAAQITeQpSl8zfuEA="
)
"""Two red frames of 16 x 16, MPEG-2: OpenCV writes none."""


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return write_film(tmp_path / "film.mp4", NUM_FRAMES)


def _camera(film: Path, **settings: object) -> VideoCamera:
    return VideoCamera(VideoSettings(film, **{"rate": 1000.0, **settings}), "dash")  # type: ignore[arg-type]


def _number(picture: Picture) -> int:
    red, green, _ = picture.pixels.reshape(-1, 3).mean(axis=0)
    assert red > 150
    return round(green / 10)


def test_every_frame_of_a_film_is_delivered_in_order(film: Path):
    camera: Camera = _camera(film)
    pictures = play(camera)
    assert [_number(picture) for picture in pictures] == list(range(NUM_FRAMES))
    assert [picture.frame_id for picture in pictures] == list(range(NUM_FRAMES))
    assert {picture.boxes for picture in pictures} == {None}
    assert pictures[0].size == (64, 40)
    assert not camera.live
    assert camera.class_names == ()
    assert play(camera) == []


def test_a_film_plays_at_its_own_rate_unless_another_is_asked_for(film: Path):
    camera = _camera(film, rate=0.0)
    assert "20 frames/s" in camera.describe()
    began = time.monotonic()
    play(camera, most=5)
    assert time.monotonic() - began >= 4 / 20


def test_a_loop_begins_again_and_ids_go_on(film: Path):
    pictures = play(_camera(film, loop=True), most=2 * NUM_FRAMES + 3)
    assert [_number(picture) for picture in pictures] == [*range(NUM_FRAMES), *range(NUM_FRAMES), 0, 1, 2]
    assert [picture.frame_id for picture in pictures] == list(range(2 * NUM_FRAMES + 3))


def test_a_film_goes_on_where_it_stopped(film: Path):
    camera = _camera(film)
    play(camera, most=4)
    assert [_number(picture) for picture in play(camera)] == list(range(4, NUM_FRAMES))


@pytest.mark.parametrize("first", [0, 1])
def test_yolo_files_belong_to_frame_numbers(film: Path, tmp_path: Path, first: int):
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "classes.txt").write_text("\n".join(CLASS_NAMES))
    (labels / f"film_{3 + first}.txt").write_text("4 0.5 0.5 0.25 0.5")
    (labels / f"film_{5 + first:06d}.txt").touch()
    (labels / f"._film_{5 + first:06d}.txt").write_bytes(b"\0\5\x16\7")  # a Mac's, on a disk of another system
    camera = _camera(film, annotations=str(labels), first=first)
    boxes = {picture.frame_id: picture.boxes for picture in play(camera) if picture.boxes is not None}
    assert sorted(boxes) == [3, 5]
    assert boxes[3].corners.tolist() == [[24, 10, 40, 30]]
    assert len(boxes[5]) == 0
    assert camera.class_names == CLASS_NAMES


def test_a_coco_file_s_pictures_are_frame_numbers_on_every_pass(film: Path, tmp_path: Path):
    path = write_coco(tmp_path / "film.json", {"frame_000002.png": [(24, 10, 16, 20)], "7": []})
    pictures = play(_camera(film, annotations=str(path), loop=True), most=2 * NUM_FRAMES)
    assert [picture.frame_id for picture in pictures if picture.boxes is not None] == [2, 7, 14, 19]


def test_a_damaged_label_file_costs_one_line(film: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    labels = tmp_path / "labels"
    labels.mkdir()
    (tmp_path / "labels.txt").write_text("\n".join(CLASS_NAMES))
    (labels / "3.txt").write_text("nonsense")
    (labels / "4.txt").touch()
    with caplog.at_level(logging.WARNING):
        pictures = play(_camera(film, annotations=str(labels), loop=True), most=2 * NUM_FRAMES)
    assert [picture.boxes is not None for picture in pictures[:6]] == [False, False, False, False, True, False]
    assert [record.getMessage() for record in caplog.records] == ["annotation skipped"]


def _write_mjpeg(path: Path, num_frames: int) -> bytearray:
    """Write a film of which every frame is a JPEG, so that damage stays in its frame; return its bytes."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 20.0, (64, 40))
    for number in range(num_frames):
        writer.write(np.full((40, 64, 3), (0, 10 * number, 200), dtype=np.uint8))
    writer.release()
    return bytearray(path.read_bytes())


def _reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.getMessage()}: {record.fields['reason']}" for record in caplog.records]  # type: ignore[attr-defined]


def test_damaged_frames_cost_one_line_and_the_film_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    film = tmp_path / "film.avi"
    data = _write_mjpeg(film, 12)
    for number in (5, 4):
        begin = -1
        for _ in range(number + 1):
            begin = data.index(b"\xff\xd8\xff", begin + 1)
        data[begin + 2 : begin + 200] = bytes(198)
    film.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        pictures = play(_camera(film, loop=True), most=20)
    assert [_number(picture) for picture in pictures] == 2 * [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert [picture.frame_id for picture in pictures] == [n for n in range(24) if n % 12 not in (4, 5)]
    assert _reports(caplog) == ["film frames skipped: 2 from frame 4 on can't be decoded"]


def test_a_film_that_breaks_off_ends_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    film = tmp_path / "film.avi"
    data = _write_mjpeg(film, 24)
    last = -1
    for _ in range(8):
        last = data.index(b"\xff\xd8\xff", last + 1)
    film.write_bytes(data[:last])
    camera = _camera(film)
    with caplog.at_level(logging.WARNING):
        pictures = play(camera)
    assert [_number(picture) for picture in pictures] == list(range(7))
    assert play(camera) == []
    assert _reports(caplog) == ["film breaks off: 7 of 24 frames can be read"]


def test_a_film_that_vanished_is_a_lost_camera(film: Path):
    camera = _camera(film, loop=True)
    film.rename(film.with_suffix(".away"))
    with pytest.raises(CameraError, match="can't be opened any more"):
        play(camera)
    film.with_suffix(".away").rename(film)
    assert len(play(camera, most=3)) == 3


def test_a_film_that_cant_be_played_is_refused_before_the_start(film: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match="doesn't exist; expected video:///path"):
        _camera(tmp_path / "absent.mp4")
    (tmp_path / "text.mp4").write_text("no film" * 1000)
    with pytest.raises(SettingsError, match="can't be decoded: damaged, or of a kind"):
        _camera(tmp_path / "text.mp4")
    (tmp_path / "half.mp4").write_bytes(film.read_bytes()[:-400])
    with pytest.raises(SettingsError, match="can't be decoded"):
        _camera(tmp_path / "half.mp4")


def test_what_is_logged_while_a_film_is_looked_at_is_not_lost(capfd: pytest.CaptureFixture[str]):
    with overheard() as complaints:
        os.write(2, b"the broker is away\n")
    assert complaints() == "the broker is away\n" == capfd.readouterr().err


def test_an_interlaced_film_is_shown_as_it_is_or_refused_but_never_as_what_memory_held(tmp_path: Path):
    film = tmp_path / "red.m2v"
    film.write_bytes(base64.b64decode(INTERLACED))
    try:
        camera = _camera(film)
    except SettingsError as error:  # OpenCV from 4.13 on
        assert "can't be decoded (Cannot convert interlaced to progressive frames" in str(error)  # noqa: PT017
    else:
        assert [picture.pixels.mean(axis=(0, 1)).round(-1).tolist() for picture in play(camera)] == 2 * [[250, 0, 0]]


def test_a_film_needs_no_standard_error(film: Path):
    script = f"""
from pathlib import Path
from replayfleet.edge_client.cameras.recorded.video import VideoCamera, VideoSettings
print(VideoCamera(VideoSettings(Path({str(film)!r})), "dash").describe())"""
    words = ("sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script)
    assert "20 frames/s" in subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def test_annotations_that_cant_be_used_are_refused_before_the_start(film: Path, tmp_path: Path):
    labels = tmp_path / "labels"
    labels.mkdir()
    with pytest.raises(SettingsError, match=r"holds no label files; expected frame_000012.txt"):
        _camera(film, annotations=str(labels))
    (labels / "3.txt").touch()
    with pytest.raises(SettingsError, match="have no class names"):
        _camera(film, annotations=str(labels))
    (labels / "labels.txt").write_text("vehicle")
    (labels / "frame_03.txt").touch()
    with pytest.raises(SettingsError, match=r"3.txt and frame_03.txt in .* are of one frame|frame_03.txt and 3.txt"):
        _camera(film, annotations=str(labels))
    (labels / "frame_03.txt").rename(labels / "street.txt")
    with pytest.raises(SettingsError, match=r"street.txt has no frame number at the end"):
        _camera(film, annotations=str(labels))
    with pytest.raises(SettingsError, match=r"picture 'film.mp4' has no frame number"):
        _camera(film, annotations=str(write_coco(tmp_path / "film.json", {"film.mp4": []})))


def test_settings_out_of_range_are_refused(film: Path):
    with pytest.raises(SettingsError, match="rate is -1"):
        VideoSettings(film, rate=-1)
    with pytest.raises(SettingsError, match="first is -2"):
        VideoSettings(film, annotations="x", first=-2)
    with pytest.raises(SettingsError, match="names and first belong to annotations"):
        VideoSettings(film, names="x")
