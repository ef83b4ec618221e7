"""Where labelled samples wait for their round: what came since the last one, and what is held out. All is bounded.

Of real samples a device holds nothing beside this: what operators may still label (``labels/kept_frames.py``), the
files of a source that is one (a data set, a folder), and while it trains the round's own file in memory. Each sample
is learned in one round only; when the next begins, the one before is forgotten, or waits again if it wasn't learned.

Before a sample is learned the served model has answered it, so the share that it got right is an accuracy on data that
it hasn't seen ("prequential"), at no cost in stored samples. Held-out samples are kept only if the operator asks: they
are real samples in memory.
"""

from __future__ import annotations

import collections
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from replayfleet.edge_client.flow import LabelProgress, Samples
from replayfleet.edge_client.learning.settings import MAX_ROUND_SAMPLES, LearningSettings

MAX_HELD_OUT = 4000
"""Held-out samples at most; further ones are not held out but learned from."""

RECENTLY = 500
"""Labelled things by which is told how the served model answers now: a fall shows at once, also after good weeks."""

MAX_WAITING_BYTES = 256 * 2**20
"""Memory of the samples that wait for their round, and as much again of those held out: whole pictures are large."""


class Collector:
    """Safe across threads.

    Args:
        settings: how much a round takes.
    """

    def __init__(self, settings: LearningSettings) -> None:
        self._settings = settings
        self._waiting: collections.deque[Samples] = collections.deque()
        self._num_waiting = self._waiting_bytes = self._held_out_bytes = 0
        self._held_out: list[Samples] = []
        self._round: tuple[int, list[Samples]] | None = None
        self._answered: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._recent: collections.deque[tuple[int, int]] = collections.deque()
        self._num_pictures: Counter[str] = Counter()
        self._num_new_pictures = 0
        self._again: list[Samples] = []  # the round's, until it is learned or they are taken back
        self._num_pictures_again = 0
        self._ended = False
        self._changing = threading.Lock()
        self.num_dropped = 0

    def add(
        self, samples: Samples, *, camera: str = "", place: str = "", num_right: int = 0, num_answered: int = 0
    ) -> None:
        """Take a picture's labelled samples.

        Args:
            samples: with known labels only; none is no picture.
            camera: whose picture it is; of each one of so many is held out.
            place: where the picture was taken.
            num_right: of its labelled things, how many the served model had answered rightly.
            num_answered: how many it had been asked about.
        """
        if not len(samples):
            return
        with self._changing:
            self._answered[place] += num_answered
            self._right[place] += num_right
            if num_answered:
                self._recent.append((num_answered, num_right))
                while sum(answered for answered, _ in self._recent) - self._recent[0][0] >= RECENTLY:
                    self._recent.popleft()
            self._num_pictures[camera] += 1  # cameras take turns: of all of them, each n-th could be one camera's
            every = self._settings.hold_out
            if every and self._num_pictures[camera] % every == 0 and self._can_hold_out(samples):
                self._held_out.append(samples)
                self._held_out_bytes += _size_bytes(samples)
            else:
                self._num_new_pictures += 1
                self._waiting.append(samples)
                self._num_waiting += len(samples)
                self._waiting_bytes += _size_bytes(samples)
                self._drop_excess()

    def take_back(self, samples: Samples) -> bool:
        """Forget what was added, this very object; False if a round has it already, or it was dropped.

        Should that round pass before it is learned, this doesn't come again.
        """
        with self._changing:
            for held, found in enumerate(self._held_out):
                if found is samples:
                    del self._held_out[held]
                    self._held_out_bytes -= _size_bytes(samples)
                    return True
            for waiting, found in enumerate(self._waiting):
                if found is samples:
                    del self._waiting[waiting]
                    self._num_waiting -= len(samples)
                    self._num_new_pictures -= 1
                    self._waiting_bytes -= _size_bytes(samples)
                    return True
            for again, found in enumerate(self._again):
                if found is samples:
                    del self._again[again]
                    self._num_pictures_again -= 1
                    break
            return False

    @property
    def round_index(self) -> int:
        """Of the round that took samples last; -1 before the first."""
        return -1 if self._round is None else self._round[0]

    def end(self) -> None:
        """Nothing more will come: the next round takes what there is, however little."""
        with self._changing:
            self._ended = True

    def round_samples(self, round_index: int) -> Samples | None:
        """Return a round's samples and forget the round before it; None while there are too few.

        Those of a round that passed and wasn't learned from come again.
        """
        with self._changing:
            if self._round is not None and self._round[0] == round_index:
                return _joined(self._round[1])
            self._take_again()
            if not self._is_enough():
                return None
            self._round = (round_index, [*self._waiting])
            self._again, self._num_pictures_again = [*self._waiting], self._num_new_pictures
            self._waiting.clear()
            self._num_waiting = self._waiting_bytes = self._num_new_pictures = 0
            return _joined(self._round[1])

    def used_up(self, round_index: int) -> None:
        """No later round is to get this one's samples."""
        with self._changing:
            if self._round is not None and self._round[0] == round_index:
                self._again, self._num_pictures_again = [], 0

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
            self._recent.clear()
            return counts

    def progress(self) -> LabelProgress:
        """What waits for the next round, what it needs, and how the newest since the last report were answered."""
        with self._changing:
            min_samples, min_pictures = self._needed()
            answered, right = (sum(counts) for counts in zip((0, 0), *self._recent, strict=True))
            return LabelProgress(self._num_waiting, min_samples, self._num_new_pictures, min_pictures, answered, right)

    def _take_again(self) -> None:
        self._waiting.extendleft(reversed(self._again))
        self._num_waiting += sum(map(len, self._again))
        self._waiting_bytes += sum(map(_size_bytes, self._again))
        self._num_new_pictures += self._num_pictures_again
        self._again, self._num_pictures_again = [], 0
        self._drop_excess()

    def _is_enough(self) -> bool:
        if self._ended:
            return self._num_waiting >= 2
        min_samples, min_pictures = self._needed()
        return self._num_waiting >= min_samples and self._num_new_pictures >= min_pictures

    def _needed(self) -> tuple[int, int]:
        """Return (samples, pictures) that a round needs: as many as wait, two or more, where another finds no room."""
        wanted = self._settings
        if self._waiting and self._waiting_bytes + _size_bytes(self._waiting[-1]) > MAX_WAITING_BYTES:
            return min(wanted.min_samples, max(2, self._num_waiting)), min(wanted.min_pictures, self._num_new_pictures)
        return wanted.min_samples, wanted.min_pictures

    def _can_hold_out(self, samples: Samples) -> bool:
        num_held = sum(map(len, self._held_out)) + len(samples)
        return num_held <= MAX_HELD_OUT and self._held_out_bytes + _size_bytes(samples) <= MAX_WAITING_BYTES

    def _drop_excess(self) -> None:
        """Drop the oldest pictures, the last of them in part where samples are counted, never the newest."""
        while len(self._waiting) > 1 and (
            self._waiting_bytes > MAX_WAITING_BYTES
            or self._num_waiting - len(self._waiting[0]) >= self._settings.max_samples
        ):
            self._drop(len(self._waiting[0]))
        self._drop(max(0, self._num_waiting - self._settings.max_samples))

    def _drop(self, count: int) -> None:
        if not count:
            return
        oldest = self._waiting.popleft()
        kept = len(oldest) - count
        if kept:
            self._waiting.appendleft(Samples(oldest.images[-kept:], oldest.labels[-kept:]))
        self._num_waiting -= count
        self._waiting_bytes -= _size_bytes(oldest) - (_size_bytes(self._waiting[0]) if kept else 0)
        self.num_dropped += count


def newest(samples: Samples, at_most: int = MAX_ROUND_SAMPLES) -> tuple[Samples, int]:
    """Return the newest of a round's samples, and how many were dropped for them."""
    num_dropped = max(0, len(samples) - at_most)
    return Samples(samples.images[num_dropped:], samples.labels[num_dropped:]) if num_dropped else samples, num_dropped


def _joined(parts: Iterable[Samples]) -> Samples:
    parts = list(parts)
    return Samples(np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts]))


def _size_bytes(samples: Samples) -> int:
    return samples.images.nbytes + samples.labels.nbytes
