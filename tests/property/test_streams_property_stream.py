from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator import SCENARIOS
from replayfleet.federation.streams.stream import Stream, StreamSettings


@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    train_sizes=st.lists(st.integers(0, 40), min_size=2, max_size=7),
    test_size=st.integers(1, 30),
    samples_per_class=st.integers(1, 9),
    classes_per_task=st.integers(1, 3),
    overlap=st.integers(0, 6),
    num_clients=st.integers(1, 3),
    num_absent=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_data_no_client_meets_a_sample_twice(
    *,
    scenario: str,
    train_sizes: list[int],
    test_size: int,
    samples_per_class: int,
    classes_per_task: int,
    overlap: int,
    num_clients: int,
    num_absent: int,
    seed: int,
):
    train = np.repeat(np.arange(len(train_sizes)), train_sizes)
    test = np.repeat(np.arange(len(train_sizes)), test_size)
    num_task_types = len(train_sizes) // classes_per_task
    wanted = StreamSettings(
        scenario=scenario,
        num_clients=num_clients,
        samples_per_class=samples_per_class,
        classes_per_task=classes_per_task,
        overlap=min(overlap, max(0, num_task_types - 2) * classes_per_task),
        num_absent=min(num_absent, num_clients - 1),
        seed=seed,
    )
    try:
        stream = Stream(wanted, train, test, len(train_sizes))
    except SettingsError:
        assume(False)
    for client in range(num_clients):
        met = np.concatenate([stream.train_indices(client, index) for index in range(stream.num_rounds)])
        assert len(np.unique(met)) == len(met) == stream.num_seen(client, stream.num_rounds - 1)
        tested = stream.test_indices(client, stream.num_rounds - 1)
        assert len(np.unique(tested)) == len(tested)
        assert set(test[tested]) == set(train[met])


@given(
    num_task_types=st.integers(3, 8),
    classes_per_task=st.integers(1, 3),
    leftover=st.integers(0, 2),
    overlap=st.integers(0, 18),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_neighbours_on_the_ring_share_the_overlap_and_every_class_comes_equally_often(
    num_task_types: int, classes_per_task: int, leftover: int, overlap: int, seed: int
):
    overlap = min(overlap, (num_task_types - 2) * classes_per_task)
    num_classes = num_task_types * classes_per_task + min(leftover, classes_per_task - 1)
    labels = np.repeat(np.arange(num_classes), num_task_types)
    wanted = StreamSettings(
        scenario="extreme",
        num_clients=2,
        samples_per_class=1,
        classes_per_task=classes_per_task,
        overlap=overlap,
        seed=seed,
    )
    stream = Stream(wanted, labels, labels, num_classes)
    assert stream.num_rounds == num_task_types
    for client in range(2):
        cycle = [stream.class_ids(client, index) for index in range(num_task_types)]
        for before, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert len(set(before) & set(after)) == overlap
        _, counts = np.unique(np.concatenate(cycle), return_counts=True)
        assert counts.sum() == num_task_types * (classes_per_task + overlap)
        if overlap % classes_per_task == 0:
            assert len(set(counts)) == 1


@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    num_clients=st.integers(1, 9),
    num_absent=st.integers(0, 8),
    overlap=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_absences_leave_out_rounds_and_change_no_other(
    scenario: str, num_clients: int, num_absent: int, overlap: int, seed: int
):
    num_absent = min(num_absent, num_clients - 1)
    labels = np.repeat(np.arange(8), 12)
    streams = [
        Stream(
            StreamSettings(
                scenario=scenario,
                num_clients=num_clients,
                num_rounds=6,
                samples_per_class=1,
                test_samples_per_class=1,
                overlap=overlap,
                num_absent=number,
                seed=seed,
            ),
            labels,
            labels,
            8,
        )
        for number in (0, num_absent)
    ]
    whole, some = streams
    for index in range(6):
        present = some.present(index)
        assert len(present) == num_clients - (num_absent if index else 0)
        for client in range(num_clients):
            expected = whole.train_indices(client, index) if client in present else []
            assert some.train_indices(client, index).tolist() == list(expected)
            seen = [some.train_indices(client, earlier) for earlier in range(index + 1)]
            assert some.num_seen(client, index) == sum(len(samples) for samples in seen)
            tested = some.test_indices(client, index).tolist()
            assert set(tested) <= set(whole.test_indices(client, index).tolist())
            assert len(tested) == some.num_seen(client, index)
