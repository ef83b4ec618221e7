from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.labelled_images import LabelledImages, LazyImages, digest_of
from replayfleet.federation.streams.opening import open_stream
from replayfleet.federation.streams.stream import SPLITS, StreamSettings, plain_settings
from replayfleet.federation.streams.tasks import MIN_SHARE, TaskStream, as_tasks_show_it
from replayfleet.models.specs import TaskSpec

NAMES = tuple("abcdef")


def data(per_class: int = 60) -> Dataset:
    rng = np.random.default_rng(0)

    def part(count: int) -> LabelledImages:
        labels = np.repeat(np.arange(6), count)
        return LabelledImages(rng.integers(0, 255, (len(labels), 28, 28, 1), dtype=np.uint8), labels, NAMES)

    return Dataset("made", part(per_class), part(20), TaskSpec(1, 28, NAMES))


def opened(scenario: str = "rotated", **changes: Any) -> tuple[TaskStream, Dataset]:
    given: dict[str, Any] = {"num_clients": 3, "samples_per_class": 40, "num_tasks": 3, "rounds_per_task": 2}
    stream, shown = open_stream(StreamSettings(scenario=scenario, **(given | changes)), data())
    assert isinstance(stream, TaskStream)
    assert isinstance(shown, Dataset)
    return stream, shown


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scenario", ["rotated", "permuted", "sequential"])
def test_every_sample_of_a_task_is_one_clients_in_all_rounds_of_the_task(scenario: str, split: str) -> None:
    stream, shown = opened(scenario, split=split)
    assert stream.num_rounds == 6
    per_task = []
    for index in range(6):
        shares = [stream.train_indices(client, index) for client in range(3)]
        assert min(map(len, shares)) >= MIN_SHARE
        per_task.append([share.tolist() for share in shares])
        assert all(stream.class_ids(c, index) == tuple(np.unique(shown.train.labels[s])) for c, s in enumerate(shares))
    assert [per_task[0], per_task[2], per_task[4]] == [per_task[1], per_task[3], per_task[5]]
    for task in (0, 2, 4):
        every = [index for share in per_task[task] for index in share]
        classes = 2 if scenario == "sequential" else 6
        assert len(every) == len(set(every)) == 40 * classes
    tasks = [{index for share in per_task[task] for index in share} for task in (0, 2, 4)]
    assert not any(one & other for one, other in itertools.combinations(tasks, 2))
    assert stream.changes() == [2, 4]


def test_a_class_incremental_task_brings_classes_that_are_new() -> None:
    stream, _ = opened("sequential", split="evenly")
    assert [stream.class_ids(0, index) for index in (0, 2, 4)] == [(0, 1), (2, 3), (4, 5)]
    assert stream.place_names == ("task 1: a, b", "task 2: c, d", "task 3: e, f")


def test_clients_may_change_task_at_rounds_of_their_own() -> None:
    stream, _ = opened("sequential", num_clients=6, rounds_per_task=5, stagger=2, split="evenly")
    begins = []
    for client in range(6):
        tasks = [len(set(stream.test_places(client, index).tolist())) - 1 for index in range(15)]
        assert tasks == sorted(tasks)
        assert set(tasks) == {0, 1, 2}
        begins.append((tasks.index(1), tasks.index(2)))
    assert len(set(begins)) > 1
    assert all(3 <= second <= 7 and 8 <= third <= 12 for second, third in begins)
    for stagger, message in ((3, "a task lasts for 5 rounds; expected less than half"), (-1, "stagger is -1")):
        with pytest.raises(SettingsError, match=message):
            opened("sequential", rounds_per_task=5, stagger=stagger)
    with pytest.raises(SettingsError, match="expected 0, or rounds of a scenario whose tasks last"):
        StreamSettings(scenario="gradual", num_clients=2, stagger=1)


def test_the_classes_of_an_images_task_are_known_where_tasks_have_their_own() -> None:
    stream, shown = opened("sequential", split="evenly")
    named = stream.classes_of_task(1, 5)
    assert named is not None
    labels = shown.test.labels[stream.test_indices(1, 5)]
    assert named.shape == (len(labels), 6)
    assert named[np.arange(len(labels)), labels].all()
    assert set(named.sum(axis=1).tolist()) == {2}
    assert opened("rotated")[0].classes_of_task(0, 0) is None


