"""Labelled samples of a stream on their way into rounds: what came since the last round, and what is held out.

Before a sample is learned the served model has answered it, so the share that it got right is an accuracy on data that
it hasn't seen ("prequential"), at no cost in stored samples. Held-out samples are kept only if the operator asks: they
are real samples in memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge_client.sources.base import Samples

MAX_HELD_OUT = 4000
"""Held-out samples at most; further ones are not held out but learned from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorSettings:
    """How much a round takes.

    Attributes:
        min_samples: fewer are no round yet.
        max_samples: of a round; the newest stay, the rest is dropped and counted.
        hold_out: every so many labelled pictures, one is held out for testing; 0 holds out none.
    """

    min_samples: int = 50
    max_samples: int = 2000
    hold_out: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples is {self.min_samples}, max_samples {self.max_samples}; expected 2 <= min <= max"
            )
        if self.hold_out < 0 or self.hold_out == 1:
            raise ValueError(f"hold_out is {self.hold_out}, expected 0 (never) or at least 2")


class Collector:
    """Safe across threads.

    Args:
        settings: how much a round takes.
    """

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._waiting: list[Samples] = []
        self._held_out: list[Samples] = []
        self._round: tuple[int, Samples] | None = None
        self._answered: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._num_pictures = 0
        self._ended = False
        self._changing = threading.Lock()
        self.num_dropped = 0

    def add(self, samples: Samples, *, place: str = "", num_right: int = 0, num_answered: int = 0) -> None:
        """Take a picture's labelled samples.

        Args:
            samples: with known labels only; none is no picture.
            place: where the picture was taken.
            num_right: of its labelled things, how many the served model had answered rightly.
            num_answered: how many it had been asked about.
        """
        if not len(samples):
            return
        with self._changing:
            self._answered[place] += num_answered
            self._right[place] += num_right
            self._num_pictures += 1
            every = self._settings.hold_out
            full = sum(map(len, self._held_out)) + len(samples) > MAX_HELD_OUT
            if every and self._num_pictures % every == 0 and not full:
                self._held_out.append(samples)
            else:
                self._waiting.append(samples)
                self._drop_excess()

    def end(self) -> None:
        """Nothing more will come: the next round takes what there is, however little."""
        with self._changing:
            self._ended = True

    def round_samples(self, round_index: int) -> Samples | None:
        """Return a round's samples and forget the round before it; None while there are too few."""
        with self._changing:
            if self._round is not None and self._round[0] == round_index:
                return self._round[1]
            count = sum(map(len, self._waiting))
            if count < (2 if self._ended else self._settings.min_samples):
                return None
            samples, self._waiting = _joined(self._waiting), []
            self._round = (round_index, samples)
            return samples

    def held_out(self) -> Samples | None:
        """Return the held-out samples so far, or None if there are none."""
        with self._changing:
            return _joined(self._held_out) if self._held_out else None

    def stream_accuracy(self) -> Mapping[str, tuple[int, int]]:
        """Return place -> (answered rightly, answered) since the last call, and begin to count anew."""
        with self._changing:
            counted = sorted(self._answered.items())
            counts = {place: (self._right[place], answered) for place, answered in counted if answered}
            self._answered, self._right = Counter(), Counter()
            return counts

    def _drop_excess(self) -> None:
        excess = sum(map(len, self._waiting)) - self._settings.max_samples
        while excess > 0:
            oldest = self._waiting.pop(0)
            kept = max(0, len(oldest) - excess)
            if kept:
                self._waiting.insert(0, Samples(oldest.images[-kept:], oldest.labels[-kept:]))
            self.num_dropped += len(oldest) - kept
            excess -= len(oldest) - kept


def _joined(parts: list[Samples]) -> Samples:
    return Samples(np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts]))
