from __future__ import annotations

import gzip
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from replayfleet.edge_client.cameras.uri import DatasetUri
from replayfleet.edge_client.learning.dataset_samples import DatasetSamples
from replayfleet.edge_client.sources import source_opener
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.fleet.presets import TASKS
from replayfleet.federation.simulator.round_data import round_data
from replayfleet.federation.streams.datasets import load_dataset
from replayfleet.federation.streams.stream import Stream, StreamSettings
from replayfleet.models.specs import TaskSpec


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four idx files in Fashion-MNIST's format: ten classes, 40 training and 20 test images of each."""
    root = tmp_path_factory.mktemp("data") / "fashion-mnist"
    root.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 400), ("t10k", 200)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        image_bytes = struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes()
        label_bytes = struct.pack(">II", 2049, count) + labels.tobytes()
        (root / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(image_bytes))
        (root / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(label_bytes))
    return root


URI = DatasetUri("fashion-mnist", "circulating", clients=2, client=1, rounds=6, samples=5, seed=4)


def test_a_device_draws_the_very_samples_that_the_simulator_draws(data_root: Path) -> None:
    source = DatasetSamples(URI, lambda pictures: None, data_root)
    data = load_dataset("fashion-mnist", data_root=data_root)
    settings = StreamSettings(scenario="circulating", num_clients=2, num_rounds=6, samples_per_class=5, seed=4)
    stream = Stream(settings, data.train.labels, data.test.labels, 10)
    for round_index in (0, 5):
        samples = source.round_samples(round_index)
        expected = round_data(data.train, stream.train_indices(1, round_index))
        assert np.array_equal(samples.images, expected.images.numpy())
        assert np.array_equal(samples.labels, expected.labels.numpy())


def test_test_data_are_cumulative_and_the_stream_ends(data_root: Path) -> None:
    source = DatasetSamples(URI, lambda pictures: None, data_root)
    sizes = [len(samples) for r in range(6) if (samples := source.test_samples(r)) is not None]
    assert sizes == sorted(set(sizes))
    assert source.test_samples(-1) is None
    assert source.round_samples(6) is None
    last, after = source.test_samples(5), source.test_samples(9)
    assert np.array_equal(last.labels, after.labels)


def test_frames_show_the_classes_of_the_newest_round(data_root: Path, tmp_path: Path) -> None:
    uri = "dataset://fashion-mnist?rounds=6&samples=5&rate=1000"
    source = source_opener([uri], tmp_path, data_root)(TASKS["fashion-mnist"])
    picture = next(iter(source.pictures.cameras[0].pictures(threading.Event())))
    shown = source.pictures.view.inputs(picture).images
    met = source.samples.test_samples(0)
    assert any(np.array_equal(shown[0], image) for image in met.images)


def test_a_source_of_another_task_than_the_fleets_is_refused(data_root: Path, tmp_path: Path) -> None:
    opener = source_opener(["dataset://fashion-mnist?rounds=2&samples=5"], tmp_path, data_root)
    assert "fashion-mnist" in opener(TASKS["fashion-mnist"]).pictures.description
    with pytest.raises(SettingsError, match="choose another source"):
        opener(TaskSpec(1, 28, ("a", "b")))
    renamed = ("T-shirt", *TASKS["fashion-mnist"].class_names[1:])
    with pytest.raises(SettingsError, match="class 0 is 't-shirt' in source fashion-mnist and 'T-shirt'"):
        opener(TaskSpec(1, 28, renamed))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("dataset://fashion-minst", "unknown data set 'fashion-minst'; did you mean 'fashion-mnist'"),
        ("dataset://fashion-mnist?scenario=circulatin", "unknown scenario 'circulatin'; did you mean 'circulating'"),
        ("dataset://fashion-mnist?rounds=600&samples=5", "lasts for"),
        ("folder:///no/such/folder", "doesn't exist"),
    ],
)
def test_a_source_that_cannot_be_opened_is_refused_at_the_start(
    uri: str, message: str, data_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        source_opener([uri], tmp_path, data_root)


def test_missing_data_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYFLEET_DATA", raising=False)
    with pytest.raises(SettingsError, match=r"data set cifar-10 not found.*name a folder with --data-root"):
        source_opener(["dataset://cifar-10"], tmp_path, tmp_path)
