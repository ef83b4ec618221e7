"""pFedGraph with pFedGRP's generative replay on the client: an ablation of pFedGRP's aggregation.

``pFedGraph-replay`` of pFedGRP's section 5.3 and appendix B.1: Ye et al. 2023 with the generative replay architecture
of pFedGRP's section 4.1 in the local training.
Differences from the paper, which describes it in one sentence:

1. The client's personalised model filters the replay, and local training starts from it.
2. pFedGraph's own regulariser stays; ``regulariser_weight = 0`` leaves cross-entropy alone.
3. Sub-generators stay on the client, for this aggregator has no use for them; a client that loses its disk forgets.
4. Clients are weighed by real samples, as in pFedGraph; replay doesn't count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from replayfleet.federation.methods import pfedgraph_records as graph
from replayfleet.federation.methods.kit.pace import Pace
from replayfleet.federation.methods.kit.packing import COUNT
from replayfleet.federation.methods.kit.records import RoundData, Sampler
from replayfleet.federation.methods.kit.seeding import split_generator
from replayfleet.federation.methods.pfedgraph import PFedGraph
from replayfleet.federation.methods.steps.memory import (
    Memory,
    MemorySettings,
    first_trainings,
    retrained,
    retrainings,
    with_replay,
)
from replayfleet.federation.methods.steps.task_model import Optimisation, judge_with


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

    def local_round(
        self,
        state: Any,
        data: RoundData,
        download: graph.Download,
        rng: torch.Generator,
        *,
        sampler: Sampler,
        pace: Pace | None = None,
    ) -> tuple[Any, Any]:
        """Run pFedGraph's local round on this round's data and replay, then train drifted sub-generators (4.1.2)."""
        judge = judge_with(self.task, download.task_parameters)
        mixed = with_replay(self, state, data, judge, split_generator(rng), sampler)
        joined, training = mixed.joined(), split_generator(rng)
        optimisation = Optimisation.of(self).paced(len(joined.labels), pace, first_trainings(self, state, mixed))
        plain = self.trained(joined, download, training, optimisation)
        judge = judge_with(self.task, plain.task_parameters)
        work = retrainings(self, state, mixed, judge, split_generator(rng), sampler)
        updated = retrained(self, work, pace)
        num_filled = mixed.replay.num_filled
        upload = Upload(plain.task_parameters, len(data.labels), plain.initial, len(updated), num_filled)
        return state.after(data, updated), upload
