"""Local rounds that can wait for their training, so that many clients' networks train as one.

A method may write its client half as a generator: where ``local_round`` would train, it yields what to train and gets
the trained parameters back. ``alone`` answers each request by itself: that is ``InStep.local_round``, on a device.
``together`` advances many clients in step and trains in one call what they ask for at the same time: that is a
simulation on a GPU, where one small network at a time leaves the processor idle. Results differ in rounding alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch

from replayfleet.federation.errors import MethodFault
from replayfleet.federation.methods.kit.pace import Pace, Stage
from replayfleet.federation.methods.kit.records import ClientId, Parameters, RoundData, Sampler
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob, train_task_models
from replayfleet.federation.methods.steps.memory import Retraining, train_all, train_in_time
from replayfleet.federation.methods.steps.sub_generators.kinds import SubGeneratorKind
from replayfleet.federation.methods.steps.task_model import (
    AfterBackward,
    BatchLoss,
    Optimisation,
    descend,
    train_task_model,
)
from replayfleet.models.specs import AnyTaskSpec, DetectionSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainTaskModel:
    """Answered with the trained parameters.

    Attributes:
        spec: the task.
        job: what is trained, from where, on what.
        optimisation: how.
        ahead: sub-generators that are sure to be trained after it.
    """

    part: ClassVar[str] = "task model"

    spec: AnyTaskSpec
    job: TaskModelJob
    optimisation: Optimisation
    ahead: tuple[Stage, ...] = ()

    def key(self) -> Hashable:
        """Requests with equal keys can be trained together."""
        return type(self), self.spec, self.optimisation

    @property
    def sample_steps(self) -> int:
        """Samples times epochs, at full length."""
        return len(self.job.images) * self.optimisation.num_epochs

    def alone(self, pace: Pace | None = None) -> Any:
        """Train this one, for as long as ``pace`` allows."""
        job = self.job
        optimisation = self.optimisation.paced(len(job.images), pace, self.ahead)
        return train_task_model(
            self.spec,
            job.start,
            job.images,
            job.labels,
            optimisation,
            job.rng,
            alignment=job.alignment,
            prior=job.prior,
        )

    @staticmethod
    def together(requests: Sequence[TrainTaskModel]) -> list[Any]:
        """Train all; their keys are equal."""
        first = requests[0]
        if isinstance(first.spec, DetectionSpec):
            return [request.alone() for request in requests]  # a detector fills a GPU by itself
        return list(train_task_models(first.spec, [request.job for request in requests], first.optimisation))


@dataclass(frozen=True, slots=True)
class TrainSubGenerators:
    """Answered with the list of trained sub-generators, in the order of the work; no work, no sub-generators.

    Alone and with a pace, None stands for one that isn't trained in this round.
    """

    part: ClassVar[str] = "sub-generators"

    kind: SubGeneratorKind
    work: Sequence[Retraining]

    def key(self) -> Hashable:
        """Requests with equal keys can be trained together."""
        return type(self), self.kind

    @property
    def sample_steps(self) -> int:
        """Samples times epochs, at full length; a kind that isn't trained by gradients has an epoch of each."""
        return sum(len(one.images) * one.num_epochs for one in self.work)

    def alone(self, pace: Pace | None = None) -> Any:
        """Train those of one client, as many and as long as ``pace`` allows."""
        return train_all(self.kind, self.work) if pace is None else train_in_time(self.kind, self.work, pace)

    @staticmethod
    def together(requests: Sequence[TrainSubGenerators]) -> list[Any]:
        """Train those of all clients; their keys are equal."""
        trained = iter(train_all(requests[0].kind, [one for request in requests for one in request.work]))
        return [[next(trained) for _ in request.work] for request in requests]


