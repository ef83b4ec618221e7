"""Lets a round's training end before its deadline: the ``Pace`` that the training process hands to the method.

What is trained and for how long is ``devices.budget.plan``'s decision. Here is the clock: every training is planned
when its turn comes, with the time that is really left, and measured step by step, so that the next round's plan knows
this device better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import msgspec

from replayfleet.devices.budget import Plan, Speed, TrainingAllowance, Work, plan
from replayfleet.edge_client.learning.training.job import TrainCourse, TrainJob
from replayfleet.federation.methods.kit.pace import ShouldStop, Stage
from replayfleet.federation.methods.steps.memory import kind_of
from replayfleet.federation.methods.steps.sub_generators.kinds import Mixture, WganGp
from replayfleet.models.build import build_critic, build_generator, build_task_model
from replayfleet.models.counting import count_flops
from replayfleet.models.specs import LATENT_SIZE, AnyTaskSpec

_TRAINING = 6
"""Operations per multiply-accumulate of a forward pass: two there, four in the backward pass."""

_FIT_GFLOP = 0.2
"""Of a mixture: the moments of some hundred images, and merging them."""


class PacedRound:
    """Paces one job's round, if its method can be paced.

    Args:
        job: the round.
        deadline_at: when all of it must be done, on ``clock``; None for no deadline.
        clock: seconds, rising.
        say: told what becomes of the round.
    """

    def __init__(
        self,
        job: TrainJob,
        deadline_at: float | None,
        clock: Callable[[], float],
        say: Callable[[TrainCourse], None],
    ) -> None:
        self._job, self._deadline_at, self._clock, self._say = job, deadline_at, clock, say
        self._pace: DeadlinePace | None = None
        self.note = ""

    def begin(self, method: Any, speed: Speed) -> dict[str, DeadlinePace]:
        """Return what to hand to ``method.local_round`` beside its usual arguments; begins anew if called again."""
        self._name = method.name
        if "pace" not in signature(method.local_round).parameters:
            return {}
        job = self._job
        self._pace = DeadlinePace(
            job.manifest.round,
            job.allowance,
            unit_of(method, job.num_threads),
            speed,
            self._deadline_at,
            clock=self._clock,
            say=self._say,
        )
        return {"pace": self._pace}

    def finish(self) -> Speed:
        """Tell what became of the round, whose last byte is written; returns how fast it was."""
        if self._pace is not None:
            return self._pace.finish()
        if self._deadline_at is not None and self._clock() > self._deadline_at:
            self.note = f"the round took longer than it may, and method {self._name!r} can't be shortened"
        return Speed()


def unit_of(method: Any, num_threads: int) -> Work:
    """Return what one step of a method's networks costs; rough, for it only stands in until steps were measured."""
    task = method.task
    per_sample = _TRAINING * _pass_flops(task)
    task_gflop = 1e-9 * per_sample * method.batch_size
    kind = kind_of(method)
    sub_generator_gflop = 0.0 if kind is None else 10 * task_gflop
    if isinstance(kind, WganGp):
        sub_generator_gflop = _critic_step_gflop(kind)
    elif isinstance(kind, Mixture):
        sub_generator_gflop = _FIT_GFLOP
    return Work(task_gflop=task_gflop, sub_generator_gflop=sub_generator_gflop, num_threads=num_threads)


@cache
def _pass_flops(task: AnyTaskSpec) -> int:
    return count_flops(build_task_model(task), task.image_shape)


@cache
def _critic_step_gflop(kind: WganGp) -> float:
    """Return what a critic step costs.

    The critic sees real, drawn and mixed samples, and the penalty's second derivative is about another pass; of the
    generator there are a draw, and its own step once in a few.
    """
    generator = count_flops(build_generator(kind.spec), (LATENT_SIZE,))
    critic = count_flops(build_critic(kind.spec), kind.spec.image_shape)
    own_step = (generator + critic) * _TRAINING / kind.critic_steps_per_generator_step
    return 1e-9 * kind.batch_size * (4 * _TRAINING * critic + 2 * generator + own_step)


