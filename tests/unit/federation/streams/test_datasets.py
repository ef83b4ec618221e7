from __future__ import annotations

import dataclasses
import gzip
import mmap
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from support.image_sets import (
    CIFAR_CLASSES,
    cifar_members,
    cifar_record,
    idx_bytes,
    picture,
    striped,
    write_cifar_binary,
    write_emnist,
    write_fashion_mnist,
    write_tree,
    write_zip,
)

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams import datasets
from replayfleet.federation.streams.datasets import DATASETS, load_dataset
from replayfleet.federation.streams.files import idx_sets, picture_files
from replayfleet.federation.streams.labelled_images import (
    LabelledImages,
    LazyImages,
    MappedImages,
    ShownImages,
    normalise,
)
from replayfleet.federation.streams.stream import Stream, StreamSettings


@pytest.fixture(autouse=True)
def _no_installed_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide what this machine has, so that every test finds only its own files."""
    monkeypatch.delenv(datasets.DATA_ROOT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("fashion-mnist", "fashion-mnist-turned"):
        monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], places=(), download=None))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("subfolder", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_from_idx_files(tmp_path: Path, packed: bool, subfolder: str):
    write_fashion_mnist(tmp_path / subfolder, packed=packed)
    found = load_dataset("fashion-mnist", data_root=tmp_path)
    assert found.train.images.shape == (60, 28, 28, 1)
    assert found.train.counts() == [6] * 10
    assert found.test.counts() == [2] * 10
    assert (found.train.images[:, 3, 5, 0] == 10 * found.train.labels).all()
    assert found.task.image_shape == (1, 28, 28)
    assert found.task.generator_width == 16


@pytest.mark.parametrize("packed", [True, False])
def test_large_images_lie_in_a_file_and_are_the_same(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fashion_mnist(tmp_path, packed=packed)
    in_memory = load_dataset("fashion-mnist", data_root=tmp_path).train.images
    monkeypatch.setattr(idx_sets, "_PIECE_BYTES", 1000)
    mapped = load_dataset("fashion-mnist", data_root=tmp_path).train.images
    assert isinstance(in_memory, np.ndarray)
    assert isinstance(mapped, MappedImages)
    assert np.array_equal(in_memory[[3, 1]], mapped[np.array([3, 1])])
    assert np.array_equal(in_memory, mapped[:])


def test_images_that_were_taken_from_a_file_are_out_of_this_process_s_memory_again(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pixels = np.frombuffer(mapping, np.uint8).reshape(-1, 16, 16, 1)
    images = MappedImages(mapping, pixels)
    assert pixels.any()
    assert _resident_kb(path) > 0
    assert images[np.array([4095])].tobytes() == bytes(range(256))
    assert _resident_kb(path) == 0


def _resident_kb(path: Path) -> int:
    """Return how much of a mapped file is in this process's memory."""
    _, _, entry = Path("/proc/self/smaps").read_text().partition(f" {path}\n")
    return int(entry.split("Rss:")[1].split()[0])


def test_the_environment_names_a_folder_and_an_argument_goes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_fashion_mnist(tmp_path / "env", train_per_class=1)
    write_fashion_mnist(tmp_path / "own", train_per_class=3)
    monkeypatch.setenv(datasets.DATA_ROOT_VARIABLE, str(tmp_path / "env"))
    assert len(load_dataset("fashion-mnist").train.labels) == 10
    assert len(load_dataset("fashion-mnist", data_root=tmp_path / "own").train.labels) == 30
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(datasets.DATA_ROOT_VARIABLE, "~/env")  # of a unit or an .env file, where no shell fills it in
    assert len(load_dataset("fashion-mnist").train.labels) == 10


def test_a_set_that_is_nowhere_is_refused_with_how_to_get_it(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"not found .*apt install dataset-fashion-mnist"):
        load_dataset("fashion-mnist", data_root=tmp_path)


