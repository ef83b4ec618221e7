"""What pFedGraph's two halves exchange and remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.kit.packing import COUNT, FLAG, WEIGHTS, ByClient, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class Mixture(Record):
    """One client's personalised model.

    Attributes:
        task_parameters: the mix of all clients' task models: what it serves, starts from and is regularised towards.
        weights: client id -> share in it, its row of the collaboration graph; empty before the first aggregation and
            for late joiners.
    """

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    weights: Annotated[Mapping[ClientId, float], WEIGHTS] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Download(Mixture):
    """What a client gets for a round.

    Attributes:
        is_initial: whether it is the model that round 0 starts from, which the client then sends back once.
    """

    is_initial: Annotated[bool, FLAG] = False


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        num_samples: real samples it was trained on in this round.
        initial: the model that round 0 starts from, if the client's training began there; else empty. The aggregator
            made that model, so it holds the blob already and the set costs a line in the manifest.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    num_samples: Annotated[int, COUNT]
    initial: Annotated[Parameters, OneSet()] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        clients: client id -> its latest personalised model.
        common: the plain average of the last round, for clients that nobody heard of yet; empty before round 0's end.
        initial: the model that round 0 started from, the origin of all later cosines; empty before round 0's end.
    """

    clients: Annotated[Mapping[ClientId, Mixture], ByClient(part=Inline(kind=Mixture))] = field(default_factory=dict)
    common: Annotated[Parameters, OneSet("average")] = field(default_factory=dict)
    initial: Annotated[Parameters, OneSet()] = field(default_factory=dict)
