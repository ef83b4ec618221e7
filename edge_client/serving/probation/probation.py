"""The time after a swap in which a model has to show that it can be trusted; decisions with ``now``, no waiting."""

from __future__ import annotations

from dataclasses import dataclass

from replayfleet.edge_client.serving.probation.comparison import Compared, Comparisons
from replayfleet.federation.errors import Reason


@dataclass(frozen=True, slots=True)
class ProbationRules:
    """How long a new model is watched, and how closely.

    Attributes:
        duration_s: at least.
        num_answered: pictures that it must have been asked about; comparison believes a median from so many on.
        at_most_s: then it is confirmed even if nothing asked it.
        check_every_s: between two looks at the golden vector.
        compare_every_s: between two pictures that its predecessor is asked about too, until enough were compared.
        compare_later_s: the same after that.
    """

    duration_s: float = 30.0
    num_answered: int = 30
    at_most_s: float = 600.0
    check_every_s: float = 5.0
    compare_every_s: float = 0.01
    compare_later_s: float = 0.5


class Probation:
    """One version's.

    Args:
        version: which.
        now: when it began to serve.
        rules: how it is watched.

    Attributes:
        starved: there was no memory when its golden vector was looked at last, so nothing says that it can serve.
    """

    def __init__(self, version: int, now: float, rules: ProbationRules) -> None:
        self.version = version
        self._rules = rules
        self._began = now
        self._num_answered = 0
        self._checked_at = self._compared_at = now
        self._comparisons = Comparisons()
        self.starved = False

    def answered(self, num_pictures: int) -> None:
        self._num_answered += num_pictures

    def compares(self, now: float) -> bool:
        """Whether its predecessor should be asked about a picture now."""
        rules = self._rules
        every_s = rules.compare_later_s if self._comparisons.complete else rules.compare_every_s
        return now - self._compared_at >= every_s

    def compared(self, compared: Compared, now: float) -> None:
        """Take what both said about one picture."""
        self._compared_at = now
        self._comparisons.add(compared)

    def checks(self, now: float) -> bool:
        """Whether the golden vector is due; the next one is due after a while."""
        due = now - self._checked_at >= self._rules.check_every_s
        if due:
            self._checked_at = now
        return due

    def verdict(self) -> tuple[Reason, str] | None:
        """Return why the model has to go."""
        drift = self._comparisons.drift()
        if drift:
            return Reason.DRIFTED, drift
        slowness = self._comparisons.slowness()
        return (Reason.TOO_SLOW, slowness) if slowness else None

    def passed(self, now: float) -> bool:
        """Whether it was watched for long enough."""
        rules, age_s = self._rules, now - self._began
        has_served = age_s >= rules.duration_s and self._num_answered >= rules.num_answered
        return has_served or (age_s >= rules.at_most_s and not self.starved)
