"""What FedCurv's two halves exchange, and what its aggregator remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.kit.packing import COUNT, ByClient, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model, theta_j.
        num_samples: real samples it was trained on in this round.
        fisher: diag(I_j) by parameter name, at theta_j on this round's samples.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    num_samples: Annotated[int, COUNT]
    fisher: Annotated[Parameters, OneSet(gradient=True)]


@dataclass(frozen=True, slots=True)
class Download(Record):
    """What a client gets for a round.

    Attributes:
        task_parameters: the average model, which the client serves and starts from.
        weights: sum of diag(I_j) over the others, by parameter name; empty before there is one.
        targets: sum of diag(I_j) theta_j over the others.
    """

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    weights: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    targets: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Terms(Record):
    """Sums over clients, by parameter name; empty over none.

    Attributes:
        weights: of diag(I_j).
        targets: of diag(I_j) theta_j.
    """

    weights: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    targets: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds.

    Attributes:
        clients: client id -> what its last download held it to, of all clients that ever uploaded.
        average: the average model of the last round; empty before round 0's end.
        weights: of the last round, over all who uploaded: for who comes anew.
        targets: likewise.
    """

    clients: Annotated[Mapping[ClientId, Terms], ByClient(part=Inline(kind=Terms))] = field(default_factory=dict)
    average: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    weights: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    targets: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