def test_a_data_root_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match="is no folder"):
        load_dataset("fashion-mnist", data_root=tmp_path / "absent")


def test_a_download_is_made_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fetched = []

    def download(root: Path) -> None:
        fetched.append(root)
        write_fashion_mnist(root)

    monkeypatch.setitem(DATASETS, "fashion-mnist", dataclasses.replace(DATASETS["fashion-mnist"], download=download))
    with pytest.raises(SettingsError, match="not found"):
        load_dataset("fashion-mnist")
    assert not fetched
    assert load_dataset("fashion-mnist", download=True).train.counts() == [6] * 10
    assert fetched == [tmp_path / "cache" / "replayfleet" / "data"]


@pytest.mark.parametrize("error", [RuntimeError("no home directory"), PermissionError(13, "/root is root's")])
def test_a_user_without_a_home_is_told_how_to_get_a_set(error: Exception, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=error))
    monkeypatch.setitem(DATASETS, "fashion-mnist", dataclasses.replace(DATASETS["fashion-mnist"], download=pytest.fail))
    for download, words in ((False, r"\(--download"), (True, "no folder to download fashion-mnist into")):
        with pytest.raises(SettingsError, match=f"{words}.*--data-root"):
            load_dataset("fashion-mnist", download=download)


def test_an_unknown_set_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match="did you mean 'cifar-10'"):
        load_dataset("cifar10")


def test_an_image_size_that_a_set_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match="has images of 28 pixels, not 64"):
        load_dataset("fashion-mnist", data_root=tmp_path, image_size=64)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[: len(data) // 2], "damaged or unreadable"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1]), "promises 47040 bytes, it has only 47039"),
        (lambda data: gzip.compress(gzip.decompress(data) + b"x"), "promises 47040 bytes, it has more"),
        (lambda _: gzip.compress(b"\0\0\x08\x01" + bytes(20)), "begins with 00000801, expected 00000803"),
        (lambda _: b"no gzip at all", "damaged or unreadable"),
        (lambda _: gzip.compress(b""), "begins with nothing"),
        (lambda _: gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12), "claims"),
        (lambda _: gzip.compress(idx_bytes(np.zeros((60, 32, 32)))), r"expected \(N, 28, 28\)"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1 << 20, 1000])
def test_a_damaged_idx_file_is_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], complaint: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(idx_sets, "_PIECE_BYTES", piece_bytes)
    write_fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SettingsError, match=complaint) as caught:
        load_dataset("fashion-mnist", data_root=tmp_path)
    assert str(path) in str(caught.value)


def test_a_missing_idx_file_is_refused_by_name(tmp_path: Path):
    write_fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(SettingsError, match=r"t10k-labels-idx1-ubyte\.gz"):
        load_dataset("fashion-mnist", data_root=tmp_path)


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path):
    write_fashion_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.full(60, 10))))
    with pytest.raises(SettingsError, match=r"train-labels.*labels must be 0 to 9"):
        load_dataset("fashion-mnist", data_root=tmp_path)


def test_cifar_10_is_read_in_place_from_a_zip_and_from_a_folder(tmp_path: Path):
    members = {path.replace(".jpg", ".JPG").replace(".png", ".PNG"): data for path, data in cifar_members().items()}
    write_zip(tmp_path / "cifar10-images.zip", members)
    write_tree(tmp_path / "unpacked", members)
    for root in (tmp_path, tmp_path / "unpacked"):
        found = load_dataset("cifar-10", data_root=root)
        assert found.train.class_names == CIFAR_CLASSES
        assert found.test.counts() == [2] * 10
        assert found.task.generator_width == 64
        red = found.train.images[np.arange(20)][:, 16, 16, 0].astype(int)
        assert np.abs(red - 10 * found.train.labels).max() <= 3


