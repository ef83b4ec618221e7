"""pFedGraph with pFedGRP's generative replay on the client: an ablation of pFedGRP's aggregation.

``pFedGraph-replay`` of pFedGRP's section 5.3 and appendix B.1: Ye et al. 2023 with the generative replay architecture
of pFedGRP's section 4.1 in the local training.
Differences from the paper: ``docs/methods/pfedgraph-replay.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods import pfedgraph_records as graph
from replayfleet.federation.methods.fedavg_replay import round_with_replay
from replayfleet.federation.methods.kit.packing import COUNT
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.lockstep import Descend, Work
from replayfleet.federation.methods.pfedgraph import PFedGraph
from replayfleet.federation.methods.steps.memory import Memory, MemorySettings
from replayfleet.federation.methods.steps.task_model import judge_with


@dataclass(frozen=True, slots=True)
class Upload(graph.Upload):
    """pFedGraph's upload, and what the client's memory did in the round.

    Attributes:
        num_updates: sub-generators trained in this round.
        num_filled: replayed samples that the filter didn't recognise.
    """

    num_updates: Annotated[int, COUNT] = 0
    num_filled: Annotated[int, COUNT] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PFedGraphReplay(PFedGraph, MemorySettings):
    """pFedGraph whose clients replay; settings are those of ``PFedGraph`` and ``MemorySettings``."""

    name: ClassVar[str] = "pfedgraph-replay"
    Upload: ClassVar[type[Any]] = Upload
    ClientState: ClassVar[type[Any]] = Memory

    def __post_init__(self) -> None:
        PFedGraph.__post_init__(self)
        self.check_memory()

    def local_work(
        self, state: Any, data: RoundData, download: graph.Download, rng: torch.Generator, *, sampler: Sampler
    ) -> Work[tuple[Any, Any]]:
        """Run pFedGraph's local round on this round's data and replay, then train drifted sub-generators (4.1.2)."""

        def training(samples: RoundData, own_rng: torch.Generator) -> Descend:
            return self.regularised(samples, download, own_rng)

        judge = judge_with(self.task, download.task_parameters)
        done = yield from round_with_replay(self, training, state, data, judge, rng, sampler)
        initial = download.task_parameters if download.is_initial else {}
        return done.state, Upload(done.parameters, len(data.labels), initial, done.num_updates, done.num_filled)
