"""Local rounds that can wait for their training, so that many clients' networks train as one.

A method may write its client half as a generator: where ``local_round`` would train, it yields what to train and gets
the trained parameters back. ``alone`` answers each request by itself: that is ``InStep.local_round``, on a device.
``together`` advances many clients in step and trains in one call what they ask for at the same time: that is a
simulation on a GPU, where one small network at a time leaves the processor idle. Results differ in rounding alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from replayfleet.federation.methods.kit.pace import Pace, Stage
from replayfleet.federation.methods.kit.records import ClientId, RoundData, Sampler
from replayfleet.federation.methods.steps.grouped_task_model import TaskModelJob, train_task_models
from replayfleet.federation.methods.steps.memory import Retraining, train_all, train_in_time
from replayfleet.federation.methods.steps.sub_generators import SubGeneratorKind
from replayfleet.federation.methods.steps.task_model import Optimisation, train_task_model
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

    spec: AnyTaskSpec
    job: TaskModelJob
    optimisation: Optimisation
    ahead: tuple[Stage, ...] = ()

    def key(self) -> Hashable:
        """Requests with equal keys can be trained together."""
        return type(self), self.spec, self.optimisation

    def alone(self, pace: Pace | None = None) -> Any:
        """Train this one, for as long as ``pace`` allows."""
        job = self.job
        optimisation = self.optimisation.paced(len(job.images), pace, self.ahead)
        return train_task_model(
            self.spec, job.start, job.images, job.labels, optimisation, job.rng, alignment=job.alignment
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

    kind: SubGeneratorKind
    work: Sequence[Retraining]

    def key(self) -> Hashable:
        """Requests with equal keys can be trained together."""
        return type(self), self.kind

    def alone(self, pace: Pace | None = None) -> Any:
        """Train those of one client, as many and as long as ``pace`` allows."""
        return train_all(self.kind, self.work) if pace is None else train_in_time(self.kind, self.work, pace)

    @staticmethod
    def together(requests: Sequence[TrainSubGenerators]) -> list[Any]:
        """Train those of all clients; their keys are equal."""
        trained = iter(train_all(requests[0].kind, [one for request in requests for one in request.work]))
        return [[next(trained) for _ in request.work] for request in requests]


Request: TypeAlias = "TrainTaskModel | TrainSubGenerators"

Work: TypeAlias = Generator[Request, Any, T]
"""A client half in the making: yields requests, is sent their answers, returns its result."""


def alone(work: Work[T], pace: Pace | None = None) -> T:
    """Run one client half to its end, answering each request by itself; without a pace, at full length."""
    answer: Any = None
    while True:
        try:
            request = work.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = request.alone(pace)


class InStep(ABC):
    """A method whose client half is written as ``local_work``: its ``local_round`` answers each request by itself.

    It declares no slots of its own, so that a method with slots can have it as a second base.
    """

    __slots__ = ()

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


def together(works: Mapping[ClientId, Work[T]]) -> dict[ClientId, T]:
    """Run many client halves to their ends, training together what they ask for at the same time."""
    results: dict[ClientId, T] = {}
    waiting: dict[ClientId, Request] = {}
    answers: dict[ClientId, Any] = dict.fromkeys(works)
    while answers:
        for client_id, answer in answers.items():
            _advance(client_id, works[client_id], answer, waiting, results)
        answers = _answered(waiting)
        waiting = {}
    return {client_id: results[client_id] for client_id in works}


def _advance(
    client_id: ClientId, work: Work[T], answer: Any, waiting: dict[ClientId, Request], results: dict[ClientId, T]
) -> None:
    try:
        waiting[client_id] = work.send(answer)
    except StopIteration as end:
        results[client_id] = end.value


def _answered(waiting: Mapping[ClientId, Request]) -> dict[ClientId, Any]:
    answers: dict[ClientId, Any] = {}
    for key in dict.fromkeys(request.key() for request in waiting.values()):
        asking = [client_id for client_id, request in waiting.items() if request.key() == key]
        requests: list[Any] = [waiting[client_id] for client_id in asking]
        answers.update(zip(asking, type(requests[0]).together(requests), strict=True))
    return answers
