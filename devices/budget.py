"""What a board may spend on training, and what a round's training is cut down to so that it ends in time.

The rules of a cut, in this order:

1. The task model and the sub-generators that can't wait (classes that were never learned: their samples are gone after
   the round) share the time in proportion to their full lengths, so that each gets the same part of its epochs.
2. If that part is less than ``MIN_SHARE``, which is too little for a sub-generator to draw anything recognisable, fewer
   of them are trained: those of the classes with most samples.
   In a first round, of whose speed there is only a guess, all are tried. Once the task model is trained, the first of
   them has what time there is, however little: nothing else would use it.
3. Sub-generators that can wait (classes that drifted) are trained whole, worst first, in time that is left over. A
   device that never has time for a whole one trains the worst for as long as there is.

Decisions only: no clock, no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingAllowance:
    """What a board may spend on training; serving comes first.

    Attributes:
        core_share: of the board's cores, (0, 1]; never less than one core.
        memory_bytes: that the training process may hold; None for half of the board's memory.
        core_gflops: float32 GFLOP/s that one core sustains in training: a first guess, until rounds were measured.
        max_temperature_c: of the hottest thermal zone, above which training is slowed; None for the zones' own limits.
        max_power_w: of the board's input, above which training is slowed; None for no limit.
    """

    core_share: float = 0.5
    memory_bytes: int | None = None
    core_gflops: float = 4.0
    max_temperature_c: float | None = None
    max_power_w: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.core_share <= 1:
            raise ValueError(f"core_share is {self.core_share}, expected a number above 0 and at most 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}, expected at least 1 or None")
        for name in ("core_gflops", "max_temperature_c", "max_power_w"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, expected a number above 0")

    def threads(self, num_cores: int) -> int:
        """Return how many of ``num_cores`` cores training may use, at least one."""
        return max(1, int(self.core_share * num_cores))


MIN_SHARE = 0.1
"""Of its full length: what a training must get to be begun."""

UNMEASURED_SHARE = 0.1
"""Of the time left: what everything but training takes, until it was measured."""

MIN_BATCH_SIZE = 8
"""Smaller batches aren't tried when memory runs out."""

