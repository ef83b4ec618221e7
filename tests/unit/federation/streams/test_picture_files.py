"""Files that are no pictures, and what one would wait for without end."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.annotations import read_class_names, read_coco, read_yolo
from replayfleet.federation.streams.files.feature_sets import read_features
from replayfleet.federation.streams.files.idx_sets import read_idx_set
from replayfleet.federation.streams.files.imagenet import read_tiny_imagenet_100
from replayfleet.federation.streams.files.picture_files import decode, from_files, picture_size, read_picture
from replayfleet.federation.streams.resizing import resized


@pytest.mark.timeout(20)
def test_nobody_waits_for_who_writes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "1.png"
    os.mkfifo(pipe)
    for read in (
        read_picture,
        picture_size,
        lambda path: from_files([path], 8, 3)[0],
        lambda path: read_yolo(path, 2, (8, 8)),
        read_coco,
        read_class_names,
    ):
        with pytest.raises(SettingsError, match="it is no file"):
            read(pipe)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["train.npz", "train-features.npy", "classes.txt"])
def test_nobody_waits_for_who_writes_into_a_pipe_among_vectors(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "classes.txt").write_text("a\nb\n")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(SettingsError, match="it is no file"):
        read_features(tmp_path, 8)


@pytest.mark.timeout(20)
def test_nobody_waits_for_who_writes_into_a_pipe_among_idx_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-images-idx3-ubyte")
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).touch()
    with pytest.raises(SettingsError, match="it is no file"):
        read_idx_set(tmp_path, [""], ("a", "b"))


@pytest.mark.timeout(20)
def test_nobody_waits_for_who_writes_into_a_pipe_among_tiny_imagenets_lists(tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet-200").mkdir()
    os.mkfifo(tmp_path / "tiny-imagenet-200" / "wnids.txt")
    with pytest.raises(SettingsError, match="it is no file"):
        read_tiny_imagenet_100(tmp_path, 64)


def test_a_folder_named_like_a_picture_is_none(tmp_path: Path) -> None:
    (tmp_path / "1.png").mkdir()
    with pytest.raises(SettingsError, match="it is no file"):
        read_picture(tmp_path / "1.png")


def test_an_oblong_picture_is_scaled_as_a_device_scales_it(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 400, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "1.png"), noise)
    image = from_files([tmp_path / "1.png"], 64, 3)[0]
    assert np.array_equal(image, resized(read_picture(tmp_path / "1.png"), 64))


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_picture_with_a_film_behind_it_is_whole_and_one_that_breaks_off_is_not(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    whole = cv2.imencode(suffix, noise)[1].tobytes()
    path = tmp_path / f"1{suffix}"
    path.write_bytes(whole + bytes(5000))
    assert read_picture(path).shape == (48, 64, 3)
    path.write_bytes(whole[:-100] + bytes(5000))
    with pytest.raises(SettingsError, match="no complete PNG or JPEG"):
        read_picture(path)


def test_the_end_of_a_thumbnail_is_not_the_pictures(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    whole, thumbnail = (cv2.imencode(".jpg", some)[1].tobytes() for some in (noise, noise[:8, :8]))
    whole = b"\xff\xd8\xff\xe1" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail + whole[2:]
    (tmp_path / "1.jpg").write_bytes(whole)
    assert read_picture(tmp_path / "1.jpg").shape == (48, 64, 3)
    (tmp_path / "1.jpg").write_bytes(whole[: whole.index(b"\xff\xc0", 6 + len(thumbnail)) + 30])
    with pytest.raises(SettingsError, match="no complete PNG or JPEG"):
        read_picture(tmp_path / "1.jpg")


def test_a_picture_of_too_many_pixels_is_called_large_and_not_damaged(tmp_path: Path) -> None:
    whole = cv2.imencode(".png", np.zeros((1, 9000, 3), np.uint8))[1].tobytes()
    (tmp_path / "1.png").write_bytes(whole)
    too_large = "1.png is too large: 9000 x 1 pixels; at most 8192 a side are read"
    with pytest.raises(SettingsError, match=too_large):
        read_picture(tmp_path / "1.png")
    with pytest.raises(SettingsError, match=too_large):
        decode(whole, "1.png", 8, 3)


def test_a_picture_for_which_there_is_no_memory_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    no_memory = cv2.error("alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate 18000000 bytes")
    monkeypatch.setattr(cv2, "imdecode", Mock(side_effect=no_memory))
    with pytest.raises(MemoryError, match="18000000 bytes"):
        decode(whole, "1.png", 8, 3)
