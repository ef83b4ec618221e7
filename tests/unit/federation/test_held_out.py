from __future__ import annotations

import numpy as np

from replayfleet.federation.streams.held_out import held_out


def test_a_tenth_of_each_class_is_held_out_anew_for_each_client_and_round() -> None:
    labels = np.repeat(np.arange(3), 40)
    first = held_out(labels, 0, 5, "client-0")
    assert np.bincount(labels[first]).tolist() == [4, 4, 4]
    assert (held_out(labels, 0, 5, "client-0") == first).all()
    for other in ((1, 5, "client-0"), (0, 6, "client-0"), (0, 5, "client-1")):
        assert (held_out(labels, *other) != first).any()


def test_of_fewer_than_ten_samples_none_is_held_out() -> None:
    assert not held_out(np.zeros(9, dtype=np.int64), 0, 0, "client-0").any()
    assert not held_out(np.zeros(0, dtype=np.int64), 0, 0, "client-0").any()
