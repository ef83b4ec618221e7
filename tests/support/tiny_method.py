"""A method whose arithmetic fits in a head: every upload lost or counted twice changes its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods.kit.packing import COUNT, WEIGHTS, OneSet, Record, SubGenerators
from replayfleet.federation.methods.kit.records import Artefacts, Parameters
from replayfleet.models.specs import TaskSpec

TASK = TaskSpec(1, 28, ("left", "right"))


@dataclass(frozen=True)
class TinyUpload(Record):
    task: Annotated[Parameters, OneSet()]
    generators: Annotated[Mapping[int, Parameters], SubGenerators()] = field(default_factory=dict)
    count: Annotated[int, COUNT] = 1


@dataclass(frozen=True)
class TinyDownload(Record):
    personalised: Annotated[Parameters, OneSet(served=True)]
    average: Annotated[Parameters, OneSet()]
    generators: Annotated[Mapping[int, Parameters], SubGenerators()] = field(default_factory=dict)
    weights: Annotated[Mapping[str, float], WEIGHTS] = field(default_factory=dict)


@dataclass(frozen=True)
class TinyState:
    """Sums of everything that was ever uploaded, and how often."""

    sums: Mapping[str, Parameters] = field(default_factory=dict)
    generators: Mapping[str, Mapping[int, Parameters]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    average: Parameters = field(default_factory=dict)

    def pack(self) -> Artefacts:
        sets = {f"sum/{client}": parameters for client, parameters in self.sums.items()}
        for client, generators in self.generators.items():
            sets |= {f"generator/{client}/{c}": p for c, p in generators.items()}
        if self.average:
            sets["average"] = self.average
        return Artefacts(sets, {"times": dict(self.times)})

    @classmethod
    def unpack(cls, artefacts: Artefacts) -> TinyState:
        sums, generators = {}, {}
        for name, parameters in artefacts.parameter_sets.items():
            kind, _, rest = name.partition("/")
            if kind == "sum":
                sums[rest] = parameters
            elif kind == "generator":
                client, _, c = rest.partition("/")
                generators.setdefault(client, {})[int(c)] = parameters
        return cls(sums, generators, artefacts.facts["times"], artefacts.parameter_sets.get("average", {}))


@dataclass(frozen=True, kw_only=True)
class TinyMethod:
    name: ClassVar[str] = "tiny"
    stores_data: ClassVar[bool] = False
    Upload: ClassVar[type[Any]] = TinyUpload
    Download: ClassVar[type[Any]] = TinyDownload
    ClientState: ClassVar[type[Any]] = TinyState
    AggregatorState: ClassVar[type[Any]] = TinyState

    task: TaskSpec = TASK
    rate: float = 0.5

    def initial_states(self):
        return None, TinyState()

    def initial_download(self, rng: torch.Generator):
        start = {"w": torch.randn(4, generator=rng)}
        return TinyDownload(start, start)

    def local_round(self, state: Any, data: Any, download: TinyDownload, rng: torch.Generator, *, sampler: Any):
        trained = {"w": download.average["w"] + torch.randn(4, generator=rng)}
        return state, TinyUpload(trained, {0: {"g": torch.ones(3)}}, 1)

    def aggregate(self, state: TinyState, uploads: Mapping[str, TinyUpload], rng: torch.Generator, *, sampler: Any):
        noise = torch.randn(4, generator=rng)
        average = {"w": torch.stack([uploads[c].task["w"] for c in sorted(uploads)]).mean(0) + noise}
        sums, times, generators = dict(state.sums), dict(state.times), dict(state.generators)
        for client in sorted(uploads):
            before = sums.get(client, {"w": torch.zeros(4)})
            sums[client] = {"w": before["w"] + uploads[client].task["w"]}
            times[client] = times.get(client, 0) + 1
            generators[client] = {**generators.get(client, {}), **uploads[client].generators}
        new = TinyState(sums, generators, times, average)
        return new, {client: self.download_for(new, client, None) for client in sums}

    def download_for(self, state: TinyState, client_id: str, initial: Any):
        if client_id not in state.sums:
            return TinyDownload(state.average, state.average) if state.average else initial
        own = {"w": state.average["w"] * self.rate + state.sums[client_id]["w"]}
        weights = {client: 1 / len(state.sums) for client in sorted(state.sums)}
        return TinyDownload(own, state.average, state.generators[client_id], weights)

    def upload_layout(self, name: str):
        if name == "task":
            return {"w": torch.empty(4, device="meta")}
        return {"g": torch.empty(3, device="meta")} if name in {"sub-generator/0", "sub-generator/1"} else None

    def check_upload(self, upload: TinyUpload):
        if upload.count != 1:
            raise ValueError(f"count is {upload.count}, expected 1")
