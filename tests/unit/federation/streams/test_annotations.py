from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams import annotations
from replayfleet.federation.streams.annotations import read_class_names, read_coco, read_yolo

SIZE = (640, 380)


def _yolo(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "frame.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _coco(tmp_path: Path, **changes: Any) -> Path:
    content = {
        "images": [
            {"id": 5, "file_name": "b.jpg", "width": 100, "height": 50},
            {"id": 2, "file_name": "a.jpg", "width": 100, "height": 50},
        ],
        "categories": [{"id": 9, "name": "bike"}, {"id": 4, "name": "vehicle"}],
        "annotations": [
            {"image_id": 2, "category_id": 9, "bbox": [10, 20, 30, 5.5]},
            {"image_id": 2, "category_id": 4, "bbox": [0, 0, 1, 1]},
            {"image_id": 2, "category_id": 4, "bbox": [0, 0, 99, 49], "iscrowd": 1},
        ],
    }
    path = tmp_path / "coco.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_a_yolo_line_becomes_corners_in_pixels(tmp_path: Path):
    found = read_yolo(_yolo(tmp_path, "3 0.5 0.5 0.25 0.5\n\n0 0.0 1.0 0.1 0.1\r\n"), 5, SIZE)
    assert found.corners.dtype == np.float32
    np.testing.assert_allclose(found.corners, [[240, 95, 400, 285], [-32, 361, 32, 399]])
    assert found.class_ids.tolist() == [3, 0]


def test_an_empty_label_file_is_a_picture_without_objects(tmp_path: Path):
    found = read_yolo(_yolo(tmp_path, ""), 5, SIZE)
    assert found.corners.shape == (0, 4)
    assert found.class_ids.dtype == np.int64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.1", "4 values, expected 'class cx cy w h'"),
        ("0 0.5 0.5 0.1 0.1 0.9", "6 values"),
        ("5 0.5 0.5 0.1 0.1", "class is '5', expected 0 to 4"),
        ("-1 0.5 0.5 0.1 0.1", "class is '-1'"),
        ("car 0.5 0.5 0.1 0.1", "class is 'car'"),
        ("1.0 0.5 0.5 0.1 0.1", "class is '1.0'"),
        ("9" * 5000 + " 0.5 0.5 0.1 0.1", "class is '99999"),
        ("0 0.5 O.5 0.1 0.1", "is no number"),
        ("0 nan 0.5 0.1 0.1", "cx is nan, expected 0 to 1"),
        ("0 0.5 1.2 0.1 0.1", "cy is 1.2, expected 0 to 1"),
        ("0 0.5 0.5 0 0.1", "w is 0, expected more than 0"),
        ("0 0.5 0.5 0.1 inf", "h is inf"),
        ("0 120 40 30 30", "cx is 120"),
        ("0 0.5 0.5 1.000001 0.1", "w is 1.000001, expected more than 0 and at most 1"),
    ],
)
def test_a_bad_yolo_line_is_named_with_what_was_expected(tmp_path: Path, line: str, message: str):
    path = _yolo(tmp_path, f"1 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(SettingsError) as caught:
        read_yolo(path, 5, SIZE)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe0 0.5", "is damaged: byte 0 is no UTF-8 text"),
        ("0 0.5 0.5 1e-30 0.5", "box 1 of 1 is too small"),
        ("0 0.5 0.5 0.1 0.1\n" * 1001, "line 1001: more than 1000 boxes"),
        (b" " * (annotations.MAX_LABEL_BYTES + 1), "is larger than 1048576 bytes"),
    ],
    ids=["bytes", "tiny", "many", "large"],
)
def test_a_damaged_or_oversized_label_file_is_refused(tmp_path: Path, content: str | bytes, message: str):
    with pytest.raises(SettingsError, match=message):
        read_yolo(_yolo(tmp_path, content), 5, SIZE)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"absent.txt can't be read: No such file"):
        read_yolo(tmp_path / "absent.txt", 5, SIZE)
    with pytest.raises(SettingsError, match="can't be read"):
        read_coco(tmp_path)