def test_what_file_managers_leave_beside_images_is_no_class_and_no_image(tmp_path: Path):
    members = cifar_members()
    littered = {
        **members,
        "__MACOSX/train/cat/._0.png": b"litter",
        "train/.git/0.png": b"litter",
        "test/.git/0.png": b"litter",
        "train/cat/._0.png": b"litter",
    }
    write_zip(tmp_path / "cifar10-images.zip", littered)
    write_tree(tmp_path / "unpacked", littered)
    for root in (tmp_path, tmp_path / "unpacked"):
        found = load_dataset("cifar-10", data_root=root)
        assert found.train.class_names == CIFAR_CLASSES
        found.train.images[np.arange(20)]
        assert len(found.train.labels) == 20


def test_names_of_image_folders_need_be_no_utf_8(tmp_path: Path):
    for name in (b"caf\xe9", b"pub"):
        place = tmp_path / os.fsdecode(name)
        place.mkdir()
        for number in range(7):
            (place / f"{number}.png").write_bytes(next(iter(cifar_members().values())))
    found = load_dataset("folder", data_root=tmp_path)
    assert found.train.counts() == [6, 6]
    assert found.task.class_names == ("caf\\xe9", "pub")


def test_a_folder_whose_name_turns_text_around_is_no_class(tmp_path: Path):
    for name in ("ca\u202er", "pub"):
        place = tmp_path / name
        place.mkdir()
        for number in range(7):
            (place / f"{number}.png").write_bytes(next(iter(cifar_members().values())))
    with pytest.raises(
        SettingsError, match=r"data set folder: a class is named 'ca\\u202er', expected .* marks that turn it"
    ):
        load_dataset("folder", data_root=tmp_path)


def test_cifar_10_is_read_from_its_binary_version(tmp_path: Path):
    names = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
    files = {name: cifar_record(place) for place, name in enumerate(names)}
    write_cifar_binary(tmp_path / "cifar-10-binary.tar.gz", files)
    write_tree(tmp_path / "unpacked" / "cifar-10-batches-bin", files)
    for root in (tmp_path, tmp_path / "unpacked"):
        found = load_dataset("cifar-10", data_root=root)
        assert found.train.labels.tolist() == [0, 1, 2, 3, 4]
        assert found.test.labels.tolist() == [5]
        assert found.test.images[0, 31, 0].tolist() == [1, 2, 3]
        assert found.test.images[0, 0, 31].tolist() == [9, 2, 3]


def test_cifar_100_is_read_from_its_binary_version_by_its_fine_labels(tmp_path: Path):
    files = {"train.bin": cifar_record(19, 11) + cifar_record(0, 99), "test.bin": cifar_record(1, 0)}
    write_cifar_binary(tmp_path / "cifar-100-binary.tar.gz", files | {"fine_label_names.txt": b"apple"})
    write_tree(tmp_path / "unpacked" / "cifar-100-binary", files)
    for root in (tmp_path, tmp_path / "unpacked"):
        found = load_dataset("cifar-100", data_root=root)
        assert [found.train.class_names[label] for label in found.train.labels] == ["boy", "worm"]
        assert [found.test.class_names[label] for label in found.test.labels] == ["apple"]
        assert found.train.images[1, 0, 31].tolist() == [9, 2, 3]
        assert found.train.images[1, 1, 0].tolist() == [1, 2, 3]
        assert (found.task.num_classes, found.task.image_shape, found.task.generator_width) == (100, (3, 32, 32), 64)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"train.bin": cifar_record(0, 0)}, r"lacks test\.bin; expected CIFAR-100's binary version"),
        ({"train.bin": cifar_record(0, 0)[:-1], "test.bin": cifar_record(0, 0)}, "3073 bytes are no whole number"),
        ({"train.bin": b"", "test.bin": cifar_record(0, 0)}, "0 bytes are no whole number"),
        ({"train.bin": cifar_record(0, 100), "test.bin": cifar_record(0, 0)}, "labels must be 0 to 99, got 100 to 100"),
    ],
)
def test_damaged_files_of_cifar_100_are_refused(tmp_path: Path, files: dict[str, bytes], complaint: str):
    write_tree(tmp_path / "cifar-100-binary", files)
    with pytest.raises(SettingsError, match=complaint):
        load_dataset("cifar-100", data_root=tmp_path)
    write_cifar_binary(tmp_path / "packed.tar.gz", files)
    (tmp_path / "other").mkdir()
    (tmp_path / "packed.tar.gz").rename(tmp_path / "other" / "cifar-100-binary.tar.gz")
    with pytest.raises(SettingsError, match=complaint):
        load_dataset("cifar-100", data_root=tmp_path / "other")


