from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.scripts.experiments.super_imagenet import VERSIONS, Version, link, neighbours, read_groups

WNIDS = [f"n0{number}" for number in range(10, 19)]


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Nine classes of six images, each of a brightness of its own; three are small."""
    folder = tmp_path / "imagenet"
    for place, wnid in enumerate(WNIDS):
        (folder / "train" / wnid).mkdir(parents=True)
        for number in range(3 if place % 3 == 2 else 6):
            pixels = np.full((8, 9, 3), 10 * place + number, np.uint8)
            assert cv2.imwrite(str(folder / "train" / wnid / f"{wnid}_{number}.png"), pixels)
    return folder


def test_the_paper_has_three_versions_and_as_few_classes_in_each_as_suffice():
    for name, classes, images in (("S", 100, 2500), ("M", 75, 5000), ("L", 50, 7500)):
        version = VERSIONS[name]
        assert (version.num_classes, version.num_images) == (classes, images)
        assert (version.num_merged - 1) * 1300 < images <= version.num_merged * 1300
        assert len(neighbours([f"n{i:08}" for i in range(1000)], version)) == classes


def test_neighbours_are_merged_and_runs_of_them_taken_evenly():
    groups = neighbours(WNIDS[::-1], Version(2, 4, 2))
    assert groups == {"n010-and-1": ["n010", "n011"], "n014-and-1": ["n014", "n015"]}
    with pytest.raises(SettingsError, match="9 classes make 4 groups of 2, expected 5 or more"):
        neighbours(WNIDS, Version(5, 4, 2))


def test_merged_classes_are_a_data_set_with_equally_many_images_each(imagenet: Path, tmp_path: Path):
    out = tmp_path / "super"
    counts = link(imagenet, out, neighbours(WNIDS, Version(4, 5, 2)), 5)
    assert set(counts.values()) == {(5, 1)}
    data = load_dataset("folder", data_root=out, image_size=32)
    assert data.train.counts() == [5] * 4
    assert data.test.counts() == [1] * 4
    shown = {int(image.mean()) for image in data.train.images[np.flatnonzero(data.train.labels == 0)]}
    assert shown == {0, 1, 2, 10, 11}, "of both its classes in turn"
    assert not {path.resolve() for path in out.glob("train/*/*")} & {path.resolve() for path in out.glob("test/*/*")}


def test_images_for_tests_are_those_of_the_validation_part_where_it_is_there(imagenet: Path, tmp_path: Path):
    (imagenet / "val").mkdir()
    for wnid in WNIDS:
        (imagenet / "val" / wnid).symlink_to(imagenet / "train" / wnid)
    assert link(imagenet, tmp_path / "super", {"fish": WNIDS[:2]}, 8) == {"fish": (8, 12)}


@pytest.mark.parametrize(
    ("groups", "num_images", "words"),
    [
        ({"fish": ["n010", "n099"]}, 4, "has no images of n099, which fish is to have"),
        ({"fish": ["n010", "n012"]}, 10, "fish has 9 images, expected 10 or more"),
        ({"fish": ["n010"]}, 6, "fish has no images left for tests"),
    ],
)
def test_what_cant_be_merged_is_said_before_anything_is_linked(
    imagenet: Path, tmp_path: Path, groups: dict[str, list[str]], num_images: int, words: str
):
    with pytest.raises(SettingsError, match=words):
        link(imagenet, tmp_path / "super", groups, num_images)
    assert not (tmp_path / "super").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("fish\n", "line 1"), ("fish\tn01\nfish\tn02", "line 2"), ("fish\tn01 n02\nbird\tn02", "n02 is in two")],
)
def test_groups_of_an_operator_are_checked(tmp_path: Path, text: str, words: str):
    (tmp_path / "groups").write_text("\ufeffdog\tn08 n09\n")  # as Notepad writes it
    assert read_groups(tmp_path / "groups") == {"dog": ["n08", "n09"]}
    (tmp_path / "groups").write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_groups(tmp_path / "groups")
