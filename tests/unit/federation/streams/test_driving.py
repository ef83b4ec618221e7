from __future__ import annotations

from pathlib import Path

import pytest
from support.recordings import CLASS_NAMES, carla_frames, number_in, write_drive, write_picture

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.driving.recording import Driving
from replayfleet.federation.streams.files.picture_files import list_pictures, read_picture


def test_a_drive_is_its_towns_frames_in_the_order_of_their_numbers(tmp_path: Path):
    drive = Driving(write_drive(tmp_path / "d", {"Town10HD": [100, 9, 1000000], "Town02": [5]}))
    assert drive.class_names == CLASS_NAMES
    assert drive.towns == ("Town02", "Town10HD")
    assert [(f.town, f.number) for f in drive.frames(["Town10HD"])] == [
        ("Town10HD", 9),
        ("Town10HD", 100),
        ("Town10HD", 1000000),
    ]
    assert [f.number for f in drive.frames(["Town10HD", "Town02"])] == [9, 100, 1000000, 5]
    assert [f.number for f in drive.frames()] == [5, 9, 100, 1000000]


def test_pictures_and_boxes_are_read_when_asked_for(tmp_path: Path):
    root = write_drive(tmp_path / "d", {"Town01": [60, 120]})
    drive = Driving(root)
    frame = drive.frames()[1]
    assert number_in(frame.pixels()) == 1
    assert drive.annotation(frame, (64, 40)).corners.tolist() == [[24, 10, 40, 30]]
    (root / "labels/Town01_000120.txt").write_text("7 0.5 0.5 0.1 0.1")
    with pytest.raises(SettingsError, match=r"Town01_000120.txt, line 1: class is '7', expected 0 to 4"):
        drive.annotation(frame, (64, 40))


def test_an_unknown_town_is_refused_with_the_nearest(tmp_path: Path):
    drive = Driving(write_drive(tmp_path / "d", {"Town01": [60], "Town02": [60]}))
    with pytest.raises(SettingsError, match="no town 'Town1'; did you mean 'Town01'"):
        drive.frames(["Town02", "Town1"])


@pytest.mark.parametrize("missing", ["images", "labels", "labels.txt"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str):
    root = write_drive(tmp_path / "d", {"Town01": [60]})
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(SettingsError, match=f"{root} has no .*{missing}"):
        Driving(root)


def test_a_folder_that_isnt_there_or_has_no_pictures_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"doesn't exist; expected images/Town01_001020.jpg"):
        Driving(tmp_path / "absent")
    root = write_drive(tmp_path / "d", {})
    (root / "images").mkdir()
    with pytest.raises(SettingsError, match="has no pictures in images/"):
        Driving(root)


def test_pictures_and_labels_without_each_other_are_counted_and_named(tmp_path: Path):
    root = write_drive(tmp_path / "d", {"Town01": [1, 2, 3]})
    lone = root / "labels/Town01_000002.txt"
    lone.unlink()
    with pytest.raises(SettingsError, match=r"1 of 3 pictures in .* have no label file, first Town01_000002.jpg"):
        Driving(root)
    lone.touch()
    (root / "labels/Town09_000007.txt").touch()
    with pytest.raises(SettingsError, match=r"1 label files in .* have no picture, first Town09_000007.txt"):
        Driving(root)


def test_pictures_with_other_names_or_of_one_frame_are_refused(tmp_path: Path):
    root = write_drive(tmp_path / "d", {"Town01": [1]})
    write_picture(root / "images/Town01_1.jpg", 0)
    (root / "labels/Town01_1.txt").touch()
    with pytest.raises(SettingsError, match="are the same frame; keep one"):
        Driving(root)
    (root / "images/Town01_1.jpg").rename(root / "images/Town01_000001.png")
    (root / "labels/Town01_1.txt").unlink()
    with pytest.raises(SettingsError, match="are the same frame; keep one"):
        Driving(root)
    (root / "images/Town01_000001.png").rename(root / "images/night.jpg")
    with pytest.raises(SettingsError, match=r"night.jpg has no town and number in its name"):
        Driving(root)


def test_files_that_are_no_pictures_are_passed_over(tmp_path: Path):
    root = write_drive(tmp_path / "d", {"Town01": [1]})
    (root / "images/Thumbs.db").touch()
    (root / "images/._Town01_000001.jpg").touch()
    (root / "labels/classes.txt").touch()
    assert len(Driving(root).frames()) == 1


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_truncated_picture_is_damaged_even_where_the_decoder_shrugs(tmp_path: Path, suffix: str):
    path = tmp_path / f"picture{suffix}"
    write_picture(path, 3)
    assert number_in(read_picture(path)) == 3
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SettingsError, match=r"is damaged: .* no complete PNG or JPEG"):
        read_picture(path)


def test_numbers_in_names_count_by_value(tmp_path: Path):
    for name in ("f10.jpg", "f9.jpg", "f010b.jpg", "a.jpg", "5.jpg"):
        write_picture(tmp_path / name, 0)
    assert [path.name for path in list_pictures(tmp_path)] == ["5.jpg", "a.jpg", "f9.jpg", "f10.jpg", "f010b.jpg"]


def test_the_recorded_carla_frames_are_all_there():
    drive = Driving(carla_frames())
    assert drive.class_names == CLASS_NAMES
    assert {town: len(drive.frames([town])) for town in drive.towns} == {
        "Town01": 200,
        "Town02": 184,
        "Town03": 337,
        "Town04": 58,
        "Town05": 249,
    }
    counts = [0] * 5
    for frame in drive.frames():
        for class_id in drive.annotation(frame, (640, 380)).class_ids.tolist():
            counts[class_id] += 1
    assert counts == [1375, 181, 91, 2643, 105]
    assert drive.frames(["Town04"])[57].pixels().shape == (380, 640, 3)