@pytest.mark.parametrize("subfolder", [".", "emnist", "gzip", "EMNIST/raw"])
def test_emnist_is_read_upright_with_digits_then_upper_then_lower_letters(tmp_path: Path, subfolder: str):
    write_emnist(tmp_path / subfolder, {"train": [0, 10, 36, 61, 61], "test": [9, 35]})
    found = load_dataset("emnist-byclass", data_root=tmp_path)
    assert "".join(found.train.class_names[label] for label in found.train.labels) == "0Aazz"
    assert "".join(found.test.class_names[label] for label in found.test.labels) == "9Z"
    image = found.train.images[np.array([1])][0, :, :, 0]
    assert (image[:, 0] == 9).all()
    assert not image[:, 1:].any()
    assert (found.task.num_classes, found.task.image_shape, found.task.generator_width) == (62, (1, 28, 28), 16)


def test_a_stream_over_imbalanced_classes_takes_equally_many_samples_of_each(tmp_path: Path):
    train = [label for label in range(62) for _ in range(4 + 7 * (label % 3))]
    test = [label for label in range(62) for _ in range(3 + label % 4)]
    write_emnist(tmp_path, {"train": train, "test": test})
    found = load_dataset("emnist-byclass", data_root=tmp_path)
    wanted = StreamSettings(scenario="extreme", num_clients=2, samples_per_class=4, test_samples_per_class=3)
    stream = Stream(wanted, found.train.labels, found.test.labels, found.task.num_classes)
    assert stream.num_rounds == 31
    met = np.concatenate([stream.train_indices(1, index) for index in range(31)])
    assert np.bincount(found.train.labels[met]).tolist() == [4] * 62
    assert np.bincount(found.test.labels[stream.test_indices(1, 30)]).tolist() == [3] * 62


def test_torchvision_fetches_the_split_of_emnist_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Fetching:
        def __init__(self, root: str, *, split: str, download: bool) -> None:
            assert (split, download) == ("byclass", True)
            write_emnist(Path(root) / "EMNIST" / "raw", {"train": [0, 1], "test": [2]})

    monkeypatch.setitem(sys.modules, "torchvision.datasets", types.SimpleNamespace(EMNIST=Fetching))
    assert load_dataset("emnist-byclass", data_root=tmp_path, download=True).test.labels.tolist() == [2]


def imagenet_members(num_classes: int, per_class: int) -> dict[str, bytes]:
    """Return ``n<class>/n<class>_<number>.JPEG``; red is ten times the class, green twice the number."""
    return {
        f"n{c:02}/n{c:02}_{number:03}.JPEG": picture((10 * c, 2 * number, 0), 48, "jpg")
        for c in range(num_classes)
        for number in range(per_class)
    }


@pytest.mark.parametrize("subfolder", ["", "train"])
def test_imagenet_10_gives_the_first_ten_thirteenths_of_a_class_to_training(tmp_path: Path, subfolder: str):
    write_tree(tmp_path / "imagenet-10" / subfolder, imagenet_members(10, 13))
    found = load_dataset("imagenet-10", data_root=tmp_path)
    assert found.task.class_names == tuple(f"n{c:02}" for c in range(10))
    assert (found.task.stem, found.task.image_shape, found.task.generator_width) == ("imagenet", (3, 64, 64), 128)
    assert found.train.counts() == [10] * 10
    assert found.test.counts() == [3] * 10
    pixels = found.test.images[np.array([4])][0, 32, 32].astype(int)
    assert np.abs(pixels - [10, 22, 0]).max() <= 4