@dataclass(frozen=True, slots=True)
class Descend:
    """A method's own loss to descend, each client's by itself; answered with the trained parameters.

    Attributes:
        spec: the task.
        start: parameters where training starts.
        num_samples: how many samples an epoch goes through.
        optimisation: how.
        rng: draws the order of samples.
        batch_loss: what a step descends, as ``task_model.descend`` takes it.
        after_backward: may change a step's gradients, likewise.
        ahead: sub-generators that are sure to be trained after it.
    """

    part: ClassVar[str] = "task model"

    spec: AnyTaskSpec
    start: Parameters
    num_samples: int
    optimisation: Optimisation
    rng: torch.Generator
    batch_loss: BatchLoss
    after_backward: AfterBackward | None = None
    ahead: tuple[Stage, ...] = ()

    def key(self) -> Hashable:
        """No two can be trained together: each has a loss of its own."""
        return id(self)

    @property
    def sample_steps(self) -> int:
        """Samples times epochs, at full length."""
        return self.num_samples * self.optimisation.num_epochs

    def alone(self, pace: Pace | None = None) -> Any:
        """Train this one, for as long as ``pace`` allows."""
        optimisation = self.optimisation.paced(self.num_samples, pace, self.ahead)
        return descend(
            self.spec, self.start, self.num_samples, optimisation, self.rng, self.batch_loss, self.after_backward
        )

    @staticmethod
    def together(requests: Sequence[Descend]) -> list[Any]:
        """Train one."""
        return [request.alone() for request in requests]


Request: TypeAlias = "TrainTaskModel | TrainSubGenerators | Descend"

Work: TypeAlias = Generator[Request, Any, T]
"""A client half in the making: yields requests, is sent their answers, returns its result."""


class InStep(ABC):
    """A method whose client half is written as ``local_work``: its ``local_round`` answers each request by itself.

    It declares no slots of its own, so that a method with slots can have it as a base.
    """

    __slots__ = ()

    trains_as_one: ClassVar[bool] = False
    """Whether it pays to run clients in step: whether their networks can train as one."""

    def local_round(
        self,
        state: Any,
        data: RoundData,
        download: Any,
        rng: torch.Generator,
        *,
        sampler: Sampler,
        pace: Pace | None = None,
    ) -> tuple[Any, Any]:
        """One client's half of a round, as on a device: (state, upload); shorter if ``pace`` says so."""
        return alone(self.local_work(state, data, download, rng, sampler=sampler), pace)

    @abstractmethod
    def local_work(
        self, state: Any, data: RoundData, download: Any, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Any, Any]]:
        """Be ``local_round``, but ask for the training, so that many clients' networks can train as one."""


def alone(work: Work[T], pace: Pace | None = None, answering: Callable[[Request], Any] | None = None) -> T:
    """Run one client half to its end, answering each request by itself; without a pace, at full length.

    Args:
        work: the client half.
        pace: how long training may take.
        answering: trains in place of ``request.alone``, for whoever measures it.
    """
    answer: Any = None
    while True:
        try:
            request = _asked(work, answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = request.alone(pace) if answering is None else answering(request)


def together(works: Mapping[ClientId, Work[T]]) -> dict[ClientId, T]:
    """Run many client halves to their ends, training together what they ask for at the same time."""
    results: dict[ClientId, T] = {}
    answers: dict[ClientId, Any] = dict.fromkeys(works)
    while answers:
        waiting: dict[Hashable, dict[ClientId, Any]] = {}
        for client_id, answer in answers.items():
            try:
                request = _asked(works[client_id], answer)
            except StopIteration as end:  # noqa: PERF203 - how a generator returns
                results[client_id] = end.value
            else:
                waiting.setdefault(request.key(), {})[client_id] = request
        answers = {}
        for requests in waiting.values():
            kind = type(next(iter(requests.values())))
            answers.update(zip(requests, kind.together(list(requests.values())), strict=True))
    return {client_id: results[client_id] for client_id in works}


def _asked(work: Any, answer: Any) -> Request:
    """Return what a client half asks for next; raises StopIteration with its result at the end."""
    if not isinstance(work, Generator):
        found = "None" if work is None else type(work).__name__
        raise MethodFault(f"local_work returned {found}, expected a generator: it yields what is to be trained")
    request: Any = work.send(answer)
    if not isinstance(request, (TrainTaskModel, TrainSubGenerators, Descend)):
        raise MethodFault(
            f"local_work yielded {type(request).__name__}, expected TrainTaskModel, TrainSubGenerators or Descend"
        )
    return request