_INSTANT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a device trained lately; None where nothing was measured.

    Attributes:
        task_step_s: seconds per step of the task model.
        sub_generator_step_s: seconds per critic step, its share of generator steps included.
        other_s: seconds of a round beside them, from the task model's first step on: the gate, encoding, writing.
    """

    task_step_s: float | None = None
    sub_generator_step_s: float | None = None
    other_s: float | None = None

    def mixed_with(self, measured: Speed) -> Speed:
        """Return the mean of this and a round's measurements, where there are both."""
        return Speed(
            _mean(self.task_step_s, measured.task_step_s),
            _mean(self.sub_generator_step_s, measured.sub_generator_step_s),
            _mean(self.other_s, measured.other_s),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a round still has to train, at full length.

    Attributes:
        task_steps: of the task model; 0 once it is trained.
        new: steps of each sub-generator that can't wait, those of most samples first.
        drifted: steps of each that can, worst first.
        task_gflop: float32 operations of one step, forward and backward, in 10^9.
        sub_generator_gflop: likewise of a critic step.
        num_threads: that it is trained with.
    """

    task_steps: int = 0
    new: tuple[int, ...] = ()
    drifted: tuple[int, ...] = ()
    task_gflop: float = 0.0
    sub_generator_gflop: float = 0.0
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train now, and for how long.

    Attributes:
        task_s: seconds that the task model may take; infinite without a deadline.
        task_share: part of its steps that is expected to fit, 0 to 1.
        new_s: seconds for each of the sub-generators that can't wait; 0: no time for it.
        drifted_s: seconds for each of those that can; 0: in a later round.
        in_time: at least one step fits before the deadline.
    """

    task_s: float
    task_share: float
    new_s: tuple[float, ...]
    drifted_s: tuple[float, ...]
    in_time: bool = True

    @property
    def num_now(self) -> int:
        """Sub-generators that are trained in this round."""
        return sum(seconds > 0 for seconds in (*self.new_s, *self.drifted_s))


def plan(allowance: TrainingAllowance, left_s: float | None, speed: Speed, work: Work) -> Plan:
    """Return what of ``work`` to train in the time left.

    Args:
        allowance: what the board may spend; its guess stands in for what was never measured.
        left_s: seconds to when all must be done; None for no deadline.
        speed: as measured in earlier rounds, or in this one.
        work: what the round asks for.
    """
    if left_s is None:
        return Plan(math.inf, 1.0, (math.inf,) * len(work.new), (math.inf,) * len(work.drifted))
    task_step_s, sub_step_s = _step_times(allowance, speed, work)
    usable_s = max(0.0, left_s - (UNMEASURED_SHARE * left_s if speed.other_s is None else speed.other_s))
    task_full_s = work.task_steps * task_step_s
    new_full_s = [max(1, steps) * sub_step_s for steps in work.new]
    is_guess = speed.task_step_s is None
    num_new = len(new_full_s) if is_guess and usable_s > 0 else _most_that_fit(task_full_s, new_full_s, usable_s)
    if num_new == 0 and work.new and not work.task_steps and usable_s >= sub_step_s:
        num_new = 1
    must_s = task_full_s + sum(new_full_s[:num_new])
    stretch = usable_s / must_s if must_s > 0 else 1.0
    new_s = [full_s * stretch for full_s in new_full_s[:num_new]] + [0.0] * (len(work.new) - num_new)
    return Plan(
        task_s=task_full_s * stretch,
        task_share=min(1.0, stretch),
        new_s=tuple(new_s),
        drifted_s=_left_over([max(1, steps) * sub_step_s for steps in work.drifted], usable_s - must_s),
        in_time=usable_s >= (task_step_s if work.task_steps else 0.0),
    )


def smaller_batch(batch_size: int) -> int | None:
    """Return the batch size to try after one that memory didn't suffice for; None if it is small already."""
    return batch_size // 2 if batch_size // 2 >= MIN_BATCH_SIZE else None


def upload_reserve_s(left_s: float, last_upload_s: float | None) -> float:
    """Return how long before the round's deadline training should end, so that the upload arrives too.

    Args:
        left_s: seconds to the round's deadline.
        last_upload_s: seconds from the last upload's offer to its verdict; None if there was none.
    """
    reserve_s = 0.1 * left_s if last_upload_s is None else 0.5 + 2 * last_upload_s
    return min(reserve_s, 0.5 * left_s)


def _step_times(allowance: TrainingAllowance, speed: Speed, work: Work) -> tuple[float, float]:
    """Return (seconds per step of the task model, per critic step); one that was measured tells of the other."""
    task_s, sub_generator_s = speed.task_step_s, speed.sub_generator_step_s
    gflops = allowance.core_gflops * work.num_threads
    if task_s and work.task_gflop:
        gflops = work.task_gflop / task_s
    return (
        max(_INSTANT_S, work.task_gflop / gflops if task_s is None else task_s),
        max(_INSTANT_S, work.sub_generator_gflop / gflops if sub_generator_s is None else sub_generator_s),
    )


def _most_that_fit(task_full_s: float, new_full_s: Sequence[float], usable_s: float) -> int:
    """Return how many of the new ones can get ``MIN_SHARE`` beside the task model's."""
    needed_s = MIN_SHARE * task_full_s
    for place, full_s in enumerate(new_full_s):
        needed_s += MIN_SHARE * full_s
        if needed_s > usable_s:
            return place
    return len(new_full_s)


def _left_over(full_s: Sequence[float], spare_s: float) -> tuple[float, ...]:
    """Share ``spare_s`` among trainings that can wait: whole ones in their order, or a part of the first."""
    num, taken_s = 0, 0.0
    while num < len(full_s) and taken_s + full_s[num] <= spare_s:
        taken_s += full_s[num]
        num += 1
    if num == 0:
        part = bool(full_s) and spare_s > 0 and spare_s >= MIN_SHARE * full_s[0]
        return tuple(spare_s if place == 0 and part else 0.0 for place in range(len(full_s)))
    stretch = spare_s / taken_s if taken_s > 0 else 1.0
    return tuple(seconds * stretch if place < num else 0.0 for place, seconds in enumerate(full_s))


def _mean(earlier: float | None, now: float | None) -> float | None:
    if earlier is None or now is None:
        return earlier if now is None else now
    return (earlier + now) / 2