def test_imagenet_10_takes_a_thousand_training_and_three_hundred_test_images_a_class(tmp_path: Path):
    for class_number in range(10):
        folder = tmp_path / "imagenet-10" / f"n{class_number}"
        folder.mkdir(parents=True)
        for number in range(1310 if class_number == 4 else 13):
            (folder / f"{number:04}.JPEG").touch()
    found = load_dataset("imagenet-10", data_root=tmp_path)
    assert found.train.counts()[4] == 1000
    assert found.test.counts()[4] == 300
    names = [Path(name).name for name in found.test.images.names[3 * 4 : 3 * 4 + 300]]
    assert (names[0], names[-1]) == ("1000.JPEG", "1299.JPEG")


def test_imagenet_10_with_other_than_ten_classes_is_refused(tmp_path: Path):
    write_tree(tmp_path / "imagenet-10", imagenet_members(9, 2))
    with pytest.raises(SettingsError, match="holds 9 classes of images, expected 10"):
        load_dataset("imagenet-10", data_root=tmp_path)


def test_a_class_of_imagenet_10_too_small_to_be_divided_is_refused(tmp_path: Path):
    write_tree(tmp_path / "imagenet-10", imagenet_members(10, 1))
    with pytest.raises(SettingsError, match="class 'n00' lacks train or test images"):
        load_dataset("imagenet-10", data_root=tmp_path)


def tiny_members(num_classes: int) -> dict[str, bytes]:
    """Return ``tiny-imagenet-200`` in small: blue of a training image is its class, of a validation image one more."""
    wnids = [f"n{c:08}" for c in range(num_classes)]
    trees = {f"train/{wnid}/images/{wnid}_0.JPEG": picture((0, 0, c), 64, "jpg") for c, wnid in enumerate(wnids)}
    trees |= {f"val/images/val_{c}.JPEG": picture((0, 0, 100), 64, "jpg") for c in range(num_classes)}
    notes = "".join(f"val_{c}.JPEG\t{wnid}\t0\t0\t62\t62\n" for c, wnid in enumerate(wnids))
    shuffled = [*wnids[50:], *wnids[:50]]
    trees |= {"val/val_annotations.txt": notes.encode(), "wnids.txt": "\n".join(shuffled).encode()}
    return {f"tiny-imagenet-200/{name}": data for name, data in trees.items()}


def test_tinyimagenet_100_has_the_first_hundred_of_the_sorted_wordnet_ids(tmp_path: Path):
    write_tree(tmp_path, tiny_members(103))
    found = load_dataset("tinyimagenet-100", data_root=tmp_path)
    assert found.task.class_names == tuple(f"n{c:08}" for c in range(100))
    assert (found.task.stem, found.task.image_shape, found.task.generator_width) == ("imagenet", (3, 64, 64), 128)
    assert found.train.counts() == found.test.counts() == [1] * 100
    assert found.train.images.names[7].endswith("n00000007_0.JPEG")
    assert Path(found.test.images.names[7]).name == "val_7.JPEG"
    assert found.test.images[np.array([7])].shape == (1, 64, 64, 3)


@pytest.mark.parametrize(
    ("lost", "complaint"),
    [
        ("wnids.txt", r"wnids\.txt can't be read"),
        ("val/val_annotations.txt", r"val_annotations\.txt can't be read"),
        ("train/n00000042/images/n00000042_0.JPEG", "class 'n00000042' lacks train or test images"),
    ],
)
def test_a_tinyimagenet_without_one_of_its_files_is_refused(tmp_path: Path, lost: str, complaint: str):
    write_tree(tmp_path, tiny_members(100))
    (tmp_path / "tiny-imagenet-200" / lost).unlink()
    with pytest.raises(SettingsError, match=complaint):
        load_dataset("tinyimagenet-100", data_root=tmp_path)


