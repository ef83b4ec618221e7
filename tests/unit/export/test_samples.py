"""Files of samples are read as documented, and anything else is one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from replayfleet.export.samples import latents, parse_source, read_held, read_images, shares, shuffled
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import DetectionSpec, TaskSpec

TASK = TaskSpec(1, 28, ("shirt", "shoe"))
DETECTOR = DetectionSpec(3, 32, 64, ("car",), ((0.1, 0.1),))
IMAGES = np.zeros((4, 1, 28, 28), np.float32)


def write(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "samples.npz", **arrays)
    return folder / "samples.npz"


def test_pixels_are_normalised_and_floats_are_taken_as_they_are(tmp_path: Path):
    pixels = np.array([0, 51, 255], np.uint8).repeat(784).reshape(3, 1, 28, 28)
    images = read_images(write(tmp_path, images=pixels), TASK)
    assert images.dtype == np.float32
    np.testing.assert_allclose(images[:, 0, 0, 0], [-1, -0.6, 1], atol=1e-6)
    save_file({"images": images}, tmp_path / "same.safetensors")
    np.testing.assert_array_equal(read_images(tmp_path / "same.safetensors", TASK), images)


def test_held_data_has_labels_of_the_task(tmp_path: Path):
    held = read_held(write(tmp_path, images=IMAGES, labels=np.array([0, 1, 1, 0], np.uint8)), TASK)
    assert held.labels.tolist() == [0, 1, 1, 0]
    boxes = np.array([[[0, 0.5, 0.5, 0.2, 0.2], [-1, 0, 0, 0, 0]]])
    seen = read_held(write(tmp_path, images=np.zeros((1, 3, 32, 64), np.uint8), labels=boxes), DETECTOR)
    assert seen.labels.shape == (1, 2, 5)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"pictures": IMAGES}, "has no 'images'"),
        ({"images": IMAGES[:, :, :27]}, r"images are (4, 1, 27, 28), expected (N, 1, 28, 28)"),
        ({"images": IMAGES[:0]}, "N >= 1"),
        ({"images": IMAGES.astype(np.float64)}, "float64, expected float32"),
        ({"images": IMAGES + 255}, "pixels reach 255, expected -1 to 1"),
        ({"images": IMAGES * np.nan}, "pixels reach nan"),
        ({"images": IMAGES}, "has no 'labels'"),
        ({"images": IMAGES, "labels": np.zeros(3, np.int64)}, "labels are (3,) int64, expected (4,) integers"),
        ({"images": IMAGES, "labels": np.zeros(4)}, "float64, expected (4,) integers"),
        ({"images": IMAGES, "labels": np.array([0, 1, 2, 0])}, "labels are 0 to 2, expected class ids from 0 to 1"),
        ({"images": IMAGES, "labels": np.array([0, 1, -1, 0])}, "labels are -1 to 1, expected class ids from 0 to 1"),
        ({"images": IMAGES, "labels": np.array([{}] * 4)}, "can't be read as .npz"),
    ],
)
def test_a_file_that_does_not_fit_says_what_was_expected(tmp_path: Path, arrays: dict[str, Any], expected: str):
    with pytest.raises(SettingsError) as caught:
        read_held(write(tmp_path, **arrays), TASK)
    assert expected in str(caught.value)
    assert "samples.npz" in str(caught.value)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([0, 32, 16, 8, 8], "boxes reach 32, expected shares of the picture, 0 to 1"),
        ([0, 0.5, 0.5, np.nan, 0.2], "boxes reach nan"),
        ([0, 0, 0, 0, 0], "a box is 0 wide or high, expected more than 0; class id -1 says no box"),
        ([0, 0.5, 0.5, 0.2, -0.2], "a box is -0.2 wide or high"),
        ([np.nan, 0.5, 0.5, 0.2, 0.2], "labels are nan to nan, expected class ids from 0 to 0"),
        ([0.5, 0.5, 0.5, 0.2, 0.2], "labels are 0.5 to 0.5, expected class ids from 0 to 0"),
        (["car", "0.5", "0.5", "0.2", "0.2"], "labels are (1, 1, 5) <U3, expected (1, M, 5) numbers"),
    ],
)
def test_boxes_that_are_none_are_told(tmp_path: Path, box: list[Any], expected: str):
    """They were held against what the detector finds: it was right in nothing, or they counted as no boxes."""
    with pytest.raises(SettingsError) as caught:
        read_held(write(tmp_path, images=np.zeros((1, 3, 32, 64), np.uint8), labels=np.array([[box]])), DETECTOR)
    assert expected in str(caught.value)


def test_a_file_that_is_absent_or_something_else_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"absent\.npz: can't be read"):
        read_images(tmp_path / "absent.npz", TASK)
    packed = tmp_path / "bad.npz"
    np.savez_compressed(packed, images=np.random.default_rng(0).random((4, 1, 28, 28)))
    packed.write_bytes(packed.read_bytes()[:2000] + bytes(200) + packed.read_bytes()[2200:])
    with pytest.raises(SettingsError, match=r"bad\.npz: can't be read as \.npz"):
        read_images(packed, TASK)
    for head in (b"(%s,)" % (b"9" * 20), b"(2,", b"{[]: 1}"):
        np.savez(packed, images=np.zeros((200, 1, 28, 28)))
        shape = b"(200, 1, 28, 28), }"
        packed.write_bytes(packed.read_bytes().replace(shape, (head + b", }").ljust(len(shape))))
        with pytest.raises(SettingsError, match=r"bad\.npz: can't be read as \.npz"):
            read_images(packed, TASK)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(SettingsError, match=r"text\.npz: not an \.npz file"):
        read_images(tmp_path / "text.npz", TASK)
    with pytest.raises(SettingsError, match=r"text\.txt"):
        read_images(tmp_path / "text.txt", TASK)


def test_a_source_is_a_file_or_the_sub_generator_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert parse_source("images.npz", TASK).class_name == ""
    source = parse_source("shoe=a=b.safetensors", TASK)
    assert (source.class_name, source.path) == ("shoe", Path("a=b.safetensors"))
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [parse_source(text, TASK).path for text in ("~/images.npz", "shoe=~/of.safetensors")]
    assert paths == [tmp_path / "images.npz", tmp_path / "of.safetensors"], "no shell fills in the second"
    odd = tmp_path / "shoe=images.npz"
    odd.touch()
    assert parse_source(str(odd), TASK).class_name == ""
    with pytest.raises(SettingsError, match="unknown class 'sho'; did you mean 'shoe'"):
        parse_source("sho=x", TASK)
    with pytest.raises(SettingsError, match="no picture for a detector"):
        parse_source("car=x", DETECTOR)


def test_a_seed_fixes_latents_and_order():
    np.testing.assert_array_equal(latents((5,), 3, 7), latents((5,), 3, 7))
    assert not np.array_equal(latents((5,), 3, 7), latents((5,), 3, 8))
    order = shuffled(np.arange(20), 1)
    assert sorted(order) == list(range(20))
    assert order.tolist() != list(range(20))
    assert shares(7, 3) == [3, 2, 2]
