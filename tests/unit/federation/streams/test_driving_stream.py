"""Clients that drive through all towns, each in an order of its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.driving_folder import crops, write_driving
from support.image_sets import small_dataset

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import Dataset
from replayfleet.federation.streams.driving.stream import ROUNDS_PER_TOWN, DrivingStream
from replayfleet.federation.streams.opening import open_stream
from replayfleet.federation.streams.stream import Stream, StreamSettings

TOWNS = {
    "Town01": [[0, 3]] * 16,
    "Town02": [[1, 0], [4]] * 12,
    "Town03": [[3, 3, 3, 2]] * 20,
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return crops(write_driving(tmp_path_factory.mktemp("drive"), TOWNS))[0]


def driving(data: Dataset, **settings: Any) -> DrivingStream:
    stream, _ = open_stream(
        StreamSettings(**{"scenario": "driving", "num_clients": 2, "samples_per_class": 100, **settings}), data
    )
    assert isinstance(stream, DrivingStream)
    return stream


def test_every_client_drives_through_all_towns_and_no_two_of_the_first_are_in_one_town(recording: Dataset):
    for seed in range(5):
        stream = driving(recording, num_clients=3, seed=seed)
        routes = [stream.route(client) for client in range(3)]
        assert all(sorted(route) == [0, 1, 2] for route in routes)
        for together in zip(*routes, strict=True):
            assert sorted(together) == [0, 1, 2]


def test_orders_come_from_the_seed_and_not_from_the_number_of_clients(recording: Dataset):
    assert len({driving(recording, seed=seed).route(0) for seed in range(12)}) > 3
    few, many = driving(recording), driving(recording, num_clients=8)
    assert few.route(1) == many.route(1)
    assert [few.train_indices(1, r).tolist() for r in range(12)] == [
        many.train_indices(1, r).tolist() for r in range(12)
    ]
    assert len({driving(recording, num_clients=30, num_rounds=3, seed=1).route(client) for client in range(30)}) == 6


@pytest.mark.parametrize(
    ("num_rounds", "changes"), [(3, [1, 2]), (7, [2, 4]), (8, [2, 5]), (12, [4, 8]), (None, [4, 8])]
)
def test_rounds_are_divided_over_the_towns_as_evenly_as_possible(
    recording: Dataset, num_rounds: int | None, changes: list[int]
):
    stream = driving(recording, num_rounds=num_rounds)
    assert stream.changes() == changes
    assert stream.num_rounds == stream.settings.num_rounds == (num_rounds or ROUNDS_PER_TOWN * 3)
    train = recording.train
    for client in range(2):
        where = [np.unique(train.place_ids[stream.train_indices(client, r)]).tolist() for r in range(stream.num_rounds)]
        legs = [0, *changes, stream.num_rounds]
        for leg, (start, end) in enumerate(itertools.pairwise(legs)):
            assert where[start:end] == [[stream.route(client)[leg]]] * (end - start)


@pytest.mark.parametrize("num_rounds", [3, 7, 12])
def test_without_a_quota_every_crop_is_met_once_in_driving_order(recording: Dataset, num_rounds: int):
    stream = driving(recording, num_rounds=num_rounds)
    train = recording.train
    met = [stream.train_indices(1, r) for r in range(num_rounds)]
    assert sorted(np.concatenate(met)) == list(range(len(train.labels)))
    assert sorted(stream.test_indices(1, num_rounds - 1)) == list(range(len(recording.test.labels)))
    for leg, (start, end) in enumerate(itertools.pairwise([0, *stream.changes(), num_rounds])):
        frames = train.frames[np.concatenate(met[start:end])]
        assert (np.diff(frames) >= 0).all(), leg
    assert stream.num_seen(1, num_rounds - 1) == len(train.labels)
    assert stream.num_seen(1, 0) == len(met[0])


def test_a_round_s_tests_are_the_held_out_frames_between_its_training_frames(recording: Dataset):
    stream = driving(recording, num_rounds=6)
    train, test = recording.train, recording.test
    before = 0
    for index in range(6):
        learnt, tested = stream.train_indices(0, index), stream.test_indices(0, index)
        new, before = tested[before:], len(tested)
        assert len(new)
        assert set(test.place_ids[new]) == set(train.place_ids[learnt])
        first, last = train.frames[learnt].min(), train.frames[learnt].max()
        assert first <= test.frames[new].min()
        assert test.frames[new].max() <= last + 1
        assert stream.test_places(0, index).tolist() == test.place_ids[tested].tolist()


def test_of_one_class_a_round_takes_its_quota_at_most_in_driving_order_as_the_seed_draws(recording: Dataset):
    stream, other = (
        driving(recording, num_rounds=3, samples_per_class=4, test_samples_per_class=2, seed=seed) for seed in (0, 6)
    )
    leg = stream.route(0).index(2)
    taken = stream.train_indices(0, leg)
    assert np.bincount(recording.train.labels[taken], minlength=5).tolist() == [0, 0, 4, 4, 0]
    assert (np.diff(taken) > 0).all()
    assert stream.class_ids(0, leg) == (2, 3)
    assert not np.array_equal(taken, stream.train_indices(1, stream.route(1).index(2)))
    assert not np.array_equal(taken, other.train_indices(0, other.route(0).index(2)))
    tested = recording.test.labels[stream.test_indices(0, 2)]
    assert np.bincount(tested, minlength=5).max() <= 2 * 3


def test_who_meets_fewer_than_two_objects_sits_the_round_out(tmp_path: Path):
    lonely = [[0]] * 8 + [[1], [], [], [2]] + [[0]] * 4
    data = crops(write_driving(tmp_path, {"Town01": lonely, "Town02": [[0, 3]] * 16}))[0]
    stream = driving(data, num_rounds=8)
    (client, round_index) = next(
        (c, 4 * leg + 2) for c in range(2) for leg, place in enumerate(stream.route(c)) if place == 0
    )
    assert [len(stream.present(r)) for r in range(8)] == [2 - (r in (2, 6)) for r in range(8)]
    assert stream.present(round_index) == (1 - client,)
    assert stream.class_ids(client, round_index) == ()
    assert len(stream.train_indices(client, round_index)) == 0
    assert stream.num_seen(client, round_index) == stream.num_seen(client, round_index - 1)
    assert len(stream.test_indices(client, round_index)) == len(stream.test_indices(client, round_index - 1))


def test_absent_clients_meet_nothing_and_the_first_round_has_all(recording: Dataset):
    all_there, some = driving(recording, num_clients=3), driving(recording, num_clients=3, num_absent=1)
    assert some.present(0) == (0, 1, 2)
    for index in range(1, 12):
        assert len(some.present(index)) == 2
        for client in some.present(index):
            assert some.train_indices(client, index).tolist() == all_there.train_indices(client, index).tolist()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_rounds": 2}, "2 rounds can't reach all of 3 towns; ask for at least 3"),
        ({"overlap": 1}, "overlap is 1, but scenario driving has no task types"),
        ({"classes_per_task": 3}, "classes_per_task is 3, but"),
        ({"num_rounds": 120}, "fewer than 2 objects to learn from or none to be tested on; ask for fewer than 120"),
    ],
)
def test_streams_that_can_t_be_driven_are_refused(recording: Dataset, settings: dict[str, Any], complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        driving(recording, **settings)


def test_a_round_in_which_nobody_learns_is_refused(tmp_path: Path):
    data = crops(write_driving(tmp_path, {"Town01": [[0, 1]] * 8 + [[]] * 8}))[0]
    assert driving(data, num_rounds=1).num_rounds == 1
    with pytest.raises(SettingsError, match="in round 1 no client meets 2 objects to learn from"):
        driving(data, num_rounds=2)


def test_driving_needs_what_was_met_while_driving():
    data = small_dataset()
    settings = StreamSettings(scenario="driving", num_clients=2)
    with pytest.raises(SettingsError, match="which small doesn't hold; take --dataset carla-crops"):
        open_stream(settings, data)
    with pytest.raises(SettingsError, match="expected one of gradual, circulating, extreme"):
        Stream(settings, data.train.labels, data.test.labels, 4)
    with pytest.raises(SettingsError, match="did you mean 'driving'"):
        StreamSettings(scenario="drivin", num_clients=2)


def test_other_scenarios_are_streams_as_ever(recording: Dataset):
    settings = StreamSettings(scenario="circulating", num_clients=2, num_rounds=2, samples_per_class=3)
    assert isinstance(open_stream(settings, small_dataset())[0], Stream)