def test_a_tinyimagenet_of_too_few_classes_is_refused(tmp_path: Path):
    write_tree(tmp_path, tiny_members(99))
    with pytest.raises(SettingsError, match="names 99 classes, expected at least 100"):
        load_dataset("tinyimagenet-100", data_root=tmp_path)


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_says_how_to_get_it(tmp_path: Path, name: str):
    with pytest.raises(SettingsError, match=r"not found .*--data-root"):
        load_dataset(name, data_root=tmp_path)


def test_a_binary_version_that_lacks_a_file_is_refused(tmp_path: Path):
    write_cifar_binary(tmp_path / "cifar-10-binary.tar.gz", {"data_batch_1.bin": cifar_record(3)})
    with pytest.raises(SettingsError, match=r"lacks data_batch_2\.bin"):
        load_dataset("cifar-10", data_root=tmp_path)


def test_a_truncated_archive_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "cifar10-images.zip"
    write_zip(path, cifar_members())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SettingsError, match=r"cifar10-images\.zip is damaged or truncated"):
        load_dataset("cifar-10", data_root=tmp_path)


def test_a_damaged_member_is_refused_by_name_when_it_is_needed(tmp_path: Path):
    path = tmp_path / "cifar10-images.zip"
    members = cifar_members()
    write_zip(path, members)
    victim = members["cifar10/train/airplane/0000.jpg"]
    path.write_bytes(path.read_bytes().replace(victim, bytes(len(victim)), 1))
    found = load_dataset("cifar-10", data_root=tmp_path)
    found.train.images[np.array([1])]
    with pytest.raises(SettingsError, match=r"airplane/0000\.jpg in .*can't be read"):
        found.train.images[np.array([0])]


@pytest.mark.parametrize(("at", "byte", "words"), [(6, 99, "damaged or truncated"), (8, 1, "can't be read .*password")])
def test_an_archive_with_a_password_or_of_a_later_kind_is_refused(tmp_path: Path, at: int, byte: int, words: str):
    path = tmp_path / "cifar10-images.zip"
    write_zip(path, cifar_members())
    first, *others = path.read_bytes().split(b"PK\x01\x02")  # what stands at the end of each member
    path.write_bytes(b"PK\x01\x02".join((first, *(one[: at - 4] + bytes([byte]) + one[at - 3 :] for one in others))))
    with pytest.raises(SettingsError, match=words):
        load_dataset("cifar-10", data_root=tmp_path).train.images[np.array([0])]


def test_cifar_10_with_other_classes_is_refused(tmp_path: Path):
    members = {name.replace("/cat/", "/lion/"): data for name, data in cifar_members().items()}
    write_zip(tmp_path / "cifar10-images.zip", members)
    with pytest.raises(SettingsError, match="lion"):
        load_dataset("cifar-10", data_root=tmp_path)


def test_an_image_folder_has_its_classes_in_the_order_of_their_names(tmp_path: Path):
    members = {f"{part}/{name}/1.png": picture((200, 100, 50)) for part in ("train", "test") for name in ("b", "a")}
    write_tree(tmp_path, members | {"train/a/notes.txt": b"no image"})
    found = load_dataset("folder", data_root=tmp_path)
    assert found.task.class_names == ("a", "b")
    assert found.train.counts() == found.test.counts() == [1, 1]
    assert found.train.images[np.array([1])][0, 0, 0].tolist() == [200, 100, 50]


def test_an_image_folder_without_parts_is_split_the_same_way_every_time(tmp_path: Path):
    write_tree(tmp_path, {f"{name}/{number}.png": picture((number, 0, 0)) for name in "ab" for number in range(12)})
    found, again = (load_dataset("folder", data_root=tmp_path) for _ in range(2))
    assert found.train.counts() == [10, 10]
    assert found.test.counts() == [2, 2]
    assert found.test.images.names == again.test.images.names
    assert not set(found.test.images.names) & set(found.train.images.names)


