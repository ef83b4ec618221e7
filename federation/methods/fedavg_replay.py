"""FedAvg with pFedGRP's generative replay on the client: an ablation of pFedGRP's aggregation.

``FedAVG-replay`` of pFedGRP's section 5.3 and appendix B.1: McMahan et al. 2017 with the generative replay architecture
of pFedGRP's section 4.1 in the local training.
Differences from the paper: ``docs/methods/fedavg-replay.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import COUNT
from replayfleet.federation.methods.kit.records import Judge, Parameters, RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import TrainSubGenerators, TrainTaskModel, Work
from replayfleet.federation.methods.steps.memory import (
    Memory,
    MemorySettings,
    first_trainings,
    retrainings,
    with_replay,
)
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.federation.methods.task_method import TaskMethod
from replayfleet.models.specs import TaskSpec


@dataclass(frozen=True, slots=True)
class Upload(TaskUpload):
    """A task model, and what the client's memory did in the round.

    Attributes:
        num_updates: sub-generators trained in this round.
        num_filled: replayed samples that the filter didn't recognise.
    """

    num_updates: Annotated[int, COUNT] = 0
    num_filled: Annotated[int, COUNT] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FedAvgReplay(FedAvg, MemorySettings):
    """FedAvg whose clients replay; settings are those of ``TaskMethod`` and ``MemorySettings``."""

    name: ClassVar[str] = "fedavg-replay"
    Upload: ClassVar[type[Any]] = Upload
    ClientState: ClassVar[type[Any]] = Memory

    task: TaskSpec

    def __post_init__(self) -> None:
        TaskMethod.__post_init__(self)
        self.check_memory()

    def local_work(
        self, state: Any, data: RoundData, download: TaskDownload, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Any, Any]]:
        """Run FedAvg's local round on this round's data and replay, then train drifted sub-generators (4.1.2)."""

        def training(samples: RoundData, own_rng: torch.Generator) -> TrainTaskModel:
            return self.training(samples, download.task_parameters, own_rng)

        judge = judge_with(self.task, download.task_parameters)
        done = yield from round_with_replay(self, training, state, data, judge, rng, sampler)
        return done.state, Upload(done.parameters, len(data.labels), done.num_updates, done.num_filled)


@dataclass(frozen=True, slots=True)
class Done:
    """What a client's round with replay leaves.

    Attributes:
        state: the memory after it.
        parameters: of the task model after it.
        num_updates: sub-generators trained.
        num_filled: replayed samples that the filter didn't recognise.
    """

    state: Memory
    parameters: Parameters
    num_updates: int
    num_filled: int


def round_with_replay(
    settings: MemorySettings,
    training: Callable[[RoundData, torch.Generator], Any],
    state: Memory,
    data: RoundData,
    judge: Judge,
    rng: torch.Generator,
    sampler: Sampler,
) -> Work[Done]:
    """Run a method's ``training`` on this round's data and the replay that ``judge`` recognises (section 4.1)."""
    mixed = with_replay(settings, state, data, judge, split_generator(rng), sampler)
    request = training(mixed.joined(), split_generator(rng))
    parameters = yield replace(request, ahead=first_trainings(settings, state, mixed))
    # 4.1.2: the gate asks the new model
    work = retrainings(settings, state, mixed, judge_with(settings.task, parameters), split_generator(rng), sampler)
    trained = yield TrainSubGenerators(settings.sub_generator_kind(), list(work.values()))
    updated = {key: result for key, result in zip(work, trained, strict=True) if result is not None}
    return Done(state.after(data, updated), parameters, len(updated), mixed.replay.num_filled)
