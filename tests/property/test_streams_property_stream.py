from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from federation.errors import SettingsError
from federation.scenarios import SCENARIOS
from federation.streams.stream import Stream, StreamSettings


@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    train_sizes=st.lists(st.integers(0, 40), min_size=2, max_size=7),
    test_size=st.integers(1, 30),
    samples_per_class=st.integers(1, 9),
    classes_per_task=st.integers(1, 3),
    num_clients=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_data_no_client_meets_a_sample_twice(
    scenario: str,
    train_sizes: list[int],
    test_size: int,
    samples_per_class: int,
    classes_per_task: int,
    num_clients: int,
    seed: int,
):
    train = np.repeat(np.arange(len(train_sizes)), train_sizes)
    test = np.repeat(np.arange(len(train_sizes)), test_size)
    wanted = StreamSettings(
        scenario=scenario,
        num_clients=num_clients,
        samples_per_class=samples_per_class,
        classes_per_task=classes_per_task,
        seed=seed,
    )
    try:
        stream = Stream(wanted, train, test, len(train_sizes))
    except SettingsError:
        assume(False)
    for client in range(num_clients):
        met = np.concatenate([stream.train_indices(client, index) for index in range(stream.num_rounds)])
        assert len(np.unique(met)) == len(met) == stream.num_seen(stream.num_rounds - 1)
        tested = stream.test_indices(client, stream.num_rounds - 1)
        assert len(np.unique(tested)) == len(tested)
        assert set(test[tested]) == set(train[met])
