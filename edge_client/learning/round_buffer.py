"""The labelled samples of the open round: bounded, and emptied when the round ends.

This is where "each sample may be used in one round only" is kept: nothing else on the device holds real samples.
"""

from __future__ import annotations

import numpy as np

from replayfleet.edge_client.flow import Samples

DEFAULT_CAPACITY = 20_000
"""Samples; 28x28x1 float32 at this count is 63 MB."""


class RoundBuffer:
    """Samples of one round.

    Args:
        capacity: most samples held; the newest win, and what was dropped is counted.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected at least 1")
        self._capacity = capacity
        self._round: int | None = None
        self._held: list[Samples] = []
        self.num_dropped = 0

    @property
    def round(self) -> int | None:
        """The round that the samples belong to, or None between rounds."""
        return self._round

    def __len__(self) -> int:
        return sum(len(samples) for samples in self._held)

    def open(self, round_index: int) -> None:
        """Begin a round; what an earlier round left is gone. Opening the open round again changes nothing."""
        if round_index != self._round:
            self.end()
            self._round = round_index

    def add(self, samples: Samples) -> None:
        """Add samples of the open round.

        Raises:
            ValueError: No round is open.
        """
        if self._round is None:
            raise ValueError("no round is open; samples belong to a round")
        self._held.append(samples)
        excess = len(self) - self._capacity
        self.num_dropped += max(0, excess)
        while excess > 0:
            oldest = self._held.pop(0)
            if len(oldest) > excess:
                self._held.insert(0, Samples(oldest.images[excess:], oldest.labels[excess:]))
            excess -= len(oldest)

    def samples(self) -> Samples | None:
        """All samples of the open round in the order they came, or None if there are none."""
        if not self._held:
            return None
        return Samples(
            np.concatenate([samples.images for samples in self._held]),
            np.concatenate([samples.labels for samples in self._held]),
        )

    def end(self) -> None:
        """Forget every sample: the round is over."""
        self._held = []
        self._round = None
        self.num_dropped = 0