def test_class_names_are_lines_and_the_last_needs_no_end(tmp_path: Path):
    path = tmp_path / "labels.txt"
    path.write_bytes(b"\xef\xbb\xbfvehicle\r\ntraffic light\nbike")
    assert read_class_names(path) == ("vehicle", "traffic light", "bike")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no class names"),
        ("car\n\nbike\n", "line 2 is blank"),
        ("car\nbike\ncar\n", "line 3: class 'car' stands there twice"),
        ("\n".join(map(str, range(1001))), "holds 1001 class names, expected at most 1000"),
    ],
)
def test_a_bad_names_file_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "labels.txt"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_class_names(path)


def test_coco_boxes_go_to_their_pictures_and_classes_count_by_category_id(tmp_path: Path):
    found = read_coco(_coco(tmp_path))
    assert found.class_names == ("vehicle", "bike")
    b, a = found.pictures
    assert (b.file_name, b.size, len(b.annotation)) == ("b.jpg", (100, 50), 0)
    np.testing.assert_allclose(a.annotation.corners, [[10, 20, 40, 25.5], [0, 0, 1, 1]])
    assert a.annotation.class_ids.tolist() == [1, 0]


def test_given_class_names_decide_what_coco_ids_mean(tmp_path: Path):
    found = read_coco(_coco(tmp_path), ("tram", "bike", "vehicle"))
    assert found.pictures[1].annotation.class_ids.tolist() == [1, 2]
    with pytest.raises(SettingsError, match="unknown category 'bike'; did you mean 'bikes'"):
        read_coco(_coco(tmp_path), ("bikes", "vehicle"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, r"Expected array, got null - at \$.images; expected a COCO file"),
        ({"images": [3]}, r"Expected object, got int - at \$.images\[0\]"),
        ({"images": [{"id": True}]}, r"Expected int, got bool - at \$.images\[0\].id"),
        ({"images": [{"id": 2, "width": 0}]}, r"Expected int >= 1 - at \$.images\[0\].width"),
        (
            {"images": [{"id": 2, "width": 9, "height": 9, "file_name": 4}]},
            r"Expected str, got int - at .*file_name",
        ),
        (
            {"images": [{"id": 2, "width": 9, "height": 9, "file_name": "a"}] * 2},
            r"images\[1\].id is 2, which an earlier",
        ),
        ({"categories": []}, r"Expected array of length >= 1 - at \$.categories"),
        ({"categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}, r"categories\[1\] is 2 'a'; an earlier"),
        ({"annotations": {}}, r"Expected array, got object - at \$.annotations"),
        ({"annotations": [{"image_id": 8, "category_id": 9}]}, r"image_id is 8, which no picture in 'images' has"),
        ({"annotations": [{"image_id": 2, "category_id": 1}]}, r"category_id is 1, which no category has"),
    ],
)
def test_what_isnt_coco_is_refused_with_its_place(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message) as caught:
        read_coco(_coco(tmp_path, **changes))
    assert str(tmp_path / "coco.json") in str(caught.value)


@pytest.mark.parametrize("bbox", [None, 3, [1, 2, 3], [1, 2, 0, 4], [1, 2, 3, -4], [1, 2, "3", 4], [1e9, 2, 3, 4]])
def test_a_bad_coco_box_is_refused_with_its_place(tmp_path: Path, bbox: object):
    sound = {"image_id": 2, "category_id": 9, "bbox": [1, 2, 3, 4]}
    with pytest.raises(SettingsError, match=r"Expected .*annotations\[1\].bbox|annotations\[1\].bbox is .*, expected"):
        read_coco(_coco(tmp_path, annotations=[sound, sound | {"bbox": bbox}]))


def test_a_coco_box_without_extent_is_refused_with_file_and_picture(tmp_path: Path):
    tiny = {"image_id": 2, "category_id": 9, "bbox": [90, 2, 1e-9, 4]}
    with pytest.raises(SettingsError, match=r"coco.json: picture a.jpg: box 1 of 1 is too small"):
        read_coco(_coco(tmp_path, annotations=[tiny]))


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "[]", '{"annotations": [{"bbox": [1, 2, NaN, 4]}]}'])
def test_json_that_is_no_coco_object_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "coco.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="expected a COCO"):
        read_coco(path)


def test_a_coco_file_beyond_the_bound_isnt_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(annotations, "MAX_COCO_BYTES", 100)
    with pytest.raises(SettingsError, match="is larger than 100 bytes"):
        read_coco(_coco(tmp_path))
