"""What FedGP's two halves exchange, and what its aggregator remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from replayfleet.federation.methods.fedcurv_records import Terms
from replayfleet.federation.methods.kit.packing import COUNT, OPTIONAL_FLAG, ByClient, Inline, OneSet, Record
from replayfleet.federation.methods.kit.records import ClientId, Parameters


@dataclass(frozen=True, slots=True)
class Upload(Record):
    """What a client sends after its local round.

    Attributes:
        task_parameters: the locally trained task model.
        num_samples: real samples it was trained on in this round.
        gradient: g_ref^k by parameter name, of the average model that the round started from on samples of the client's
            buffer; empty where the buffer was.
        fisher: as ``fedcurv_records.Upload.fisher``, with base ``fedcurv``; otherwise empty.
    """

    task_parameters: Annotated[Parameters, OneSet("task")]
    num_samples: Annotated[int, COUNT]
    gradient: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    fisher: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Download(Record):
    """What every client gets for a round.

    Attributes:
        task_parameters: the average model, which the client serves and starts from.
        reference: g_ref by parameter name, which its steps must not work against; empty before there is one.
        weights: as ``fedcurv_records.Download.weights``, with base ``fedcurv``; otherwise empty.
        targets: likewise.
        asks: whether the client sends its gradient alone this time and trains in the next round (``two_messages``).
    """

    task_parameters: Annotated[Parameters, OneSet("task", served=True)]
    reference: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    weights: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    targets: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    asks: Annotated[bool, OPTIONAL_FLAG] = False


@dataclass(frozen=True, slots=True)
class AggregatorState(Record):
    """What the aggregator remembers between rounds; it never sees a sample.

    Attributes:
        clients: as ``fedcurv_records.AggregatorState.clients``; nothing but ids with another base.
        average: the average model of the last round; empty before round 0's end.
        reference: the last g_ref; empty before there was one.
        weights: as ``fedcurv_records.AggregatorState.weights``, with base ``fedcurv``; otherwise empty.
        targets: likewise.
        asks: as the last downloads.
    """

    clients: Annotated[Mapping[ClientId, Terms], ByClient(part=Inline(kind=Terms))] = field(default_factory=dict)
    average: Annotated[Parameters, OneSet()] = field(default_factory=dict)
    reference: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    weights: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    targets: Annotated[Parameters, OneSet(gradient=True)] = field(default_factory=dict)
    asks: Annotated[bool, OPTIONAL_FLAG] = False