def test_few_shots_follow_a_base_session_and_go_to_few() -> None:
    few: dict[str, Any] = {"base_classes": 2, "base_rounds": 3, "rounds_per_task": 1, "shots": 5, "split": "dirichlet"}
    stream, shown = opened("few-shot", **few)
    assert (stream.num_rounds, stream.changes()) == (5, [3, 4])
    labels = shown.train.labels
    for index, classes, samples in ((0, {0, 1}, 40), (2, {0, 1}, 40), (3, {2, 3}, 5), (4, {4, 5}, 5)):
        shares = [stream.train_indices(client, index) for client in range(3)]
        every = np.concatenate(shares)
        assert set(labels[every].tolist()) == classes
        assert np.bincount(labels[every])[sorted(classes)].tolist() == [samples, samples]
        assert min(map(len, shares)) >= 2
    assert [len(set(stream.test_places(0, index).tolist())) for index in range(5)] == [1, 1, 1, 2, 3]
    for base in (5, 9):
        words = f"^6 classes don't make {base} base classes and 2 tasks of at least 2; lower num_tasks or base_classes"
        with pytest.raises(SettingsError, match=words):
            opened("few-shot", base_classes=base)
    with pytest.raises(SettingsError, match="2 samples of a task don't give each of 3 clients 2; raise shots"):
        opened("few-shot", **(few | {"shots": 1}))


@pytest.mark.parametrize("scenario", ["rotated", "permuted"])
def test_tasks_show_the_same_images_of_the_same_clients_otherwise(scenario: str) -> None:
    stream, shown = opened(scenario)
    images = data().train.images
    first, second = (np.sort(stream.train_indices(1, index)) for index in (0, 2))
    assert (second - first == len(images)).all()
    assert (shown.train.labels[first] == shown.train.labels[second]).all()
    assert (shown.train.images[first] != shown.train.images[second]).any()
    if scenario == "permuted":
        assert (shown.train.images[first] == images[first]).all()
        assert (np.sort(shown.train.images[second], axis=None) == np.sort(images[first], axis=None)).all()


@pytest.mark.parametrize("scenario", ["rotated", "permuted", "sequential"])
def test_files_of_other_names_are_other_samples_however_tasks_show_them(scenario: str) -> None:
    def digest(name: str) -> str:
        made = data()
        files = LazyImages((len(made.train.labels), 28, 28, 1), lambda index: [], [name] * len(made.train.labels))
        held = dataclasses.replace(made, train=dataclasses.replace(made.train, images=files))
        shown = as_tasks_show_it(StreamSettings(scenario=scenario, num_clients=2, num_tasks=2), held)
        return digest_of((shown.train, shown.test))

    assert digest("a/1.png") == digest("elsewhere/1.png") != digest("a/2.png")


@pytest.mark.parametrize("scenario", ["rotated", "sequential"])
def test_other_pixels_of_an_array_are_other_samples(scenario: str) -> None:
    def digest(images: np.ndarray) -> str:
        made = data()
        held = dataclasses.replace(made, test=dataclasses.replace(made.test, images=images))
        shown = as_tasks_show_it(StreamSettings(scenario=scenario, num_clients=2, num_tasks=2), held)
        return digest_of((shown.train, shown.test))

    images = data().test.images
    assert isinstance(images, np.ndarray)
    assert digest(images) == digest(images.copy()) != digest(images ^ 1)


def test_pixels_are_compared_without_a_second_copy_of_them() -> None:
    images = np.zeros((5000, 32, 32, 1), dtype=np.uint8)
    part = LabelledImages(images, np.zeros(5000, dtype=np.int64), ("a", "b"))
    tracemalloc.start()
    try:
        digest_of((part,))
        assert tracemalloc.get_traced_memory()[1] < images.nbytes / 4
    finally:
        tracemalloc.stop()


def test_a_rotation_turns_about_the_centre_and_keeps_what_it_can() -> None:
    from replayfleet.federation.streams.tasks import _turned

    image = data().train.images[:5]
    assert (_turned(0.0)(image) == image).all()
    assert (_turned(180.0)(image) == image[:, ::-1, ::-1]).all()
    assert (_turned(90.0)(image) == np.rot90(image, k=-1, axes=(1, 2))).all()
    corner = np.zeros((1, 28, 28, 1), dtype=np.uint8)
    corner[0, 0, 0] = 255
    assert _turned(45.0)(corner).max() == 0  # it left the picture


