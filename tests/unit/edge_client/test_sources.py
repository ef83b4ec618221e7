from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from replayfleet.edge_client.cameras.recorded.scene import SceneCamera
from replayfleet.edge_client.cameras.uri import DatasetUri, FolderUri, parse_source
from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.learning.folder_samples import FolderSamples, decode_image
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.errors import SettingsError
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, ("cat", "dog"))


def test_a_dataset_uri_is_read_with_types_and_defaults() -> None:
    text = "dataset://fashion-mnist?scenario=circulating&clients=3&client=2&rounds=6&samples=50&seed=7&rate=2.5"
    assert parse_source(text) == DatasetUri("fashion-mnist", "circulating", 3, 2, 6, 50, 7, 2.5)
    assert parse_source("dataset://cifar-10") == DatasetUri("cifar-10")


def test_a_folder_uri_keeps_absolute_relative_and_escaped_paths() -> None:
    assert parse_source("folder:///srv/a%20b?per_round=8&rate=1") == FolderUri(Path("/srv/a b"), 8, 1.0)
    assert parse_source("folder://images/new") == FolderUri(Path("images/new"))
    assert parse_source("folder:///srv/50%25 of #3?rate=1") == FolderUri(Path("/srv/50% of #3"), rate=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fashion-mnist", "is not a URI"),
        ("datasett://x", "unknown source scheme 'datasett'; did you mean 'dataset'"),
        ("dataset://", "names no dataset"),
        ("dataset://x?scenaro=gradual", "unknown key 'scenaro'; did you mean 'scenario'"),
        ("dataset://x?dataset=y", "unknown key 'dataset'"),
        ("dataset://x?clients=three", "clients is 'three', expected a whole number"),
        ("dataset://x?clients=2&client=2", "client is 2, expected 0 to 1"),
        ("dataset://x?rounds=0", "rounds is '0', expected a whole number, at least 1"),
        ("dataset://x?rate=nan", "rate is 'nan'"),
        ("folder:///x?rate=0", "rate is '0', expected a number, more than 0"),
        ("folder:///x?per_round=0", "per_round is '0'"),
        ("folder:///x?per_round", "expected key=value"),
    ],
)
def test_a_bad_source_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_source(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class FakeTime:
    """A clock that its own ``wait`` moves, in place of a ``threading.Event``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stopped = False

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.stopped


def test_frames_come_at_the_rate_and_a_slow_consumer_makes_them_skip_not_queue() -> None:
    scene = np.zeros((3, 1, 1, 3), np.uint8)
    time = FakeTime()
    camera = SceneCamera(10.0, time.clock)
    camera.show(scene)
    frames = camera.pictures(time)  # type: ignore[arg-type]
    seen = [next(frames) for _ in range(3)]
    assert [frame.frame_id for frame in seen] == [0, 1, 2]
    assert [round(frame.captured_at, 6) for frame in seen] == [100.0, 100.1, 100.2]
    time.now += 1.0  # the consumer slept
    assert [next(frames).frame_id for _ in range(2)] == [12, 13]
    time.stopped = True
    assert list(frames) == []


def test_samples_of_the_wrong_type_or_length_do_not_exist() -> None:
    good = np.zeros((2, 1, 28, 28), np.float32)
    with pytest.raises(ValueError, match="float32"):
        Samples(good.astype(np.float64), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="labels must be"):
        Samples(good, np.zeros(3, np.int64))


def _put(folder: Path, name: str, value: int, side: int = 28) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    ok, encoded = cv2.imencode(".png", np.full((side, side), value, np.uint8))
    assert ok
    file.write_bytes(encoded.tobytes())


def test_a_decoded_image_spans_minus_one_to_one_and_has_the_tasks_size() -> None:
    ok, encoded = cv2.imencode(".png", np.array([[0, 255]] * 2, np.uint8))
    assert ok
    image = decode_image(encoded.tobytes(), TASK)
    assert (image.shape, image.dtype) == ((1, 28, 28), np.float32)
    assert (float(image.min()), float(image.max())) == (-1.0, 1.0)
    red = np.zeros((64, 64, 3), np.uint8)
    red[:, :, 2] = 255  # OpenCV's order is BGR
    ok, encoded = cv2.imencode(".png", red)
    colour = decode_image(encoded.tobytes(), TaskSpec(3, 32, ("a", "b")))
    assert colour[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    huge = bytearray(encoded.tobytes())
    huge[16:20] = (8193).to_bytes(4, "big")  # its head claims that it is so wide
    damaged = "damaged: {} bytes that are no complete PNG or JPEG"
    too_large = "too large: 8193 x 64 pixels; at most 8192 a side are read"
    for wrong, flaw in ((b"GIF89a", damaged), (encoded.tobytes()[:-20], damaged), (bytes(huge), too_large)):
        with pytest.raises(ValueError, match=f"^{flaw.format(len(wrong))}$"):
            decode_image(wrong, TASK)


def folder_samples(uri: FolderUri, ledger: Path) -> FolderSamples:
    return FolderSamples(uri, TASK, ledger, lambda pictures: None)


def test_every_image_of_a_folder_is_used_in_one_round_only(tmp_path: Path) -> None:
    images = tmp_path / "images"
    for index in range(5):
        _put(images, f"{'cat' if index % 2 else 'dog'}/{index}.png", index * 10)
    source = folder_samples(FolderUri(images, per_round=3), tmp_path / "ledger")

    def trained_on(round_index: int) -> Samples | None:
        samples = source.round_samples(round_index)
        source.used_up(round_index)
        return samples

    rounds = [trained_on(0), trained_on(1), trained_on(2)]
    assert [None if samples is None else len(samples) for samples in rounds] == [3, 2, None]
    values = [round(float(image.mean()), 4) for samples in rounds if samples for image in samples.images]
    assert len(set(values)) == 5
    _put(images, "dog/late.png", 200)
    assert source.round_samples(3) is None, "one trains no model"
    _put(images, "cat/later.png", 220)
    late = source.round_samples(3)
    assert late.labels.tolist() == [1, 0]


def test_a_restarted_folder_source_repeats_the_begun_round_and_none_that_was_trained(tmp_path: Path) -> None:
    images = tmp_path / "images"
    for index in range(6):
        _put(images, f"cat/{index}.png", index * 10)

    def restarted(round_index: int, *, trains: bool) -> list[float]:
        source = folder_samples(FolderUri(images, per_round=2), tmp_path / "ledger")
        samples = source.round_samples(round_index)
        if trains:
            source.used_up(round_index)
        return [] if samples is None else [round(float(image.mean()), 4) for image in samples.images]

    first = restarted(7, trains=False)
    assert restarted(7, trains=True) == first
    passed = restarted(8, trains=False)
    assert not set(passed) & set(first)
    assert restarted(9, trains=True) == passed, "what a round had that passed without learning from it"
    assert restarted(7, trains=True) == first, "a fleet that was restored repeats its round"
    assert not set(restarted(10, trains=True)) & {*first, *passed}
    assert restarted(11, trains=True) == []


def test_a_begun_entry_that_is_damaged_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = tmp_path / "images"
    for index in range(2):
        _put(images, f"cat/{index}.png", index * 10)
    source = folder_samples(FolderUri(images), tmp_path / "ledger")
    (tmp_path / "ledger" / "00000000.begun.json").write_bytes(b"[")
    for _ in range(2):
        assert source.round_samples(1) is not None
    assert [record.getMessage()[:24] for record in caplog.records if record.levelname == "WARNING"] == [
        "ledger entry is damaged,"
    ]


def test_what_the_disk_doesnt_let_be_noted_as_used_comes_in_no_later_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "images"
    for index in range(4):
        _put(images, f"cat/{index}.png", index * 10)
    source = folder_samples(FolderUri(images, per_round=2), tmp_path / "ledger")
    first = source.round_samples(0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        with pytest.raises(OSError, match="Read-only"):
            source.used_up(0)
    second = source.round_samples(1)
    assert not {image.mean() for image in first.images} & {image.mean() for image in second.images}
    source.used_up(0)
    assert {path.name for path in (tmp_path / "ledger").iterdir()} == {"00000000.json", "00000001.begun.json"}


def test_a_file_that_is_no_image_is_skipped_and_the_rest_is_used(tmp_path: Path) -> None:
    images = tmp_path / "images"
    _put(images, "cat/good.png", 9)
    _put(images, "dog/good.png", 90)
    (images / "cat" / "bad.png").write_bytes(b"not an image")
    (images / "cat" / "notes.txt").write_text("ignored")
    os.mkfifo(images / "dog" / "pipe.png")
    samples = folder_samples(FolderUri(images), tmp_path / "ledger").round_samples(0)
    assert samples is not None
    assert len(samples) == 2


def test_a_picture_for_which_there_was_no_memory_is_learned_from_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "images"
    for index in range(2):
        _put(images, f"cat/{index}.png", index * 10)
    no_memory = cv2.error("alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate 18000000 bytes")
    with monkeypatch.context() as patched:
        patched.setattr(cv2, "imdecode", Mock(side_effect=no_memory))
        source = folder_samples(FolderUri(images), tmp_path / "ledger")
        assert source.round_samples(0) is None
    assert source.round_samples(0) is not None


def test_links_that_lead_nowhere_or_in_a_circle_are_told_once_and_the_rest_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "images"
    _put(images, "dog/good.png", 90)
    (images / "cat").mkdir()
    (images / "cat" / "away.png").symlink_to("nowhere.png")
    (images / "cat" / "circle.png").symlink_to("circle.png")
    source = folder_samples(FolderUri(images), tmp_path / "ledger")
    assert [source.round_samples(0), source.round_samples(0)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == ["image skipped"] * 2
    _put(images, "cat/nowhere.png", 9)
    samples = source.round_samples(0)
    assert sorted(samples.labels.tolist()) == [0, 0, 1], "the link leads to a picture now"


def test_hidden_files_and_those_of_other_endings_are_counted_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "images"
    for name in ("cat/0.png", "dog/1.PNG", "cat/.hidden.png"):
        _put(images, name, 9)
    (images / "dog" / "2.webp").write_bytes(b"a WebP")
    source = folder_samples(FolderUri(images), tmp_path / "ledger")
    assert source.round_samples(0) is not None
    (told,) = caplog.records
    assert (told.getMessage(), told.fields["num"]) == ("files passed over", 2)  # type: ignore[attr-defined]
    (images / "cat" / "notes.txt").touch()
    source.used_up(0)
    assert source.round_samples(1) is None
    assert [record.fields["num"] for record in caplog.records] == [2, 3]  # type: ignore[attr-defined]


def test_a_file_that_is_still_written_keeps_no_round_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "images"
    _put(images, "cat/whole.png", 9)
    whole = (images / "cat" / "whole.png").read_bytes()
    (images / "cat" / "whole.png").rename(images / "cat" / "half.png")
    (images / "cat" / "half.png").write_bytes(whole[:-20])
    source = folder_samples(FolderUri(images, per_round=3), tmp_path / "ledger")
    assert [source.round_samples(0), source.round_samples(0)] == [None, None]
    assert len(caplog.records) == 1, "told once"
    for index in range(3):
        _put(images, f"dog/{index}.png", 50 + index)
    first = source.round_samples(0)
    assert first.labels.tolist() == [1, 1, 1]
    source.used_up(0)
    (images / "cat" / "half.png").write_bytes(whole)
    _put(images, "dog/3.png", 99)
    then = source.round_samples(1)
    assert sorted(then.labels.tolist()) == [0, 1], "what is whole now is used"


def test_what_could_not_be_read_for_a_moment_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "images"
    for index in range(2):
        _put(images, f"cat/{index}.png", index * 10)
    source = folder_samples(FolderUri(images, per_round=1), tmp_path / "ledger")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert source.round_samples(0) is None
    samples = source.round_samples(0)
    assert samples is not None
    assert len(samples) == 2, "fewer train no model, whatever per_round says"


def test_a_class_with_the_name_of_another_folder_reads_none_beside_its_own(tmp_path: Path) -> None:
    for name in ("images/cat/0.png", "images/cat/1.png", "images/dog/x/0.png", "beside.png", "images/in.png"):
        _put(tmp_path, name, 9)
    task = TaskSpec(1, 28, ("cat", "..", ".", "dog/x", "dog"))
    source = FolderSamples(FolderUri(tmp_path / "images"), task, tmp_path / "ledger", lambda pictures: None)
    samples = source.round_samples(0)
    assert samples.labels.tolist() == [0, 0]


def test_a_begun_round_whose_images_are_gone_takes_others_and_a_class_folder_may_go(tmp_path: Path) -> None:
    images = tmp_path / "images"
    for index in range(4):
        _put(images, f"{'cat' if index < 2 else 'dog'}/{index}.png", index * 10)
    source = folder_samples(FolderUri(images, per_round=2), tmp_path / "ledger")
    assert source.round_samples(0).labels.tolist() == [0, 0]
    shutil.rmtree(images / "cat")
    assert source.round_samples(0).labels.tolist() == [1, 1]
    source.used_up(0)
    assert source.round_samples(1) is None


def test_the_ledger_forgets_rounds_whose_images_were_deleted_and_none_while_the_folder_is_away(tmp_path: Path) -> None:
    images, ledger = tmp_path / "images", tmp_path / "ledger"
    source = folder_samples(_put_two(images), ledger)
    for index in range(20):
        assert source.round_samples(index) is not None, "new pictures, though the old ones had their names"
        source.used_up(index)
        images.rename(tmp_path / "away")
        assert source.round_samples(index + 1) is None
        (tmp_path / "away").rename(images)
        assert source.round_samples(index + 1) is None
        assert [path.name for path in ledger.iterdir()] == [f"{index:08d}.json"]
        for path in images.glob("*/*.png"):
            path.unlink()
        assert source.round_samples(index + 1) is None
        _put_two(images)
    assert [*ledger.iterdir()] == []


def test_the_ledger_forgets_no_round_of_a_class_that_the_task_lacks_for_a_time(tmp_path: Path) -> None:
    images, ledger = tmp_path / "images", tmp_path / "ledger"
    for name in ("dog/1.png", "dog/2.png"):
        _put(images, name, 9)
    (images / "cat").mkdir()
    uri, without_dogs = FolderUri(images), TaskSpec(1, 28, ("cat", "fox"))
    source = folder_samples(uri, ledger)
    assert source.round_samples(0).labels.tolist() == [1, 1]
    source.used_up(0)
    assert FolderSamples(uri, without_dogs, ledger, lambda pictures: None).round_samples(1) is None
    assert folder_samples(uri, ledger).round_samples(1) is None, "the dogs were learned from"


def _put_two(images: Path) -> FolderUri:
    for name in ("cat/0.png", "dog/1.png"):
        _put(images, name, 9)
    return FolderUri(images)


def test_a_folder_that_is_missing_empty_or_of_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="doesn't exist"):
        folder_samples(FolderUri(tmp_path / "none"), tmp_path / "ledger")
    (tmp_path / "images").mkdir()
    with pytest.raises(SettingsError, match="no class folders"):
        folder_samples(FolderUri(tmp_path / "images"), tmp_path / "ledger")
    (tmp_path / "images" / "dogs").mkdir()
    with pytest.raises(SettingsError, match="unknown class 'dogs'; did you mean 'dog'"):
        folder_samples(FolderUri(tmp_path / "images"), tmp_path / "ledger")


def test_a_class_folder_that_the_fleet_is_yet_to_learn_waits_beside_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "images"
    for index in range(4):
        _put(images, f"{'cat' if index < 2 else 'dogs'}/{index}.png", index * 10)
    source = folder_samples(FolderUri(images, per_round=4), tmp_path / "ledger")
    assert source.round_samples(0).labels.tolist() == [0, 0]
    (told,) = [record for record in caplog.records if record.message == "class folder passed over"]
    assert "unknown class; did you mean 'dog'?" in str(vars(told))
    grown = dataclasses.replace(TASK, class_names=(*TASK.class_names, "dogs"))
    source = FolderSamples(FolderUri(images, per_round=4), grown, tmp_path / "ledger", lambda pixels: None)
    assert source.round_samples(0).labels.tolist() == [0, 0], "the round keeps what it began with"
    assert sorted(source.round_samples(1).labels.tolist())[-1] == len(TASK.class_names)


def test_folder_frames_show_what_is_there(tmp_path: Path) -> None:
    _put(tmp_path / "images", "cat/one.png", 255)
    source = source_opener([f"folder://{tmp_path}/images?rate=1000"], tmp_path)(TASK).pictures
    picture = next(iter(source.cameras[0].pictures(threading.Event())))
    inputs = source.view.inputs(picture)
    assert inputs.images.shape == (1, *TASK.image_shape)
    assert float(inputs.images.min()) == 1.0