class DeadlinePace:
    """Implements ``federation.methods.kit.pace.Pace`` with a clock; one per round.

    Args:
        round_index: which.
        allowance: what the board may spend.
        unit: what a step costs, and the threads that it gets; how many steps there are is filled in later.
        speed: as measured in earlier rounds.
        deadline_at: on ``clock``; None for no deadline.
        clock: seconds, rising.
        say: told what becomes of the round, whenever that changes.
    """

    def __init__(  # the last two are the outside
        self,
        round_index: int,
        allowance: TrainingAllowance,
        unit: Work,
        speed: Speed,
        deadline_at: float | None,
        *,
        clock: Callable[[], float],
        say: Callable[[TrainCourse], None],
    ) -> None:
        self._allowance, self._unit, self._speed = allowance, unit, speed
        self._deadline_at, self._clock, self._say = deadline_at, clock, say
        self._began_at = clock()
        self._task: _Clocked | None = None
        self._sub_generators: list[_Clocked] = []
        self._full_sub_generators: int | None = None
        self._num_lost = 0
        self._course = TrainCourse(round_index)

    def task_model(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop:
        """Say when to stop the task model, so that there is time for what can't wait after it."""
        self._began_at = self._clock()
        new = tuple(sorted((other.num_steps for other in ahead), reverse=True))
        planned = self._plan(task_steps=stage.num_steps, new=new)
        self._tell(
            epochs=stage.num_epochs * planned.task_share,
            full_epochs=stage.num_epochs,
            sub_generators=planned.num_now,
            full_sub_generators=len(new),
            lost=len(new) - planned.num_now,
            in_time=planned.in_time,
        )
        self._task = _Clocked(stage, planned.task_s, self._clock)
        return self._task.should_stop

    def sub_generator(self, stage: Stage, ahead: Sequence[Stage]) -> ShouldStop | None:
        """Say when to stop a sub-generator; None if there is no time for it."""
        waiting = (stage, *ahead)
        planned = self._plan(
            new=tuple(one.num_steps for one in waiting if not one.can_wait),
            drifted=tuple(one.num_steps for one in waiting if one.can_wait),
        )
        if self._full_sub_generators is None:
            self._full_sub_generators = len(waiting)
        self._tell(
            sub_generators=len(self._sub_generators) + planned.num_now,
            full_sub_generators=self._full_sub_generators,
            lost=self._num_lost + planned.new_s.count(0.0),
        )
        seconds = (*planned.new_s, *planned.drifted_s)[0]
        if seconds == 0:
            self._num_lost += not stage.can_wait
            return None
        self._sub_generators.append(_Clocked(stage, seconds, self._clock))
        return self._sub_generators[-1].should_stop

    def finish(self) -> Speed:
        """Tell what became of the round, whose last byte is written; returns how fast it was."""
        task, others = self._task, self._sub_generators
        self._tell(
            epochs=0.0 if task is None else task.num_epochs,
            sub_generators=len(others),
            lost=self._num_lost,
            done=True,
        )
        return Speed(
            task_step_s=None if task is None else _per_step([task]),
            sub_generator_step_s=_per_step(others),
            other_s=self._other_s(),
        )

    def _plan(self, **steps: Any) -> Plan:
        left_s = None if self._deadline_at is None else max(0.0, self._deadline_at - self._clock())
        speed = self._speed
        if speed.task_step_s is None and self._task is not None:
            speed = replace(speed, task_step_s=_per_step([self._task]))
        if speed.sub_generator_step_s is None:
            speed = replace(speed, sub_generator_step_s=_per_step(self._sub_generators))
        if speed.other_s is not None:
            speed = replace(speed, other_s=max(0.0, speed.other_s - self._other_s()))
        return plan(self._allowance, left_s, speed, replace(self._unit, **steps))

    def _other_s(self) -> float:
        """Seconds since the task model's turn that no training took."""
        trained_s = sum(one.took_s for one in (self._task, *self._sub_generators) if one is not None)
        return self._clock() - self._began_at - trained_s

    def _tell(self, **changes: Any) -> None:
        course = msgspec.structs.replace(self._course, **changes)
        if course != self._course:
            self._course = course
            self._say(course)


class _Clocked:
    """One training while it runs: counts its steps, notes when the last one ended, stops at a time."""

    def __init__(self, stage: Stage, seconds: float, clock: Callable[[], float]) -> None:
        self.num_steps = 0
        self._stage = stage
        self._clock = clock
        self._began = self._last = clock()
        self._stop_at = self._began + seconds

    @property
    def took_s(self) -> float:
        """Seconds from the beginning to the end of the latest step."""
        return self._last - self._began

    @property
    def num_epochs(self) -> float:
        return self.num_steps / max(1, self._stage.steps_per_epoch)

    def should_stop(self) -> bool:
        """Count a step; True once another would end nearer to the end of its time behind it than before."""
        self.num_steps += 1
        self._last = self._clock()
        return self._last + 0.5 * self.took_s / self.num_steps >= self._stop_at


def _per_step(trainings: Sequence[_Clocked]) -> float | None:
    num_steps = sum(one.num_steps for one in trainings)
    return sum(one.took_s for one in trainings) / num_steps if num_steps else None