def test_clients_test_all_tasks_so_far_between_them() -> None:
    stream, shown = opened(test_samples_per_class=12)
    every = np.concatenate([stream.test_indices(client, 3) for client in range(3)])
    assert len(every) == len(set(every.tolist())) == 2 * 6 * 12
    places = stream.test_places(0, 3)
    assert (places == stream.test_indices(0, 3) // len(data().test.labels)).all()
    assert len(stream.place_names) == 3
    assert shown.test.labels[every].max() == 5


def test_a_sample_is_seen_once_and_only_by_who_was_there() -> None:
    stream, _ = opened("sequential", split="evenly", num_absent=1)
    assert [stream.num_seen(0, index) for index in (0, 1)] == [27, 27]
    for client in range(3):
        there = {index // 2 for index in range(6) if client in stream.present(index)}
        lengths = {index // 2: len(stream.train_indices(client, index)) for index in range(6)
                   if client in stream.present(index)}  # fmt: skip
        assert stream.num_seen(client, 5) == sum(lengths[task] for task in there)
    assert any(len(stream.present(index)) == 2 for index in range(1, 6))


def test_a_smaller_alpha_makes_shares_more_unequal() -> None:
    def spread(alpha: float) -> float:
        stream, _ = opened("sequential", split="dirichlet", dirichlet_alpha=alpha, num_tasks=1, samples_per_class=60)
        return float(np.std([len(stream.train_indices(client, 0)) for client in range(3)]))

    assert spread(100.0) < spread(0.3)


def test_streams_are_the_same_wherever_they_are_drawn() -> None:
    stream, _ = opened("rotated", split="dirichlet")
    assert stream.train_indices(0, 2)[:5].tolist() == EXPECTED
    assert stream.place_names[1] == "task 2"
    assert stream.described()["angles"][1] == pytest.approx(12, abs=0.5)


EXPECTED = [581, 658, 616, 562, 425]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "evenyl"}, "unknown split 'evenyl'; did you mean 'evenly'"),
        ({"dirichlet_alpha": 0.0}, "dirichlet_alpha is 0.0, expected 0.01 to 1000"),
        ({"num_tasks": 0}, "num_tasks is 0, expected at least 1"),
        ({"num_rounds": 7}, "3 tasks last for 6 rounds, not 7"),
        ({"samples_per_class": 2}, "12 samples of a task don't give each of 3 clients 10"),
        ({"test_samples_per_class": 1, "num_clients": 9, "samples_per_class": 60}, "6 test samples of a task for 9"),
    ],
)
def test_what_no_stream_can_be_made_of_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        opened(**changes)
    with pytest.raises(SettingsError, match="6 classes don't make 4 tasks"):
        opened("sequential", num_tasks=4)


@pytest.mark.parametrize(
    ("scenario", "changes", "message"),
    [
        ("rotated", {"overlap": 2}, "overlap is 2, but scenario rotated has no task types; leave it out"),
        ("few-shot", {"classes_per_task": 5}, "classes_per_task is 5, but scenario few-shot has no task types"),
        ("gradual", {"rounds_per_task": 9}, "rounds_per_task is 9, but scenario gradual has no tasks that last"),
        ("driving", {"split": "evenly"}, "split is evenly, but scenario driving has no tasks that last"),
        ("sequential", {"shots": 3}, "shots is 3, but scenario sequential has no base session"),
    ],
)
def test_what_only_other_scenarios_have_is_refused(scenario: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        StreamSettings(scenario=scenario, num_clients=2, **changes)


def test_streams_without_tasks_are_known_as_ever() -> None:
    plain = plain_settings(StreamSettings(scenario="gradual", num_clients=2))
    assert not {"num_tasks", "rounds_per_task", "split", "alpha"} & plain.keys()
    tasks = plain_settings(dataclasses.replace(opened()[0].settings, num_rounds=None))
    assert (tasks["num_tasks"], tasks["rounds_per_task"], tasks["split"]) == (3, 2, "two-classes")
    assert tasks["alpha"] == 0.3  # as runs have it that were made when the setting was called so
