from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.scripts.experiments.sentence_features import encoder_of, read_texts, write_features

TEXTS = "sport\tthe ball went wide\nfood\tbread with butter\nsport\ta late goal\nfood\tsoup\n"


def letters(texts: list[str]) -> np.ndarray:
    """An encoder of its own kind: how often each letter stands in a text."""
    return np.array([[text.count(letter) / len(text) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_text(TEXTS)
    names, texts = read_texts(tmp_path / "train.tsv")
    encode = encoder_of(f"{__name__}:letters")
    assert write_features(tmp_path / "features", [("train", names, texts), ("test", names, texts)], encode) == (8, 26)
    return tmp_path


def test_texts_become_features_and_features_images_whose_pixels_are_their_entries(root: Path) -> None:
    data = load_dataset("features", data_root=root)
    assert (data.task.class_names, data.task.architecture, data.task.image_shape) == (
        ("food", "sport"),
        "linear",
        (1, 28, 28),
    )
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    expected = letters([line.partition("\t")[2] for line in TEXTS.splitlines()])
    pixels = np.asarray(data.train.images).reshape(4, -1)[:, :26] / 127.5 - 1
    np.testing.assert_allclose(pixels * expected.max(), expected, atol=expected.max() / 127)
    assert set(np.asarray(data.train.images).reshape(4, -1)[:, 26:].ravel().tolist()) == {128}


def test_arrays_of_their_own_will_do(root: Path) -> None:
    folder, expected = root / "features", load_dataset("features", data_root=root)
    for part in ("train", "test"):
        with np.load(folder / f"{part}.npz") as found:
            for name in ("features", "labels"):
                np.save(folder / f"{part}-{name}.npy", found[name])
        (folder / f"{part}.npz").unlink()
    assert np.array_equal(load_dataset("features", data_root=root).test.images, expected.test.images)


def test_classes_as_notepad_writes_them_have_their_names(root: Path) -> None:
    (root / "features" / "classes.txt").write_bytes(b"\xef\xbb\xbffood\r\nsport\r\n")
    assert load_dataset("features", data_root=root).task.class_names == ("food", "sport")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("classes.txt", "food\n", "labels in .* are 0 to 1, but classes.txt names 1 from 0"),
        ("train.npz", "none", "can't be read"),
        ("classes.txt", None, "can't be read"),
    ],
)
def test_what_is_missing_or_wrong_is_said(root: Path, file: str, content: str | None, words: str) -> None:
    path = root / "features" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=words):
        load_dataset("features", data_root=root)


@pytest.mark.parametrize("damage", ["half", "other bits", "another compression"])
def test_a_file_that_did_not_come_whole_is_said(root: Path, damage: str) -> None:
    path = root / "features" / "test.npz"
    data = path.read_bytes()
    head = data.index(b"PK\x01\x02")  # of the first array in the list at the end, which says how it is compressed
    path.write_bytes(
        {
            "half": data[: len(data) // 2],
            "other bits": data[:60] + bytes(byte ^ 0x55 for byte in data[60:99]) + data[99:],
            "another compression": data[: head + 10] + b"\x63" + data[head + 11 :],
        }[damage]
    )
    with pytest.raises(SettingsError, match="can't be read"):
        load_dataset("features", data_root=root)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (np.full((2, 3), np.nan), "expected finite"),
        (np.zeros((2, 800)), "have 800 entries, 28 x 28 pixels hold fewer: 4096 at most, with --image-size 64"),
        (np.zeros((2, 3, 4)), "expected finite"),
        (np.zeros((2, 0)), "expected finite"),
    ],
)
def test_vectors_that_are_none_are_refused(root: Path, train: np.ndarray, words: str) -> None:
    np.savez(root / "features" / "train.npz", features=train, labels=np.array([0, 1]))
    width = train.shape[1] if train.ndim == 2 else 3
    np.savez(root / "features" / "test.npz", features=np.zeros((2, width)), labels=np.array([0, 1]))
    with pytest.raises(SettingsError, match=words):
        load_dataset("features", data_root=root)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.0, 0.7], "a label of train is no whole number"),
        ([0.0, np.nan], "a label of train is no whole number"),
        ([0, -1], "train labels in .* are -1 to 0, but classes.txt names 2 from 0"),
    ],
)
def test_labels_that_are_none_are_refused(root: Path, labels: list[float], words: str) -> None:
    np.savez(root / "features" / "train.npz", features=np.zeros((2, 26)), labels=np.array(labels))
    with pytest.raises(SettingsError, match=words):
        load_dataset("features", data_root=root)


def test_labels_may_be_whole_numbers_with_a_point(root: Path) -> None:
    np.savez(root / "features" / "train.npz", features=np.zeros((2, 26)), labels=np.array([1.0, 0.0]))
    assert load_dataset("features", data_root=root).train.labels.tolist() == [1, 0]


def test_one_array_under_the_name_of_both_is_refused(root: Path) -> None:
    with (root / "features" / "train.npz").open("wb") as file:
        np.save(file, np.zeros((2, 26)))
    with pytest.raises(SettingsError, match="can't be read"):
        load_dataset("features", data_root=root)


@pytest.mark.parametrize(
    "shape", [b"(9999999999999,), }", b"(2,),              ", b"(%s,), }" % (b"9" * 20), b"(2,), }\n  x\n y\n"]
)
def test_an_array_whose_head_is_damaged_is_refused(root: Path, shape: bytes) -> None:
    folder = root / "features"
    for name in ("features", "labels"):
        np.save(folder / f"train-{name}.npy", np.zeros(2))
    whole = (folder / "train-features.npy").read_bytes()
    (folder / "train-features.npy").write_bytes(whole.replace(b"(2,), }".ljust(len(shape)), shape))
    (folder / "train.npz").unlink()
    with pytest.raises(SettingsError, match="can't be read"):
        load_dataset("features", data_root=root)


def test_nothing_is_unpickled(root: Path) -> None:
    np.savez(root / "features" / "train.npz", features=np.array([{}], dtype=object), labels=np.array([0]))
    with pytest.raises(SettingsError, match="can't be read"):
        load_dataset("features", data_root=root)


@pytest.mark.parametrize("name", ["no_such_module:x", "math:pi", "math:nothing", "math"])
def test_an_encoder_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="encoder"):
        encoder_of(name)


def test_texts_as_notepad_writes_them_have_their_classes_and_their_ends(tmp_path: Path) -> None:
    texts = "\ufeffsport\ta goal\u2028and\ta late one\r\nfood\tsoup\x0cfood\tbread\r\n"
    (tmp_path / "x.tsv").write_bytes(texts.encode())
    names, found = read_texts(tmp_path / "x.tsv")
    assert names == ["sport", "food"]
    assert found == ["a goal\u2028and\ta late one", "soup\x0cfood\tbread"]


def test_a_text_without_a_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a text alone\n")
    with pytest.raises(SettingsError, match="text 1: expected a class's name, a tab and a text"):
        read_texts(tmp_path / "x.tsv")
