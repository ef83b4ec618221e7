"""How long a round's training may take: whoever runs a method on a device may hand a ``Pace`` in.

Methods keep no clocks, so they ask: before a network's training begins, and after each of its steps. Without a pace
nothing is asked and every training has its full length, as in the papers. A training that is stopped keeps what it
reached: what fewer epochs would have given, but where step sizes fall within a round, as at ``cosine``. That devices
deliver part of a round's work is usual where they differ in speed (Li et al. 2020, "Federated Optimization in
Heterogeneous Networks", section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

ShouldStop: TypeAlias = Callable[[], bool]
"""Called once after every step of a training; True ends it."""


def never() -> bool:
    """Let a training have its full length."""
    return False


@dataclass(frozen=True, slots=True)
class Stage:
    """One network's training, at its full length.

    Attributes:
        num_epochs: passes over its samples.
        steps_per_epoch: steps of its optimiser per pass.
        can_wait: it may as well happen in a later round. A sub-generator of a class that was never learned can't: the
            class's samples are gone after this round. One that drifted can: the gate judges it again when the class is
            met next.
    """

    num_epochs: int
    steps_per_epoch: int
    can_wait: bool = False

    @property
    def num_steps(self) -> int:
        """All steps."""
        return self.num_epochs * self.steps_per_epoch


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return how many batches a pass has; a last, smaller one counts."""
    return -(-num_samples // batch_size)


class Pace(Protocol):
    """Who decides what is trained now, and for how long."""

    def task_model(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop:
        """Say when to stop the task model, whose training begins now.

        Args:
            stage: what begins.
            ahead: sub-generators that are sure to come after it; more may.
        """

    def sub_generator(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop | None:
        """Say when to stop a sub-generator, whose turn is now; None: not in this round.

        Args:
            stage: whose turn it is. Those that can't wait have their turns first.
            ahead: those whose turns come after it.
        """