def test_a_class_may_be_called_train(tmp_path: Path):
    names = ("bus", "test", "train")
    write_tree(tmp_path, {f"{name}/{number}.png": picture((number, 0, 0)) for name in names for number in range(6)})
    found = load_dataset("folder", data_root=tmp_path)
    assert found.task.class_names == names
    assert [part.counts() for part in (found.train, found.test)] == [[5, 5, 5], [1, 1, 1]]


def test_what_is_no_picture_of_a_folder_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    whole = {f"{name}/{number}.png": picture((number, 0, 0)) for name in "ab" for number in range(6)}
    write_tree(tmp_path, whole | {"a/6.png": b"no picture", "b/6.png": picture((0, 0, 0), suffix="jpg")[:-20]})
    cv2.imwrite(str(tmp_path / "b" / "7.png"), np.zeros((1, 9000, 3), np.uint8))
    found = load_dataset("folder", data_root=tmp_path)
    assert [part.counts() for part in (found.train, found.test)] == [[5, 5], [1, 1]]
    found.train.images[np.arange(10)]
    (told,) = caplog.records
    fields = told.fields  # type: ignore[attr-defined]
    assert (fields["num"], fields["first"].name) == (3, "6.png")
    assert fields["reason"] == "damaged: 10 bytes that are no complete PNG or JPEG"


def test_what_has_another_ending_or_lies_deeper_in_a_folder_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    whole = {f"{name}/{number}.png": picture((number, 0, 0)) for name in "ab" for number in range(6)}
    write_tree(tmp_path, whole | {"a/6.tif": b"a scan", "c/0.webp": b"from the web", "d/sub/0.png": b"", "a/.7": b""})
    assert load_dataset("folder", data_root=tmp_path).task.class_names == ("a", "b")
    (told,) = caplog.records
    fields = told.fields  # type: ignore[attr-defined]
    assert told.getMessage().startswith("files passed over")
    assert (fields["num"], fields["first"].name) == (3, "6.tif")
    assert fields["reason"] == "named neither .png, .jpg nor .jpeg"


def test_images_of_other_sizes_are_resized_to_the_task_s(tmp_path: Path):
    write_tree(tmp_path, {f"{name}/{size}.png": picture((9, 8, 7), size) for name in "ab" for size in (16, 64, 128)})
    found = load_dataset("folder", data_root=tmp_path, image_size=64)
    assert found.task.stem == "imagenet"
    images = found.train.images[np.arange(len(found.train.labels))]
    assert images.shape[1:] == (64, 64, 3)
    assert (images == np.array([9, 8, 7])).all()


def test_two_class_folders_whose_names_look_alike_are_refused(tmp_path: Path):
    """A folder that a Mac has copied may be called so beside one of the same name."""
    names = [f"{name}/{n}.png" for name in ("caf\u00e9", "cafe\u0301") for n in range(2)]
    write_tree(tmp_path, {name: picture((0, 0, 0)) for name in names})
    with pytest.raises(SettingsError, match=r"named 'cafe\\u0301' and 'caf\\xe9', which look alike"):
        load_dataset("folder", data_root=tmp_path)


def test_a_class_without_test_images_is_refused(tmp_path: Path):
    write_tree(tmp_path, {f"{name}/1.png": picture((0, 0, 0)) for name in ("train/a", "train/b", "test/a")})
    with pytest.raises(SettingsError, match="class 'b' lacks train or test images"):
        load_dataset("folder", data_root=tmp_path)


def test_a_folder_with_one_class_is_refused(tmp_path: Path):
    write_tree(tmp_path, {f"only/{number}.png": picture((0, 0, 0)) for number in range(3)})
    with pytest.raises(SettingsError, match="holds 1 classes"):
        load_dataset("folder", data_root=tmp_path)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, 0.99])
