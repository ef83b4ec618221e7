"""A method without training: it nudges the last bias of a real task model, so a simulation of it takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods.kit.packing import OneSet, Record, SubGenerators
from replayfleet.federation.methods.kit.records import Artefacts, Parameters, RoundData
from replayfleet.federation.methods.steps.task_model import judge_with
from replayfleet.models.build import build_task_model, initialise
from replayfleet.models.specs import TaskSpec

BIAS = "head.bias"


@dataclass(frozen=True)
class NudgeUpload(Record):
    task: Annotated[Parameters, OneSet()]
    generators: Annotated[Mapping[int, Parameters], SubGenerators()]


@dataclass(frozen=True)
class NudgeDownload(Record):
    """From round 1 on it carries a set that never changes, so only its first transfer costs anything."""

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    constant: Annotated[Parameters, OneSet()] = field(default_factory=dict)


@dataclass(frozen=True)
class NudgeClient(Record):
    """One sub-generator per class met, which holds how many samples there were when it was made."""

    generators: Annotated[Mapping[int, Parameters], SubGenerators()] = field(default_factory=dict)


@dataclass(frozen=True)
class NudgeAggregator:
    models: Mapping[str, Parameters] = field(default_factory=dict)

    def pack(self) -> Artefacts:
        return Artefacts({f"clients/{client}": p for client, p in self.models.items()})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> NudgeAggregator:
        return cls({name.removeprefix("clients/"): p for name, p in artefacts.parameter_sets.items()})


@dataclass(frozen=True, kw_only=True)
class NudgeMethod:
    name: ClassVar[str] = "nudge"
    stores_data: ClassVar[bool] = False
    deployable: ClassVar[bool] = True
    Upload: ClassVar[type[Any]] = NudgeUpload
    Download: ClassVar[type[Any]] = NudgeDownload
    ClientState: ClassVar[type[Any]] = NudgeClient
    AggregatorState: ClassVar[type[Any]] = NudgeAggregator

    task: TaskSpec
    strength: float = 1.0
    retrain: bool = False

    def initial_states(self):
        return NudgeClient(), NudgeAggregator()

    def initial_download(self, rng: torch.Generator):
        return NudgeDownload(initialise(build_task_model(self.task), rng).state_dict())

    def local_round(self, state: Any, data: RoundData, download: Any, rng: torch.Generator, *, sampler: Any):
        """Push the classes of this round up, by a random amount."""
        nudged = dict(download.task_parameters)
        counts = torch.bincount(data.labels, minlength=self.task.num_classes)
        noise = 0.01 * torch.rand(self.task.num_classes, generator=rng)
        nudged[BIAS] = nudged[BIAS] + self.strength * (counts > 0) + noise
        fresh = {
            c: {"count": torch.tensor([float(n)]), "noise": torch.rand(1, generator=rng)}
            for c, n in data.counts().items()
            if self.retrain or c not in state.generators
        }
        return NudgeClient({**state.generators, **fresh}), NudgeUpload(nudged, fresh)

    def aggregate(self, state: Any, uploads: Mapping[str, Any], rng: torch.Generator, *, sampler: Any):
        """Give every client its own model back, with the mean of all biases; others keep what they last got."""
        mean = torch.stack([uploads[client].task[BIAS] for client in sorted(uploads)]).mean(dim=0)
        mean = mean + 0.01 * torch.rand(self.task.num_classes, generator=rng)
        latest = {client: {**uploads[client].task, BIAS: mean} for client in sorted(uploads)}
        new = NudgeAggregator({**state.models, **latest})
        return new, {client: self.download_for(new, client, None) for client in latest}

    def download_for(self, state: Any, client_id: str, initial: Any):
        if client_id not in state.models:
            return initial
        return NudgeDownload(state.models[client_id], {"ones": torch.ones(3)})

    def upload_layout(self, name: str):
        if name == "task":
            return build_task_model(self.task).state_dict()
        return {"count": torch.empty(1), "noise": torch.empty(1)}

    def check_upload(self, upload: Any) -> None:
        pass

    def predictor(self, download: Any):
        return judge_with(self.task, download.task_parameters)
