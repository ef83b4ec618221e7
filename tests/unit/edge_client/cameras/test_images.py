from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.recordings import CLASS_NAMES, number_in, play, write_coco, write_picture

from replayfleet.edge_client.cameras.recorded.images import ImagesCamera, ImagesSettings
from replayfleet.edge_client.flow import Camera
from replayfleet.federation.errors import SettingsError

BOX = [[24.0, 10.0, 40.0, 30.0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set/images"
    for number, name in enumerate(("view2.jpg", "view10.png", "view11.JPG")):
        write_picture(folder / name, number)
    return folder


def _write_labels(place: Path, *stems: str, names: Path | None) -> None:
    place.mkdir(exist_ok=True)
    for stem in stems:
        (place / f"{stem}.txt").write_text("1 0.5 0.5 0.25 0.5")
    if names is not None:
        names.write_text("\n".join(CLASS_NAMES))


def _camera(folder: Path, **settings: object) -> ImagesCamera:
    return ImagesCamera(ImagesSettings(folder, rate=1000.0, **settings), "shelf")  # type: ignore[arg-type]


def test_pictures_come_in_the_order_of_their_names_without_boxes(folder: Path):
    camera: Camera = _camera(folder)
    pictures = play(camera)
    assert [number_in(picture.pixels) for picture in pictures] == [0, 1, 2]
    assert [picture.frame_id for picture in pictures] == [0, 1, 2]
    assert [picture.boxes for picture in pictures] == [None] * 3
    assert camera.class_names == ()
    assert not camera.live
    assert "3 at 1000/s, no boxes" in camera.describe()
    assert len(play(_camera(folder, loop=True), most=7)) == 7


@pytest.mark.parametrize("place", ["labels", "images"])
@pytest.mark.parametrize("names", ["labels/labels.txt", "images/classes.txt", "labels.txt"])
def test_label_files_are_found_beside_the_folder_and_in_it(folder: Path, place: str, names: str):
    (folder.parent / "labels").mkdir()
    if place == "images" and names.startswith("labels/"):
        names = "classes.txt"
    _write_labels(folder.parent / place, "view2", "view11", names=folder.parent / names)
    camera = _camera(folder)
    boxes = [picture.boxes for picture in play(camera)]
    assert camera.class_names == CLASS_NAMES
    assert boxes[0].corners.tolist() == BOX
    assert boxes[0].class_ids.tolist() == [1]
    assert [found is None for found in boxes] == [False, True, False]


def test_the_operators_own_places_go_first(folder: Path, tmp_path: Path):
    _write_labels(folder.parent / "labels", "view2", names=None)
    _write_labels(tmp_path / "mine", "view10", names=tmp_path / "names.txt")
    camera = _camera(folder, annotations=str(tmp_path / "mine"), names=str(tmp_path / "names.txt"))
    assert [picture.boxes is None for picture in play(camera)] == [True, False, True]


@pytest.mark.parametrize("place", ["annotations.json", "../annotations.json", "../instances.json"])
def test_a_coco_file_is_found_or_named(folder: Path, place: str):
    path = write_coco(folder / place, {"train/view2.jpg": [(24, 10, 16, 20)], "view10.png": []})
    camera = _camera(folder, annotations=str(path) if "instances" in place else "")
    boxes = [picture.boxes for picture in play(camera)]
    assert camera.class_names == ("vehicle", "bike")
    assert boxes[0].corners.tolist() == BOX
    assert boxes[1] is not None
    assert len(boxes[1]) == 0  # looked at, nothing there
    assert boxes[2] is None  # nobody looked


def test_a_coco_file_that_was_made_on_windows_names_the_same_pictures(folder: Path):
    write_coco(folder / "annotations.json", {"C:\\train\\view2.jpg": [(24, 10, 16, 20)], "train\\view10.png": []})
    assert [picture.boxes is None for picture in play(_camera(folder))] == [False, False, True]


def test_damaged_pictures_and_labels_cost_a_line_each(folder: Path, caplog: pytest.LogCaptureFixture):
    _write_labels(folder.parent / "labels", "view2", "view11", names=folder.parent / "labels.txt")
    (folder.parent / "labels/view2.txt").write_bytes(b"\xff\xff")
    (folder / "view10.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        pictures = play(_camera(folder, loop=True), most=6)
    assert [number_in(picture.pixels) for picture in pictures] == [0, 2, 0, 2, 0, 2]
    assert [picture.boxes is None for picture in pictures] == [True, False] * 3
    assert [record.getMessage() for record in caplog.records] == ["annotation skipped", "picture skipped"]


def test_coco_boxes_of_a_picture_of_another_size_arent_used(folder: Path, caplog: pytest.LogCaptureFixture):
    small = {"id": 7, "file_name": "view2.jpg", "width": 32, "height": 20}
    write_coco(folder / "annotations.json", {"view2.jpg": [(1, 1, 5, 5)]}, images=[small])
    with caplog.at_level(logging.WARNING):
        pictures = play(_camera(folder))
    assert [picture.boxes for picture in pictures] == [None] * 3
    assert "is 32x20 there, 64x40 in the recording" in str(caplog.records[0].fields)  # type: ignore[attr-defined]


def test_a_folder_without_use_is_refused_before_the_start(folder: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"\*.png' doesn't exist; expected images:///FOLDER, the folder itself"):
        _camera(folder / "*.png")
    (tmp_path / "film.mp4").touch()
    with pytest.raises(SettingsError, match=r"film\.mp4' is no folder"):
        _camera(tmp_path / "film.mp4")
    with pytest.raises(SettingsError, match="has no pictures"):
        _camera(tmp_path)
    with pytest.raises(SettingsError, match="is a label file of a picture in"):
        _camera(folder, annotations=str(tmp_path))
    with pytest.raises(SettingsError, match=r"absent.json can't be read"):
        _camera(folder, annotations=str(tmp_path / "absent.json"))
    with pytest.raises(SettingsError, match=r"no picture in .* has boxes; expected annotations=PLACE"):
        _camera(folder, names=str(tmp_path / "names.txt"))
    with pytest.raises(SettingsError, match="rate is 1001"):
        ImagesSettings(folder, rate=1001)


def test_label_files_without_class_names_are_refused_before_the_start(folder: Path):
    _write_labels(folder.parent / "labels", "view2", names=None)
    with pytest.raises(SettingsError, match=r"have no class names; expected labels.txt or classes.txt in"):
        _camera(folder)


def test_a_coco_file_of_other_pictures_is_refused_before_the_start(folder: Path):
    path = write_coco(folder / "annotations.json", {"other.jpg": []})
    with pytest.raises(SettingsError, match=r"lists no picture of .*; expected file_name 'view2.jpg'"):
        _camera(folder)
    write_coco(path, {"a/view2.jpg": [], "b/view2.jpg": []})
    with pytest.raises(SettingsError, match=r"'a/view2.jpg' and 'b/view2.jpg' are one picture"):
        _camera(folder)