def test_a_truncated_image_is_refused(suffix: str, keep: float):
    noise = np.random.default_rng(0).integers(0, 255, 3).tolist()
    whole = picture(tuple(noise), size=200, suffix=suffix)
    part = whole[: int(keep * len(whole)) if isinstance(keep, float) else keep]
    assert picture_files.decode(whole, "x", 32, 3).shape == (32, 32, 3)
    with pytest.raises(SettingsError, match="image pic is damaged"):
        picture_files.decode(part, "pic", 32, 3)


def test_a_grey_image_is_its_luminance_and_a_coloured_one_red_green_blue():
    encoded = picture((250, 130, 10), 70)
    grey, coloured = (picture_files.decode(encoded, "x", 28, channels) for channels in (1, 3))
    assert (grey.shape, coloured.shape) == ((28, 28, 1), (28, 28, 3))
    assert np.abs(coloured.astype(int) - [250, 130, 10]).max() <= 1
    assert np.abs(grey.astype(int) - (0.299 * 250 + 0.587 * 130 + 0.114 * 10)).max() <= 1


def test_an_oblong_image_is_squeezed_or_cut_to_its_middle():
    squeezed = picture_files.decode(striped(), "x", 8, 3)
    assert (squeezed[:, :2] == [255, 0, 0]).all()
    assert (squeezed[:, 6:] == [0, 0, 255]).all()
    for size in (20, 10, 32):
        assert (picture_files.decode(striped(), "x", size, 3, crop=True) == [0, 255, 0]).all()


def test_without_a_decoder_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SettingsError, match="pip install opencv-python"):
        picture_files.decode(picture((0, 0, 0)), "x", 32, 3)


def test_an_image_is_decoded_once_and_only_when_it_is_needed():
    reads = []

    def read(index: int) -> bytes:
        reads.append(index)
        return picture((index, 0, 0))

    images = picture_files.encoded_images(["a", "b", "c"], read, 32, 3)
    assert reads == []
    assert images[np.array([2, 1, 2])][:, 0, 0, 0].tolist() == [2, 1, 2]
    assert sorted(set(reads)) == [1, 2]
    images[np.array([1, 2])]
    assert sorted(reads) == [1, 2]


def test_pixels_become_channels_first_from_minus_one_to_one():
    images = np.zeros((2, 2, 3, 3), dtype=np.uint8)
    images[1, 0, 2, 1] = 255
    images[1, 1, 0, 2] = 51
    out = normalise(images)
    assert out.shape == (2, 3, 2, 3)
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    assert out[1, 1, 0, 2] == 1
    assert out[1, 2, 1, 0] == pytest.approx(-0.6)
    assert out[0].tolist() == np.full((3, 2, 3), -1).tolist()


def test_a_batch_of_another_type_is_refused_instead_of_learned_from_at_another_scale():
    class Changing(LazyImages):
        def __getitem__(self, indices):  # noqa: ANN001, ANN204
            return np.ones((len(indices), 2, 2, 1), np.uint8 if len(indices) == 1 else np.float64)

    images = Changing((4, 2, 2, 1), lambda row: ())
    for told in (images, ShownImages(images, (lambda shown: shown.astype(np.uint8),))):
        assert normalise(told[np.array([0])]).shape == (1, 1, 2, 2)
        with pytest.raises(SettingsError, match="a batch of 2 images is float64, expected uint8"):
            normalise(told[np.array([0, 1])])


def test_labels_that_no_class_has_are_refused():
    with pytest.raises(ValueError, match="labels must be 0 to 1"):
        LabelledImages(np.zeros((1, 2, 2, 1), np.uint8), np.array([2]), ("a", "b"))


def test_devices_can_read_sets_and_streams_without_torch():
    code = (
        "import sys\nfrom replayfleet.federation.streams import datasets, stream\n"
        "from replayfleet.federation.simulator.measures import metrics\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
