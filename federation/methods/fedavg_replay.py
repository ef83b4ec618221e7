"""FedAvg with pFedGRP's generative replay on the client: an ablation of pFedGRP's aggregation.

``FedAVG-replay`` of pFedGRP's section 5.3 and appendix B.1: McMahan et al. 2017 with the generative replay architecture
of pFedGRP's section 4.1 in the local training.
Differences from the paper, which describes it in one sentence:

1. The one model that there is filters the replay, and local training starts from it.
2. Sub-generators stay on the client, for this aggregator has no use for them; a client that loses its disk forgets.
3. Clients are weighed by real samples, as in FedAvg; replay doesn't count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit.packing import COUNT
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.kit.task_records import TaskDownload, TaskUpload
from replayfleet.federation.methods.lockstep import TrainSubGenerators, Work
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
        judge = judge_with(self.task, download.task_parameters)
        mixed = with_replay(self, state, data, judge, split_generator(rng), sampler)
        training = self.training(mixed.joined(), download, split_generator(rng))
        parameters = yield replace(training, ahead=first_trainings(self, state, mixed))
        judge = judge_with(self.task, parameters)
        work = retrainings(self, state, mixed, judge, split_generator(rng), sampler)
        trained = yield TrainSubGenerators(self.sub_generator_kind(), list(work.values()))
        updated = {key: result for key, result in zip(work, trained, strict=True) if result is not None}
        new_state = state.after(data, updated)
        upload = Upload(parameters, len(data.labels), len(updated), mixed.replay.num_filled)
        return new_state, upload
