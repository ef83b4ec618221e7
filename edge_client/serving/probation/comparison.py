"""Whether a new model's answers have drifted: compared with those of the model before, on the same pictures.

A personalised model is meant to answer otherwise than the one before: it has met new classes, and on a stream that has
turned to them it may answer with nothing else. So disagreement is no fault. What is looked for is a model that has
stopped to tell pictures apart where its predecessor did, and surely. Four tests, all of them on at least
``MIN_ANSWERS`` answers about as many pictures; ``docs/serving.md`` has the numbers and what they don't catch.
"""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass

from replayfleet.edge_client.flow import Answers

MIN_ANSWERS = 25
"""And pictures: less than a second of a stream. Boxes of one picture say little of how a model does on others."""
WINDOW = 200
"""Answers that are remembered; pictures likewise."""
SURE = 0.6
"""Mean confidence of a predecessor whose answers count."""
TOLD_APART = 3
"""Classes that it gave, each at least ``TOLD_APART_SHARE`` of its answers."""
TOLD_APART_SHARE = 0.1
ONE_CLASS_SHARE = 0.98
KNOWN_SHARE = 0.05
"""Of the predecessor's answers; a class that it gave more seldom may be one that the new model has just learned."""
SAME = 1e-4
"""Confidences that differ by less are the same."""
SATURATED = 0.99
"""A sure model's confidences lie close to 1 and so to each other."""
SPREAD = 0.05
FOUND_SHARE = 0.8
MANY = 50
"""Objects in a mean picture, in a model that finds ``MANY_TIMES`` as many as its predecessor."""
MANY_TIMES = 10
MIN_TIMED = 30
"""Pictures whose median is believed."""
SOON_PICTURES = 3
SOON_S = 0.5
"""So many pictures that took the new model so long together suffice if it was too slow even for the fastest."""
SLOWER_TIMES = 5.0
SLOWER_S = 0.05


@dataclass(frozen=True, slots=True)
class Compared:
    """One picture and what two models said about it.

    Attributes:
        new: the answers of the model on probation.
        before: those of its predecessor.
        new_s: seconds that the new one needed.
        before_s: seconds that its predecessor needed, at about the same time.
    """

    new: Answers
    before: Answers
    new_s: float
    before_s: float


class _Said:
    """What one of the models said about the newest pictures."""

    def __init__(self) -> None:
        self._answers: collections.deque[tuple[int, float]] = collections.deque(maxlen=WINDOW)
        self.nums: collections.deque[int] = collections.deque(maxlen=WINDOW)
        self.times: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def add(self, answers: Answers, took_s: float) -> None:
        self._answers.extend(zip(answers.class_ids.tolist(), answers.confidences.tolist(), strict=True))
        self.nums.append(len(answers))
        self.times.append(took_s)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def enough(self) -> bool:
        """Whether answers and pictures suffice for a verdict."""
        return min(len(self._answers), len(self.nums)) >= MIN_ANSWERS

    def share(self, class_id: int) -> float:
        return sum(given == class_id for given, _ in self._answers) / max(1, len(self))

    def most(self) -> tuple[int, float]:
        """(the class given most often, its share)."""
        (class_id, count), *_ = collections.Counter(given for given, _ in self._answers).most_common(1)
        return class_id, count / len(self)

    @property
    def confidences(self) -> list[float]:
        return [confidence for _, confidence in self._answers]

    @property
    def tells_apart(self) -> bool:
        """Whether it gives several classes, none of them nearly always, and is sure of them."""
        counts = collections.Counter(given for given, _ in self._answers)
        often = [count for count in counts.values() if count >= TOLD_APART_SHARE * len(self)]
        return len(often) >= TOLD_APART and statistics.fmean(self.confidences) >= SURE


class Comparisons:
    """Collects what two models said, and says what is wrong with the new one."""

    def __init__(self) -> None:
        self._new, self._before = _Said(), _Said()

    @property
    def complete(self) -> bool:
        """Whether as much is known as is ever remembered."""
        num_pictures = len(self._new.nums)
        return num_pictures == WINDOW or (num_pictures >= MIN_ANSWERS and len(self._new) == WINDOW)

    def add(self, compared: Compared) -> None:
        self._new.add(compared.new, compared.new_s)
        self._before.add(compared.before, compared.before_s)

    def drift(self) -> str:
        """Return how the new model's answers have drifted; an empty string if they haven't, or too few are known."""
        return self._one_class() or self._no_difference() or self._nothing() or self._too_much()

    def slowness(self) -> str:
        """Return how much slower the new model is; an empty string if it isn't by far, or too little is known."""
        new, before = self._new.times, self._before.times
        if len(new) >= MIN_TIMED:
            new_s = statistics.median(new)
        elif len(new) >= SOON_PICTURES and sum(new) >= SOON_S:
            new_s = min(new)
        else:
            return ""
        before_s = statistics.median(before)
        if new_s <= SLOWER_TIMES * before_s + SLOWER_S:
            return ""
        return f"needs {1000 * new_s:.1f} ms for a picture, its predecessor {1000 * before_s:.1f} ms"

    def _one_class(self) -> str:
        """Always the same class, which its predecessor knew and told from others."""
        new, before = self._new, self._before
        if not (new.enough and before.enough and before.tells_apart):
            return ""
        class_id, share = new.most()
        if share < ONE_CLASS_SHARE or before.share(class_id) < KNOWN_SHARE:
            return ""
        return (
            f"answers {100 * share:.0f} % of {len(new)} with class {class_id}, "
            f"its predecessor {100 * before.share(class_id):.0f} %"
        )

    def _no_difference(self) -> str:
        """Always the same class and confidence, as a network with dead units or parameters of zero gives."""
        new, before = self._new, self._before
        if not (new.enough and before.enough) or new.most()[1] < 1:
            return ""
        same = max(new.confidences) - min(new.confidences) < SAME and max(new.confidences) < SATURATED
        if not same or max(before.confidences) - min(before.confidences) < SPREAD:
            return ""
        return f"answers {len(new)} times with confidence {new.confidences[0]:.4f}, its predecessor differs"

    def _nothing(self) -> str:
        """A detector that finds nothing where its predecessor found something in most pictures."""
        new, before = self._new.nums, self._before.nums
        num_found = sum(num > 0 for num in before)
        if len(new) < MIN_ANSWERS or any(new) or num_found < FOUND_SHARE * len(before):
            return ""
        return f"finds nothing in {len(new)} pictures, its predecessor something in {num_found}"

    def _too_much(self) -> str:
        """A detector that finds objects everywhere."""
        new, before = self._new.nums, self._before.nums
        if len(new) < MIN_ANSWERS:
            return ""
        mean_new, mean_before = statistics.fmean(new), statistics.fmean(before)
        if mean_new < MANY or mean_new < MANY_TIMES * mean_before:
            return ""
        return f"finds {mean_new:.0f} objects in a mean picture, its predecessor {mean_before:.1f}"
