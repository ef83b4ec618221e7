from __future__ import annotations

import numpy as np
import pytest

from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.learning.round_buffer import RoundBuffer


def _samples(*labels: int) -> Samples:
    images = np.array(labels, np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.float32)
    return Samples(images, np.array(labels, np.int64))


def _labels(buffer: RoundBuffer) -> list[int]:
    held = buffer.samples()
    return [] if held is None else held.labels.tolist()


def test_samples_belong_to_one_round_and_are_gone_when_it_ends() -> None:
    buffer = RoundBuffer()
    buffer.open(3)
    buffer.add(_samples(1, 2))
    buffer.open(3)
    buffer.add(_samples(3))
    assert (_labels(buffer), buffer.round, len(buffer)) == ([1, 2, 3], 3, 3)
    buffer.open(4)
    assert (_labels(buffer), buffer.round) == ([], 4)
    buffer.add(_samples(4))
    buffer.end()
    assert (buffer.samples(), buffer.round) == (None, None)
    with pytest.raises(ValueError, match="no round is open"):
        buffer.add(_samples(5))


def test_a_full_buffer_keeps_the_newest_and_counts_what_it_dropped() -> None:
    buffer = RoundBuffer(capacity=4)
    buffer.open(0)
    for chunk in ((0, 1), (2, 3), (4,), (5, 6)):
        buffer.add(_samples(*chunk))
    assert _labels(buffer) == [3, 4, 5, 6]
    assert buffer.num_dropped == 3
    buffer.add(_samples(*range(10)))
    assert _labels(buffer) == [6, 7, 8, 9]
    assert buffer.num_dropped == 13


def test_images_and_labels_stay_together() -> None:
    buffer = RoundBuffer(capacity=2)
    buffer.open(0)
    buffer.add(_samples(7, 8, 9))
    held = buffer.samples()
    assert held is not None
    assert held.images[:, 0, 0, 0].tolist() == held.labels.tolist() == [8, 9]
