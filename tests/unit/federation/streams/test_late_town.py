"""A late change of domain: one client gets to a town where nobody was before, the others stay where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.driving_folder import write_driving

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import AnyDataset, load_any_dataset
from replayfleet.federation.streams.driving.stream import DrivingStream
from replayfleet.federation.streams.opening import open_stream
from replayfleet.federation.streams.stream import StreamSettings, plain_settings

TOWNS = {f"Town0{number}": [[0, 3]] * 48 for number in (1, 2, 3, 5)}
LATE = 3
"""Town05's place."""


@pytest.fixture(scope="module", params=["carla-boxes", "carla-crops"])
def recording(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AnyDataset:
    return load_any_dataset(request.param, data_root=write_driving(tmp_path_factory.mktemp("drive"), TOWNS))


def driving(data: AnyDataset, **settings: Any) -> DrivingStream:
    given = {"scenario": "driving", "num_clients": 2, "late_town": "Town05", "num_rounds": 14, **settings}
    stream, _ = open_stream(StreamSettings(**given), data)
    assert isinstance(stream, DrivingStream)
    return stream


def towns_of(data: AnyDataset, stream: DrivingStream, client: int) -> list[int]:
    """Return the one town of each of a client's rounds."""
    assert hasattr(data.train, "place_ids")
    towns = [set(data.train.place_ids[stream.train_indices(client, r)].tolist()) for r in range(stream.num_rounds)]
    assert {len(own) for own in towns} == {1}
    return [own.pop() for own in towns]


def test_the_first_client_alone_is_in_the_late_town_in_the_last_seventh_of_the_rounds(recording: AnyDataset):
    for seed in range(3):
        stream = driving(recording, num_clients=3, seed=seed)
        assert stream.change_round == 12
        assert stream.settings.late_rounds == 2
        first, *others = (towns_of(recording, stream, client) for client in range(3))
        assert first[12:] == [LATE, LATE]
        assert sorted(set(first[:12])) == [0, 1, 2]
        for towns in others:
            assert sorted(set(towns)) == [0, 1, 2]
            assert towns[12:] == [towns[11]] * 2
        assert stream.route(0)[-1] == LATE
        assert all(sorted(stream.route(client)) == [0, 1, 2] for client in (1, 2))


def test_who_stays_meets_all_of_its_last_town_and_nothing_twice(recording: AnyDataset):
    stream = driving(recording, samples_per_class=1000)
    met = np.concatenate([stream.train_indices(1, r) for r in range(14)])
    assert len(set(met.tolist())) == len(met)
    assert set(met.tolist()) == set(np.flatnonzero(recording.train.place_ids != LATE).tolist())  # type: ignore[union-attr]


def test_changes_are_marked_and_the_last_one_says_whose_it_is(recording: AnyDataset):
    stream = driving(recording)
    assert stream.changes() == [4, 8, 12]
    assert stream.change_name.endswith("at the last, client-0 alone reaches Town05")


def test_tests_of_the_earlier_towns_are_the_same_before_and_after_for_who_changes(recording: AnyDataset):
    stream = driving(recording)
    before, after = stream.test_indices(0, 11), stream.test_indices(0, 13)
    earlier = after[stream.test_places(0, 13) != LATE]
    assert before.tolist() == earlier.tolist()
    assert len(after) > len(before)


def test_of_pictures_a_round_takes_so_many_in_all(tmp_path: Path):
    data = load_any_dataset("carla-boxes", data_root=write_driving(tmp_path, TOWNS))
    stream = driving(data, samples_per_class=5, test_samples_per_class=2)
    assert {len(stream.train_indices(0, r)) for r in range(14)} == {5}
    assert len(stream.test_indices(0, 13)) <= 28
    assert stream.class_ids(0, 0) == (0, 3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"late_town": "Town5"}, "late_town 'Town5' is no town of the recording; did you mean 'Town05'"),
        ({"late_rounds": 12}, "14 rounds, of which 12 are for Town05, can't reach all of 3 towns; ask for at least 15"),
        ({"scenario": "gradual"}, "scenario gradual has no towns"),
        ({"late_town": "", "late_rounds": 2}, "late_rounds is 2, but no late_town is named"),
        ({"late_rounds": 0}, "late_rounds is 0, expected at least 1"),
    ],
)
def test_late_towns_that_can_t_be_reached_are_refused(recording: AnyDataset, settings: dict[str, Any], complaint: str):
    with pytest.raises(SettingsError, match=complaint):
        driving(recording, **settings)


def test_the_only_town_can_t_be_the_late_one(tmp_path: Path):
    data = load_any_dataset("carla-boxes", data_root=write_driving(tmp_path, {"Town05": [[0]] * 8}))
    with pytest.raises(SettingsError, match="the only town of the recording"):
        driving(data)


def test_boxes_need_towns(tmp_path: Path):
    data = load_any_dataset("carla-boxes", data_root=write_driving(tmp_path, {"Town05": [[0]] * 8}))
    with pytest.raises(SettingsError, match="those of carla-boxes have boxes; take --scenario driving"):
        open_stream(StreamSettings(scenario="circulating", num_clients=2), data)


def test_streams_without_a_late_town_are_known_by_what_they_ever_were():
    old = plain_settings(StreamSettings(scenario="driving", num_clients=2))
    assert sorted(old) == [
        "classes_per_task",
        "num_absent",
        "num_clients",
        "num_rounds",
        "overlap",
        "samples_per_class",
        "scenario",
        "seed",
        "test_samples_per_class",
    ]
    late = plain_settings(StreamSettings(scenario="driving", num_clients=2, late_town="Town05"))
    assert late["late_town"] == "Town05"
